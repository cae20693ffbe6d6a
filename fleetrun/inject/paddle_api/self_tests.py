"""Checks on tiny tensors that Paddle's private functions do what we rely on.

In this process everything is on the CPU, without random numbers or threads, so that importing
Paddle has no new side effects. A test yields each claim and whether it holds.
"""

from __future__ import annotations

import functools
import os
import select
import signal
import sys
from typing import TYPE_CHECKING, Any

from . import on_device, programs, tensors
from .private_names import MERGE, REDUCER, STATIC, TESTED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Findings = Iterator[tuple[str, bool]]


# The limit for a child in seconds; it takes milliseconds.
_CHILD_TIMEOUT_S = 20.0


def failure(capability: str) -> str:
    """Return the first failed claim of CAPABILITY's self-test as a clause; empty if none fails.

    In an untested version of Paddle, C++ functions may take other arguments and crash, so a child
    runs the test; likewise on a device of a plug-in, whose kernels are unknown.
    """
    test = _TESTS.get(capability)
    if test is None:
        return ""
    paddle: Any = sys.modules["paddle"]
    if capability in ON_DEVICE and are_on_device():
        return on_device.failures(str(paddle.device.get_device()), ON_DEVICE)[capability]
    if getattr(paddle, "__version__", "") in TESTED:
        return failure_at(capability, paddle.CPUPlace())
    return _in_child(lambda: failure_at(capability, paddle.CPUPlace()))


def are_on_device() -> bool:
    """Whether a child tests the device of this rank, which may differ from host to host."""
    paddle: Any = sys.modules["paddle"]
    return str(paddle.device.get_device()).partition(":")[0] not in ("cpu", "gpu")


def _in_child(test: Callable[[], str]) -> str:
    """Return what TEST returns in a forked process, or how that process has ended."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            # Paddle prints a stack on a signal.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            os.write(writer, test().encode() or b"\0")
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        is_answered = bool(select.select([pipe], [], [], _CHILD_TIMEOUT_S)[0])
        answer = pipe.read().decode() if is_answered else ""
    if not is_answered:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if not answer:
        return "the self-test crashes" if is_answered else "the self-test does not end"
    return answer.strip("\0")


def failure_at(capability: str, place: Any) -> str:
    """Return the first failed claim of CAPABILITY's self-test with tensors at PLACE, or nothing."""
    paddle: Any = sys.modules["paddle"]
    claim = "the self-test"
    try:
        for claim, holds in _TESTS[capability](paddle, place):
            if not holds:
                return f"it is not true that {claim}"
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        return f"the self-test fails after `{claim}` ({type(error).__name__}: {text})"
    return ""


def _leaf(paddle: Any, place: Any, numbers: list[Any]) -> Any:
    """Return a parameter at PLACE, named so that the script's parameter names do not change."""
    values = paddle.to_tensor(numbers, dtype="float32", place=place)
    with paddle.utils.unique_name.guard():
        return paddle.base.framework.EagerParamBase.from_tensor(values, trainable=True)


def _backward(paddle: Any, *parameters: Any) -> None:
    """Run a backward that gives each of PARAMETERS a gradient of twice its values."""
    paddle.autograd.backward([(parameter * parameter).sum() for parameter in parameters])


def _reducer(paddle: Any, place: Any) -> Findings:
    first, second = _leaf(paddle, place, [[1.0, 2.0]]), _leaf(paddle, place, [[3.0], [4.0]])
    unused = _leaf(paddle, place, [[5.0], [6.0]])
    parameters = [first, second, unused]
    heard: list[bool] = []
    noted: list[int] = []
    tensors.on_gradient(first, lambda *_: heard.append(first.grad is not None))
    tensors.on_gradient(second, functools.partial(noted.append, 2))
    _backward(paddle, first, second)
    yield "a hook is called once the gradient is there", heard == [True]
    yield "a hook is called without arguments", noted == [2]
    grads = tensors.gradients(parameters)
    yield (
        "gradients are read in order, None where there is none",
        (grads[2] is None and _numbers(*grads[:2]) == [2.0, 4.0, 6.0, 8.0]),
    )
    with paddle.no_grad():
        average = paddle.to_tensor([7.0, 8.0], place=place)
        tensors.share_memory(average, second.grad)
        yield (
            "a gradient takes other memory and keeps its shape",
            _numbers(second.grad) == [7.0, 8.0] and second.grad.shape == [2, 1],
        )
        address = first.grad.data_ptr()
        first.clear_gradient()
        tensors.keep_memory(first)
    _backward(paddle, first)
    yield "a cleared gradient keeps its memory", first.grad.data_ptr() == address
    with paddle.no_grad():
        tensors.set_gradient(unused, paddle.to_tensor([[30.0], [40.0]], place=place))
        yield "a gradient can be set", _numbers(unused.grad) == [30.0, 40.0]
        turned = paddle.t(paddle.to_tensor([[1.0, 2.0], [3.0, 4.0]], place=place))
        yield (
            "a layout is made row-major",
            (
                _numbers(turned.contiguous()) == [1.0, 3.0, 2.0, 4.0]
                and turned.contiguous().is_contiguous()
            ),
        )


def _numbers(*several: Any) -> list[float]:
    return [float(number) for tensor in several for number in tensor.numpy().ravel()]


def _merge(paddle: Any, place: Any) -> Findings:
    parameter = _leaf(paddle, place, [1.0, 2.0])
    _backward(paddle, parameter)
    before = parameter.grad.inplace_version
    with paddle.no_grad():
        parameter.grad.scale_(0.5)
    yield "a write in place counts", parameter.grad.inplace_version != before
    assigned = paddle.to_tensor([7.0, 8.0], place=place)
    tensors.gradient_attribute().__set__(parameter, assigned)
    yield "a gradient can be assigned", _numbers(parameter.grad) == [7.0, 8.0]
    _backward(paddle, parameter)
    yield "backward adds to it", _numbers(parameter.grad) == [9.0, 12.0]
    parameter.clear_gradient()
    yield (
        "a gradient can be cleared",
        parameter.grad is None or _numbers(parameter.grad) == [0.0, 0.0],
    )


def _static(paddle: Any, _place: Any) -> Findings:
    # Programs are written while no tracer of dynamic graphs is active.
    with paddle.base.framework._dygraph_guard(None):
        yield from _rewritten(paddle.base.framework.Program())


def _rewritten(program: Any) -> Findings:
    block = program.global_block()
    for name in ("a", "b"):
        block.create_var(name=name, shape=[2], dtype="float32")
    attrs = {"scale": 2.0, "op_role": 1}
    for name in ("a", "b"):
        variable = programs.variable(block, name)
        programs.insert(
            block, 0, type="scale", inputs={"X": variable}, outputs={"Out": variable}, attrs=attrs
        )
    programs.sync(program)
    yield "operators can be inserted", [op.input_arg_names for op in block.ops] == [["b"], ["a"]]
    yield "operators have roles", [op.attr("op_role") for op in block.ops] == [1, 1]
    programs.remove(block, 0)
    programs.rename(block, "a", "c")
    programs.sync(program)
    yield (
        "operators can be removed, and variables renamed",
        ([op.output_arg_names for op in block.ops] == [["c"]]),
    )


_TESTS: dict[str, Callable[[Any, Any], Findings]] = {
    REDUCER: _reducer,
    MERGE: _merge,
    STATIC: _static,
}
# Those whose tests need memory of the training device.
ON_DEVICE = (REDUCER, MERGE)
