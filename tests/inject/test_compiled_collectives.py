"""What Paddle communicates within a function is recorded as one collective of its group."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from fleetrun.inject import compiled_collectives, flight_recorder
from fleetrun.inject.flight_recorder import FlightRecorder
from fleetrun.records import flightfile
from fleetrun.records.flightfile import BLOCKING, RAISED, Collective, CollectiveChannel

if TYPE_CHECKING:
    from pathlib import Path


class Tensor:
    """Something with a dtype, a shape and perhaps a gradient."""

    dtype = "paddle.float32"

    def __init__(self, *shape: int, stop_gradient: bool = True) -> None:
        self.shape = list(shape)
        self.stop_gradient = stop_gradient

    def element_size(self) -> int:
        """Return the bytes of a number."""
        return 4


def recorder(folder: Path) -> FlightRecorder:
    """Return the recorder of rank 1, in all ranks (0 in Paddle) and in ranks 0 and 1 (7)."""
    made = FlightRecorder(str(folder / "ring"))
    made.add(SimpleNamespace(name=lambda: "XCCL"), (0, 1, 2), 0)
    made.add(SimpleNamespace(name=lambda: "XCCL"), (0, 1), 7)
    return made


def seen(folder: Path) -> tuple[Collective, ...]:
    record = flightfile.read(str(folder / "ring"), 0)
    assert record is not None
    return record.collectives


def backwards(made: FlightRecorder) -> Any:
    """Return Paddle's backward and the gradients of `paddle.grad`, recorded by MADE."""

    class EagerReducer:
        """Sums gradients outside of Python."""

        def prepare_for_backward(self) -> None:
            pass

    core = SimpleNamespace(
        EagerReducer=EagerReducer,
        eager=SimpleNamespace(
            run_backward=lambda: None, run_partial_grad=lambda outputs, inputs: (outputs, inputs)
        ),
    )
    flight_recorder._patch_backward(made, core)
    return core.eager.run_backward, core.eager.run_partial_grad


WORLD, PAIR = CollectiveChannel((0, 1, 2)), CollectiveChannel((0, 1))


def kernels(made: FlightRecorder, **functions: Any) -> Any:
    module = SimpleNamespace(
        core=SimpleNamespace(eager=SimpleNamespace(Tensor=Tensor)), **functions
    )
    compiled_collectives._patch_kernels(made, module)
    return module


def test_a_kernel_is_a_collective_of_the_group_that_it_names(tmp_path: Path) -> None:
    def loss(*_: object) -> tuple[Tensor, Tensor]:
        return Tensor(4, 8), Tensor(4, 1, stop_gradient=False)

    def fails(*_: object) -> None:
        raise RuntimeError("peer lost")

    made = recorder(tmp_path)
    ops = kernels(
        made,
        c_softmax_with_cross_entropy=loss,
        margin_cross_entropy=loss,
        c_concat=fails,
        c_identity=loss,
        all_reduce_=lambda tensor, *_: tensor,
    )
    tensor = Tensor(4, 8)
    assert len(ops.c_softmax_with_cross_entropy(tensor, Tensor(4, 1), -100, 7, 1, 2)) == 2
    ops.margin_cross_entropy(tensor, Tensor(4, 1), False, 0, 1, 3, 1.0)
    # Without a group, each rank computes its own.
    ops.margin_cross_entropy(tensor, Tensor(4, 1), False, 0, 0, 1, 1.0)
    with pytest.raises(RuntimeError, match="peer lost"):
        ops.c_concat(tensor, 1, 2, 7, True, True)
    ops.c_softmax_with_cross_entropy(tensor, tensor, "ignore_index", -1, "ring_id", 7, "rank", 1)
    # What builds a program, a group that is not known, what does not communicate.
    assert ops.all_reduce_("value", 7, 0) == "value"
    ops.all_reduce_(tensor, 9, 0)
    ops.c_identity(tensor, 7, True, True)
    # A gradient of another kernel communicates by itself.
    backwards(made)[0]()
    first, second, third, fourth = seen(tmp_path)
    assert (first.operation, first.channel) == ("c_softmax_with_cross_entropy", PAIR)
    assert (first.tensor, first.sequence, first.is_open) == ("float32 [4, 8]", 1, False)
    assert (second.operation, second.channel) == ("margin_cross_entropy", WORLD)
    assert (third.operation, third.state) == ("c_concat", RAISED)
    assert (fourth.operation, fourth.channel, fourth.sequence) == (first.operation, PAIR, 3)


