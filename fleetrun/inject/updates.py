"""Tells who wants to know that the optimizer has changed the parameters."""

from __future__ import annotations

import functools
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from .imports import after_import

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from .evidence import Evidence
    from .wish import Wish

    # The optimizer (dygraph) or the program (static), and the number of updates so far.
    Heard = Callable[[Any, int], None]

_METHODS = ("step", "minimize")
_listeners: list[Heard] = []
# Called before each update of an optimizer in dynamic graphs, with the optimizer.
_preparers: list[Callable[[Any], None]] = []
_count = 0
# How many wrapped methods are running within each other: minimize may call step, and an
# optimizer may consist of others. The outermost is the update.
_depth = 0
# Called after all listeners, because these report or end the process.
_reports: list[Heard] = []


def on_update(listener: Heard) -> None:
    """Call LISTENER after every update; in the order of registration."""
    _listeners.append(listener)


def before_update(listener: Callable[[Any], None]) -> None:
    """Call LISTENER with the optimizer before every update in dynamic graphs."""
    _preparers.append(listener)


def happened(source: Any) -> None:
    """Say that SOURCE, an optimizer or a program, has just updated parameters."""
    global _count  # noqa: PLW0603 - one process, one training
    _count += 1
    for listener in (*_listeners, *_reports):
        listener(source, _count)


def report_last(listener: Heard) -> None:
    """Call LISTENER after every update, when all others have heard of it."""
    _reports.append(listener)


def install(asked: Wish, proof: Evidence) -> None:  # noqa: ARG001 - every part's signature
    """Count the updates of every optimizer, write the evidence after the first, and report."""

    def count(_source: Any, number: int) -> None:
        proof.updates = number
        if not proof.graph:
            proof.graph = "dygraph"

    on_update(count)
    after_import("paddle.optimizer.optimizer", _watch)
    rank = os.environ.get("PADDLE_TRAINER_ID", "0")
    times = os.environ.get("FLEETRUN_STEP_TIMES", "").replace("{rank}", rank)
    if times:
        keeper = _StepTimes(times, proof)
        after_import("paddle", keeper.watch_losses)
        report_last(keeper.keep)
    heartbeat = os.environ.get("FLEETRUN_HEARTBEAT")
    if heartbeat:
        report_last(_Heartbeat(heartbeat, proof).beat)


def write_after_the_first(proof: Evidence) -> None:
    """Write the proof when everything is said about the first update; then end, if that is due."""

    def write(_source: Any, number: int) -> None:
        if number == 1:
            proof.claim()
            proof.write()

    report_last(write)
    last = os.environ.get("FLEETRUN_STOP_AFTER", "")
    if last.isdigit() and int(last) > 0:
        report_last(functools.partial(_stop, proof, int(last)))


def _watch(module: ModuleType) -> None:
    wrap_all(module.Optimizer, _wrap)


def wrap_all(base: Any, wrap: Callable[[Any], None]) -> None:
    """WRAP the methods of the class BASE, and of every class that is ever derived from it."""
    for kind in _family(base):
        wrap(kind)
    inherited = base.__dict__.get("__init_subclass__")

    def __init_subclass__(kind: Any, /, **options: Any) -> None:
        if inherited is None:
            super(base, kind).__init_subclass__(**options)
        else:
            inherited.__get__(None, kind)(**options)
        wrap(kind)

    base.__init_subclass__ = classmethod(__init_subclass__)


def _family(base: Any) -> list[Any]:
    """Return the class BASE and all that are derived from it now, each once."""
    kinds = [base]
    for kind in kinds:
        kinds += [each for each in kind.__subclasses__() if each not in kinds]
    return kinds


def only_averages(kind: Any) -> bool:
    """Whether the optimizer KIND changes no parameter, but averages what others make of them."""
    return any(each.__name__ == "ModelAverage" for each in kind.__mro__)


def _wrap(kind: Any) -> None:
    if only_averages(kind):
        return
    for name in _METHODS:
        method = kind.__dict__.get(name)
        if callable(method):
            setattr(kind, name, _counted(method))


def _counted(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def update(optimizer: Any, *args: Any, **options: Any) -> Any:
        global _depth  # noqa: PLW0603
        if _depth == 0 and _preparers and _is_dynamic():
            for prepare in _preparers:
                prepare(optimizer)
        _depth += 1
        try:
            result = method(optimizer, *args, **options)
        finally:
            _depth -= 1
        if _depth == 0 and _is_dynamic():
            happened(optimizer)
        return result

    return update


def _is_dynamic() -> bool:
    """Whether parameters were really changed: elsewhere these methods only write a program."""
    paddle: Any = sys.modules["paddle"]
    return bool(paddle.in_dynamic_mode()) and not paddle.base.dygraph.base.in_to_static_mode()


class _Heartbeat:
    """Tells the launcher that training goes on, at most once a second."""

    _EVERY_S = 1.0

    def __init__(self, path: str, proof: Evidence) -> None:
        self._path = path
        self._proof = proof
        self._next_at = 0.0

    def beat(self, _source: Any, number: int) -> None:
        """Write the NUMBER of the update."""
        now = time.monotonic()
        if now < self._next_at or not self._proof.claim():
            return
        self._next_at = now + self._EVERY_S
        try:
            with open(self._path, "w", encoding="utf-8") as file:
                file.write(str(number))
        except OSError as error:
            self._next_at = float("inf")
            print(f"fleetrun: the heartbeat cannot be written: {error}", file=sys.stderr)


class _StepTimes:
    """Keeps when each update was made, and the loss before it: `number seconds loss` lines."""

    def __init__(self, path: str, proof: Evidence) -> None:
        self._path = path
        self._proof = proof
        self._loss: Any = None
        # The newest line waits: fetching its loss now would wait for the device.
        self._newest: tuple[int, float, Any] | None = None

    def watch_losses(self, paddle: Any) -> None:
        """Remember every tensor that backward starts from."""
        backward = paddle.Tensor.backward

        @functools.wraps(backward)
        def remember(loss: Any, *args: Any, **options: Any) -> Any:
            if loss.size == 1:
                self._loss = loss.detach()
            return backward(loss, *args, **options)

        paddle.Tensor.backward = remember

    def keep(self, _source: Any, number: int) -> None:
        """Note the update NUMBER."""
        now = time.monotonic()
        if number == 1:
            import atexit

            # Not sooner: what is registered last is called first, and Paddle's own end takes
            # the tensors away.
            atexit.register(self.flush)
        self.flush()
        self._newest, self._loss = (number, now, self._loss), None

    def flush(self) -> None:
        """Write the newest line."""
        if self._newest is None or not self._proof.claim():
            return
        number, at, loss = self._newest
        self._newest = None
        text = "" if loss is None else repr(float(loss))
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(f"{number} {at:.6f} {text}\n")


def _stop(proof: Evidence, last: int, source: Any, number: int) -> None:
    """End the rank after the update LAST, as if the script had ended."""
    if number < last or not proof.claim():
        return
    import atexit

    from . import equality

    # Who ends first would close the connections of the others' last exchange.
    equality.wait_for_all(source)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of data loaders must not hold the rank back.
    os._exit(0)
