"""Records when each bucket of gradients is sent, in flight, and waited for.

Our reducer and communicators are wrapped from outside, so that only profiled jobs pay for it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from .. import allreduce_stages, communicators
from ..dygraph import reducer
from ..import_hooks import in_place_of, watch_method
from ..paddle_api import tensors
from .recorder import FLIGHT, TRAINING, WAIT, now

if TYPE_CHECKING:
    from collections.abc import Callable

    from .recorder import Recorder

# The track of collectives that belong to no bucket.
_OTHERS = 1000


def watch(recorder: Recorder) -> None:
    """Wrap the reducer and what runs the stages of allreduces."""
    threads = allreduce_stages.ThreadWork
    for owner, name, recorded in (
        (reducer.Reducer, "_send", _send),
        (communicators.Communicator, "all_reduce", _all_reduce),
        (communicators, "run", _run),
        (threads, "__init__", _init_work),
        (allreduce_stages.DeviceStages, "submit", _submit),
    ):
        in_place_of(owner, name)(functools.partial(recorded, recorder))
    watch_method(threads, "run", before=_begin)
    watch_method(threads, "finish", before=_end)


class _Flight:
    """An allreduce under way, from its first stage to the end of its last."""

    def __init__(self, tensor: Any, recorder: Recorder) -> None:
        self._recorder = recorder
        self._name, self._track = recorder.label or ("agreement", _OTHERS)
        self._size = {"bytes": tensors.nbytes(tensor)}
        self.begin: int | None = None

    def end(self) -> None:
        """Record the span."""
        begin = now() if self.begin is None else self.begin
        self._recorder.add(self._name, self._track, begin, details=self._size, kind=FLIGHT)


def _send(recorder: Recorder, send: Callable[..., None], self: Any, number: int) -> None:
    bucket = self.buckets[number]
    recorder.label = (f"bucket {number}", number + 1)
    begin = now()
    try:
        send(self, number)
    finally:
        recorder.label = None
    if recorder.is_on:
        size = {"bytes": bucket.nbytes, "gradients": len(bucket.parameters)}
        recorder.add(f"send bucket {number}", TRAINING, begin, details=size, kind="send")
        if bucket.work is not None:
            bucket.work = _TimedWork(bucket.work, f"wait for bucket {number}", recorder)


class _TimedWork:
    """A pending work; the time spent waiting for it is recorded."""

    def __init__(self, work: Any, name: str, recorder: Recorder) -> None:
        self._work = work
        self._name = name
        self._recorder = recorder

    def wait(self) -> None:
        """Wait for the work."""
        begin = now()
        self._work.wait()
        self._recorder.add(self._name, TRAINING, begin, kind=WAIT)


def _all_reduce(recorder: Recorder, all_reduce: Any, *args: Any, **options: Any) -> Any:
    """Record an allreduce that is done at once as time spent waiting."""
    begin = now()
    work = all_reduce(*args, **options)
    if work is None:
        name = recorder.label[0] if recorder.label else "agreement"
        recorder.add(f"wait for {name}", TRAINING, begin, kind=WAIT)
    return work


def _run(recorder: Recorder, run: Any, stages: Any, tensor: Any, *args: Any) -> None:
    """Record an allreduce that RUN waits for."""
    flight = _Flight(tensor, recorder)
    flight.begin = now()
    run(stages, tensor, *args)
    flight.end()


def _init_work(recorder: Recorder, init: Any, self: Any, tensor: Any, *args: Any) -> None:
    """Let the work of a thread record its bucket when it is submitted."""
    init(self, tensor, *args)
    self.flight = _Flight(tensor, recorder)


def _begin(work: Any) -> None:
    if work.flight.begin is None:
        work.flight.begin = now()


def _end(work: Any) -> None:
    work.flight.end()


def _submit(recorder: Recorder, submit: Any, stages: Any, tensor: Any, *args: Any) -> Any:
    """Record when the host has waited for an allreduce; the device's own times are unknown."""
    flight = _Flight(tensor, recorder)
    flight.begin = now()
    return _Flown(submit(stages, tensor, *args), flight)


class _Flown:
    """A work on a device."""

    def __init__(self, work: Any, flight: _Flight) -> None:
        self._work, self._flight = work, flight

    def wait(self) -> None:
        """Wait for the work."""
        self._work.wait()
        self._flight.end()
