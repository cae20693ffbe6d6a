"""Records where the time of a few steps goes, for `--profile`: a Chrome trace for each rank."""

from __future__ import annotations

import atexit
import functools
import os
import time
from typing import TYPE_CHECKING, Any

from .. import flight_recorder, heartbeats, updates
from ..import_hooks import after_import, in_place_of, watch_method
from .recorder import NS_PER_US, SYNC, TRAINING, Recorder, now

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

_VARIABLE = "FLEETRUN_PROFILE"
_PROFILE = "the profile"


def from_environment() -> Recorder | None:
    """Return the recorder that the launcher requests as `FIRST-LAST:PATH`, or None."""
    steps, _, path = os.environ.get(_VARIABLE, "").partition(":")
    first, _, last = steps.partition("-")
    if not path or not first.isdigit() or not last.isdigit():
        return None
    rank = os.environ.get("PADDLE_TRAINER_ID", "")
    recorder = Recorder(path, int(first), int(last), int(rank) if rank.isdigit() else 0)
    # A script may end before the last of the steps.
    atexit.register(recorder.write)
    return recorder


def watch_updates(recorder: Recorder) -> None:
    """Record each update of the optimizer; call this before other observers of updates register."""
    updates.before_update(lambda _: recorder.open("update"), _PROFILE)
    for observe in (updates.on_update, updates.on_skipped):
        observe(lambda _source, _number: recorder.close("update"), _PROFILE)


def watch(recorder: Recorder, paddle: Any, *, has_strategy: bool) -> None:
    """Record forwards, backwards, data loading and buckets of PADDLE; call this last."""
    # Comparing ranks and heartbeats happen between the update and this.
    updates.on_update(lambda _source, _number: recorder.end_step(), _PROFILE)
    if has_strategy:
        from . import bucket_spans

        bucket_spans.watch(recorder)
    _wrap(paddle.Tensor, "backward", "backward", recorder)
    _wrap(paddle.autograd, "backward", "backward", recorder)
    _watch_hooks(recorder, paddle)
    _wrap(paddle.nn.Layer, "__call__", "forward", recorder)
    _watch_loaders(paddle.io.DataLoader, recorder)
    recorder.device = lambda: paddle.get_device().partition(":")[0]
    _watch_syncs(recorder, paddle)
    after_import("paddle.base.core", functools.partial(_watch_collectives, recorder))
    _watch_programs(paddle.static.Executor, recorder, counts=not has_strategy)


def _wrap(owner: Any, attribute: str, name: str, recorder: Recorder) -> None:
    """Record the outermost calls of the function ATTRIBUTE of OWNER as NAME."""
    depth = 0

    @in_place_of(owner, attribute)
    def recorded(function: Any, *args: Any, **options: Any) -> Any:
        nonlocal depth
        if not recorder.is_on or depth:
            return function(*args, **options)
        depth += 1
        begin, before = now(), time.thread_time_ns() + recorder.blocked_ns
        try:
            return function(*args, **options)
        finally:
            depth -= 1
            details: dict[str, Any] = {}
            if name == "forward":
                details["layer"] = type(args[0]).__name__
            elif recorder.reduces:
                busy_ns = time.thread_time_ns() + recorder.blocked_ns - before
                details["busy"] = busy_ns / NS_PER_US
                recorder.reduces = False
            recorder.add(name, TRAINING, begin, details=details)


def _watch_hooks(recorder: Recorder, paddle: Any) -> None:
    """Record how long Python's code in a backward waits for anything but its device and ranks.

    Around it, a backward without computation waits for other ranks.
    """
    depth = 0

    def watched(function: Any, *args: Any) -> Any:
        nonlocal depth
        if not recorder.is_on or depth:
            return function(*args)
        depth += 1
        known_ns = time.thread_time_ns() + recorder.waited_ns
        begin = now()
        try:
            return function(*args)
        finally:
            depth -= 1
            known_ns = time.thread_time_ns() + recorder.waited_ns - known_ns
            recorder.blocked_ns += max(0, now() - begin - known_ns)

    @in_place_of(paddle.Tensor, "register_hook")
    def register_hook(register: Any, tensor: Any, hook: Any) -> Any:
        return register(tensor, functools.partial(watched, hook))

    in_place_of(paddle.autograd.py_layer.PyLayerBackward, "backward")(watched)


def _watch_syncs(recorder: Recorder, paddle: Any) -> None:
    """Record where the script waits for its device, which may wait for other ranks."""
    depth = 0

    def record(wait: Any, *args: Any, **options: Any) -> Any:
        nonlocal depth
        if not recorder.is_on or depth or (args and args[0].place.is_cpu_place()):
            return wait(*args, **options)
        depth += 1
        begin = now()
        try:
            return wait(*args, **options)
        finally:
            depth -= 1
            recorder.add(SYNC, TRAINING, begin)

    for method in ("numpy", "item", "cpu"):
        in_place_of(paddle.Tensor, method)(record)
    in_place_of(paddle.device, "synchronize")(lambda wait, *_, **__: record(wait))


def _watch_collectives(recorder: Recorder, core: ModuleType) -> None:
    """Record the collectives that are called from Python; on a device, only their launch."""
    task: Any = getattr(core, "task", None)
    for method in ("wait", "synchronize") if task is not None else ():

        @in_place_of(task, method)
        def waited(wait: Any, *args: Any) -> Any:
            begin = now()
            try:
                return wait(*args)
            finally:
                recorder.add_collective("wait", begin)

    kind: Any = core.ProcessGroup
    for method, operation in flight_recorder.methods_of(kind):

        @in_place_of(kind, method)
        def recorded(call: Any, *args: Any, _name: str = operation.name, **options: Any) -> Any:
            begin = now()
            try:
                return call(*args, **options)
            finally:
                recorder.add_collective(_name, begin)

    def note(_reducer: Any) -> None:
        recorder.has_reducer, recorder.reduces = True, recorder.is_on

    if hasattr(core, "EagerReducer"):
        watch_method(core.EagerReducer, "prepare_for_backward", before=note)


def _watch_loaders(kind: Any, recorder: Recorder) -> None:
    """Record how long the script waits for each batch of a DataLoader."""

    @in_place_of(kind, "__iter__")
    def __iter__(begin_iteration: Any, loader: Any) -> Any:
        return _Batches(begin_iteration(loader), recorder)


class _Batches:
    """An iterator over batches that records how long each took."""

    def __init__(self, batches: Iterator[Any], recorder: Recorder) -> None:
        self._batches = batches
        self._recorder = recorder

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._batches, attribute)

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Any:
        begin = now()
        try:
            return next(self._batches)
        finally:
            self._recorder.add("data", TRAINING, begin)


def _watch_programs(kind: Any, recorder: Recorder, *, counts: bool) -> None:
    """Record each run of a static program; it is a step if COUNTS, unless its update is one.

    A run without inputs and outputs is that of a startup program, and no step.
    """

    @in_place_of(kind, "run")
    def recorded(run: Any, executor: Any, *args: Any, **options: Any) -> Any:
        begin = now()
        recorder.begin_program()
        try:
            return run(executor, *args, **options)
        finally:
            recorder.end_program(begin)
            is_step = len(args) > 1 or options.get("feed") or options.get("fetch_list")
            if counts and is_step and not heartbeats.are_programs_watched:
                recorder.end_step()
