"""Reports the progress of a restarted rank to the launcher: its import, its first step."""

from __future__ import annotations

import functools
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .import_hooks import after_import, watch_method

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    # Appends a record (path, kind, fields).
    Append = Callable[[str, str, dict[str, Any]], None]

# In the order in which they come; `records/rankfile.py` has the same.
IMPORTED, FIRST_COLLECTIVE, FIRST_STEP = "imported", "first collective", "first step"


def watch(append: Append, *, is_armed: bool) -> None:
    """Record each moment once by APPEND; IS_ARMED: optimizers are watched anyway."""
    after_import("paddle", functools.partial(_record_import, append, is_armed))


def _record_import(append: Append, is_armed: bool, paddle: ModuleType) -> None:  # noqa: FBT001
    def record(kind: str) -> None:
        # The training goes on without this report.
        with suppress(OSError):
            append(os.environ["FLEETRUN_RECORDS"], kind, {})

    record(IMPORTED)
    # These modules take a while to load, and a script's first line comes before.
    after_import("paddle.base.core", functools.partial(_watch_groups, record))
    from . import updates

    updates.on_update(lambda *_: record(FIRST_STEP), "the first step", is_first_only=True)
    if not is_armed:
        updates.watch()
        _watch_programs(paddle)


def _watch_groups(record: Callable[[str], None], core: Any) -> None:
    """Record the first collective that returns, and leave the methods as they were before."""
    from .flight_recorder import methods_of

    kind = core.ProcessGroup
    restore: list[Callable[[], None]] = []

    def end(_group: Any) -> None:
        if restore:
            record(FIRST_COLLECTIVE)
        while restore:
            restore.pop()()

    restore += [watch_method(kind, name, after=end) for name, _ in methods_of(kind)]


def _watch_programs(paddle: Any) -> None:
    """Watch the updates of static programs, from their second run: the first one only prepares."""
    restore: list[Callable[[], None]] = []

    def begin(_executor: Any) -> None:
        from . import heartbeats  # not needed with dynamic graphs

        while restore:
            restore.pop()()
            heartbeats.watch_programs(paddle)

    restore.append(watch_method(paddle.static.Executor, "run", before=begin))
