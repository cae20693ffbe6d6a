"""Records a few steps with Paddle's profiler, for `--profile`."""

from __future__ import annotations

import atexit
import os
from typing import Any

from . import border, updates
from .static import program_runs

_VARIABLE = "FLEETRUN_PROFILE"
_WHAT = "the profile"


def watch(paddle: Any) -> None:
    """Write a Chrome trace of the steps that the launcher requests as `FIRST-LAST:PATH`, from 1.

    A step ends when an optimizer has updated the parameters, or a program has. Call this last.
    """
    steps, _, path = os.environ.get(_VARIABLE, "").partition(":")
    first, _, last = steps.partition("-")
    if not path or not first.isdigit() or not last.isdigit():
        return
    # Paddle would wrap the optimizers' steps in spans, which our callbacks, called within, cut.
    paddle.profiler.utils._has_optimizer_wrapped = True
    profiler = paddle.profiler.Profiler(
        scheduler=(int(first) - 1, int(last)),
        on_trace_ready=lambda ready: ready.export(path, format="json"),
    )

    for on_step in (updates.on_update, updates.on_skipped):
        on_step(lambda *_: profiler.step(), _WHAT)
    program_runs.watch(paddle.static.Executor)
    # A script may end before the last of the steps.
    atexit.register(border.watching(_WHAT)(profiler.stop))
    border.watching(_WHAT)(profiler.start)()