def test_a_backward_in_which_layers_communicate_is_recorded(tmp_path: Path) -> None:
    def normalize(*args: Any) -> tuple[Tensor, ...]:
        return (Tensor(2, 3, stop_gradient=args[0].stop_gradient), Tensor(3))

    made = recorder(tmp_path)
    run, _ = backwards(made)
    ops = kernels(
        made,
        sync_batch_norm_=normalize,
        global_scatter=lambda tensor, *_: tensor,
    )
    wanted = Tensor(2, 3, stop_gradient=False)
    rest = (*[Tensor(3)] * 4,)
    ops.sync_batch_norm_(wanted, *rest, False)
    # A test, and what needs no gradient.
    ops.sync_batch_norm_(wanted, *rest, True)
    ops.global_scatter(Tensor(2, 3), rest[0], rest[0], "use_calc_stream", True, "ring_id", 7)
    run()
    run()
    ops.global_scatter(wanted, rest[0], rest[0], "use_calc_stream", True, "ring_id", 7)
    run()
    calls = [(call.operation, call.channel.ranks, call.state) for call in seen(tmp_path)]
    assert calls == [
        ("sync_batch_norm", (0, 1, 2), flightfile.ASYNCHRONOUS),
        ("global_scatter", (0, 1), flightfile.ASYNCHRONOUS),
        ("backward", (0, 1, 2), flightfile.ASYNCHRONOUS),
        ("global_scatter", (0, 1), flightfile.ASYNCHRONOUS),
        ("backward", (0, 1), flightfile.ASYNCHRONOUS),
    ]


def test_gradients_of_paddle_grad_that_may_communicate_are_said_not_to_be_recorded(
    tmp_path: Path,
) -> None:
    made = recorder(tmp_path)
    run, gradients = backwards(made)
    ops = kernels(made, sync_batch_norm_=lambda *_: Tensor(3, stop_gradient=False))

    def unrecorded() -> tuple[str, ...]:
        record = flightfile.read(str(tmp_path / "ring"), 0)
        assert record is not None
        return record.unrecorded

    assert gradients("y", "x") == ("y", "x")
    ops.sync_batch_norm_(Tensor(3), *[Tensor(3)] * 4, False)
    run()
    gradients("y", "x")
    assert unrecorded() == ()
    ops.sync_batch_norm_(Tensor(3), *[Tensor(3)] * 4, False)
    gradients("y", "x")
    assert unrecorded() == ("paddle.grad",)
    run()
    assert [call.operation for call in seen(tmp_path)] == ["sync_batch_norm", "backward"] * 2


class Operator:
    """An operator of a program, in either of Paddle's representations."""

    def __init__(self, name: str, ring: int | None = None, *blocks: Any) -> None:
        self._ring, self._blocks = ring, blocks
        self._name = name

    def name(self) -> str:
        """Return the name."""
        return f"pd_op.{self._name}"

    def has_attr(self, name: str) -> bool:
        """Whether it has the attribute NAME."""
        return name == "ring_id" and self._ring is not None

    def attrs(self) -> dict[str, int | None]:
        """Return its attributes."""
        return {"ring_id": self._ring}

    def blocks(self) -> tuple[Any, ...]:
        """Return the blocks within."""
        return self._blocks


class Variable(Operator):
    """An operator of Paddle 2."""

    @property
    def type(self) -> str:
        """The name."""
        return self._name

    def attr(self, _name: str) -> int | None:
        """Return the only attribute."""
        return self._ring


def program(*operators: Any, is_old: bool) -> Any:
    block = SimpleNamespace(ops=list(operators))
    if is_old:
        return SimpleNamespace(blocks=[block])
    return SimpleNamespace(global_block=lambda: block)


@pytest.mark.parametrize(("operator", "ring"), [("all_gather", 9), ("send_v2", 7)])
@pytest.mark.parametrize("is_old", [True, False])
def test_a_program_is_a_collective_of_each_group_that_it_names(
    tmp_path: Path, is_old: bool, operator: str, ring: int
) -> None:
    class Executor:
        """Runs programs."""

        def run(self, program: Any = None, feed: str = "") -> tuple[Any, str]:
            assert len([call for call in seen(tmp_path) if call.is_open]) == opened
            return program, feed

    made = recorder(tmp_path)
    kind = Variable if is_old else Operator
    plain = program(kind("c_identity", 7), kind("relu"), kind("fused_attention", -1), is_old=is_old)
    module = SimpleNamespace(Executor=Executor, default_main_program=lambda: plain)
    compiled_collectives._patch_executor(made, module)
    opened = 0
    assert Executor().run(feed="x") == (None, "x")
    assert Executor().run(plain) == (plain, "")
    nested = () if is_old else (SimpleNamespace(ops=[kind("all_reduce", 7)]),)
    operators = [kind("while", None, *nested), kind("sync_batch_norm_"), kind("all_reduce", 7)]
    summed = program(*operators, is_old=is_old)
    opened = 2
    assert Executor().run(program=SimpleNamespace(_program=summed), feed="y")[1] == "y"
    assert Executor().run(summed) == (summed, "")
    channels = {(call.operation, call.channel, call.sequence) for call in seen(tmp_path)}
    assert channels == {("program", channel, at) for channel in (WORLD, PAIR) for at in (1, 2)}
    opened = 0
    Executor().run(program(kind(operator, ring), is_old=is_old))
    assert len(seen(tmp_path)) == 4
    record = flightfile.read(str(tmp_path / "ring"), 0)
    assert record is not None
    assert record.unrecorded == ("static programs",)


