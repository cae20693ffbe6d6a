"""Records a few steps with Paddle's profiler, for `--profile`."""

from __future__ import annotations

import atexit
import os
from typing import Any

from . import border, updates
from .static import program_runs

_VARIABLE = "FLEETRUN_PROFILE"
_WHAT = "the profile"


class StepProfiler:
    """Records the steps FIRST to LAST, counted from 1, and writes a Chrome trace to PATH.

    A step ends when an optimizer has updated the parameters, or a program has.
    """

    def __init__(self, paddle: Any, first: int, last: int, path: str) -> None:
        self._paddle = paddle
        self._first, self._last, self._path = first, last, path
        self._updates = 0
        self._profiler: Any = None

    def begin(self) -> None:
        """Start to record if the next step is the first one."""
        if self._updates + 1 == self._first:
            self._profiler = self._paddle.profiler.Profiler(on_trace_ready=self._write)
            self._profiler.start()

    def end_step(self, _source: Any, _number: int) -> None:
        """Count a step, and start or stop to record."""
        self._updates += 1
        if self._profiler is not None and self._updates < self._last:
            self._profiler.step()
        elif self._profiler is not None:
            self.stop()
        else:
            self.begin()

    def stop(self) -> None:
        """Write what is recorded; a script may end before the last of the steps."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()

    def _write(self, profiler: Any) -> None:
        profiler.export(self._path, format="json")


def watch(paddle: Any) -> None:
    """Record the steps that the launcher requests as `FIRST-LAST:PATH`; call this last."""
    steps, _, path = os.environ.get(_VARIABLE, "").partition(":")
    first, _, last = steps.partition("-")
    if not path or not first.isdigit() or not last.isdigit():
        return
    # Paddle would wrap the optimizers' steps in spans, which our callbacks, called within, cut.
    paddle.profiler.utils._has_optimizer_wrapped = True
    profiler = StepProfiler(paddle, int(first), int(last), path)
    updates.on_update(profiler.end_step, _WHAT)
    updates.on_skipped(profiler.end_step, _WHAT)
    program_runs.watch(paddle.static.Executor)
    atexit.register(border.watching(_WHAT)(profiler.stop))
    border.watching(_WHAT)(profiler.begin)()
