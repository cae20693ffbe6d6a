"""Counts the updates by runs of static programs, of the new representation (PIR) or the old one."""

from __future__ import annotations

import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any

from .. import border, updates
from ..import_hooks import in_place_of
from . import program

if TYPE_CHECKING:
    from collections.abc import Callable


class _TrainingRuns:
    """The runs of a program, and how many of them make an update; 0: it updates nothing."""

    def __init__(self, per_update: int) -> None:
        self.per_update = per_update
        self.runs = 0


_runs: weakref.WeakKeyDictionary[Any, _TrainingRuns] = weakref.WeakKeyDictionary()
# All that merge, even of programs that are gone.
_merging: list[_TrainingRuns] = []
_callbacks: list[Callable[[Any, bool], None]] = []


@functools.lru_cache
def watch(executor: Any) -> None:
    """Count the runs by the class EXECUTOR of Paddle, once."""

    @in_place_of(executor, "run")
    def counted(run: Any, self: Any, *args: Any, **options: Any) -> Any:
        result = run(self, *args, **options)
        count(args[0] if args else options.get("program"))
        return result


def on_run(callback: Callable[[Any, bool], None]) -> None:
    """Call CALLBACK with each program that trains, after a run, and whether that was an update."""
    _callbacks.append(callback)


def merge(main: Any, per_update: int) -> None:
    """Let PER_UPDATE runs of MAIN make one update."""
    _runs[main] = _TrainingRuns(per_update)
    _merging.append(_runs[main])


def dropped() -> int:
    """Return the most runs of a program that were merged, and never applied."""
    return max((known.runs % known.per_update for known in _merging), default=0)


def bare(main: Any) -> Any:
    """Return the program in MAIN, which may be a compiled one."""
    return getattr(main, "_program", None) or main


@border.watching("the count of a program's updates")
def count(requested: Any) -> None:
    """Count a run of the program REQUESTED, by default of Paddle's default program."""
    if requested is None:
        paddle: Any = sys.modules["paddle"]
        if paddle.in_dynamic_mode():
            return
        requested = paddle.static.default_main_program()
    main = bare(requested)
    if main not in _runs:
        _runs[main] = _TrainingRuns(int(_trains(main)))
    known = _runs[main]
    if not known.per_update:
        return
    known.runs += 1
    is_update = known.runs % known.per_update == 0
    for callback in _callbacks:
        callback(main, is_update)
    if is_update:
        updates.record(main)


def _trains(main: Any) -> bool:
    try:
        return program.has_updates(main)
    except Exception as error:
        print(f"fleetrun: cannot count updates of {type(main)}: {error!r}", file=sys.stderr)
        return False