@pytest.mark.parametrize("is_old", [True, False])
def test_a_program_of_to_static_is_recorded_with_its_backward(tmp_path: Path, is_old: bool) -> None:
    kind = Variable if is_old else Operator
    forward = program(kind("c_concat", 7), is_old=is_old)
    backward = program(kind("mp_allreduce_sum", 7), is_old=is_old)

    class PartialProgramLayer:
        """A translated function."""

        def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
            return inputs

    class Old(PartialProgramLayer):
        forward_program, backward_program = forward, backward

    class New(PartialProgramLayer):
        program = SimpleNamespace(forward_program=forward, backward_program=backward)

    made = recorder(tmp_path)
    run, _ = backwards(made)
    translated: Any = Old if is_old else New
    compiled_collectives._patch_partial_programs(
        made, SimpleNamespace(PartialProgramLayer=translated)
    )
    layer = translated()
    layer([Tensor(1)])
    run()
    layer([Tensor(1, stop_gradient=False)])
    run()
    calls = [(call.operation, call.channel.ranks) for call in seen(tmp_path)]
    assert calls == [("program", (0, 1)), ("program", (0, 1)), ("backward", (0, 1))]


class Description(Operator):
    """An operator in a file."""

    def type(self) -> str:
        """Return the name."""
        return self._name

    def attr(self, _name: str) -> int | None:
        """Return the only attribute."""
        return self._ring


def test_a_loaded_program_is_recorded_with_its_backward(tmp_path: Path) -> None:
    operators = [Description("matmul_v2"), Description("c_allreduce_sum", 7)]
    block = SimpleNamespace(op_size=lambda: len(operators), op=operators.__getitem__)

    class Holder:
        """A program that was read from a file."""

        infer_program = SimpleNamespace(num_blocks=lambda: 1, block=[block].__getitem__)

    def run_program(_layer: object, inputs: list[Tensor], _holder: Holder) -> list[Tensor]:
        return inputs

    module: Any = SimpleNamespace(_run_dygraph=run_program)
    made = recorder(tmp_path)
    run, _ = backwards(made)
    compiled_collectives._patch_loaded(made, module)
    holder = Holder()
    for stop_gradient in (True, False):
        module._run_dygraph("layer", [Tensor(1, stop_gradient=stop_gradient)], holder)
        run()
    calls = [(call.operation, call.channel.ranks) for call in seen(tmp_path)]
    assert calls == [("program", (0, 1)), ("program", (0, 1)), ("backward", (0, 1))]


def test_a_barrier_outside_of_a_group_has_a_channel_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = SimpleNamespace(gloo_barrier=lambda: "met")
    importer: Any = ModuleType("importer")
    importer.gloo_barrier = module.gloo_barrier
    monkeypatch.setitem(sys.modules, "importer", importer)
    made = FlightRecorder(str(tmp_path / "ring"))
    names = {"gloo_barrier": "gloo_barrier", "of another Paddle": "none"}
    compiled_collectives._patch_barriers(made, "", names, module)
    # Before there is a group, nothing is recorded.
    assert importer.gloo_barrier() == "met"
    made.add(SimpleNamespace(name=lambda: "XCCL"), (0, 1, 2), 0)
    assert module.gloo_barrier() == "met"
    (call,) = seen(tmp_path)
    assert call.channel == WORLD._replace(operation="gloo_barrier")
    assert (call.sequence, call.state, call.is_open) == (1, BLOCKING, False)


def test_the_wait_of_the_main_thread_for_a_key_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class TCPStore:
        """Keys that ranks write."""

        def get(self, key: str) -> bytes:
            return key.encode()

        def add(self, key: str, number: int) -> int:
            return len(key) + number

        def wait(self, key: str) -> None:
            raise TimeoutError(key)

    monkeypatch.setenv("PADDLE_TRAINER_ID", "1")
    made = FlightRecorder(str(tmp_path / "ring"))
    compiled_collectives._patch_store(made, SimpleNamespace(TCPStore=TCPStore))
    assert TCPStore().get("before there is a group") == b"before there is a group"
    made.add(SimpleNamespace(name=lambda: "XCCL"), (0, 1, 2), 0)
    assert TCPStore().get("a") == b"a"
    with pytest.raises(TimeoutError):
        TCPStore().wait("b")
    assert TCPStore().add("ab", 0) == 2
    thread = threading.Thread(target=TCPStore().get, args=("c",))
    thread.start()
    thread.join()
    issued = flightfile.issued(str(tmp_path / "ring"))
    for _ in range(3):
        TCPStore().get("a")
        TCPStore().add("ab", 0)
    # Polls are no progress.
    assert flightfile.issued(str(tmp_path / "ring")) == issued
    first, second, third = seen(tmp_path)
    assert first.channel == CollectiveChannel((1,), 0, "store.get")
    assert first.channel.is_store
    assert third.channel.is_store
    assert (first.operation, first.state, first.is_open) == ("store.get", BLOCKING, False)
    assert (second.operation, second.state) == ("store.wait", RAISED)
