"""Reads `rank.RANK.jsonl`, the records of a rank, one per line.

`inject/site/rank_records.py` appends to it. A program that is no Python may write the exception
that ends it into a file of its own, $FLEETRUN_ERROR_FILE: that may be half-written, or something
else altogether, and what can be read is returned.
"""

# No `from __future__ import annotations`: `reading.record` goes by the annotations.
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fleetrun.records import names, reading, variables

if TYPE_CHECKING:
    from fleetrun.model import ProcessSpec

SCHEMA = 1
# The kinds of records.
EXCEPTION, EXIT, STRATEGY, UPDATE = "exception", "exit", "strategy", "update"
TOPOLOGY = "topology"
# What a rank that was started again tells once, in this order; `inject/restarted.py` has the same.
PROGRESS = IMPORTED, FIRST_COLLECTIVE, FIRST_STEP = "imported", "first collective", "first step"
# The axes in the order in which they are said; others follow.
_AXES = ("dp", "mp", "pp", "sharding", "sep")
_MOST = 1024 * 1024
_RESTARTS = "PADDLE_RESTART_COUNT"


class ErrorReport(NamedTuple):
    """The exception that ended a rank; `raw` is the whole text if it is malformed."""

    rank: int | None = None
    host: str = ""
    pid: int | None = None
    # Wall clock, in seconds.
    time: float | None = None
    restart: int = 0
    # The exception's class.
    kind: str = ""
    message: str = ""
    # The traceback as Python prints it.
    stack: str = ""
    raw: str = ""
    # On the clock that all processes of a host share.
    monotonic: float | None = None
    # Of a failing sys.exit: the exit code.
    code: int | None = None
    # The file that says it.
    path: str = ""


class Update(NamedTuple):
    """An update of the parameters: when it was made, on the clock of the host, and the loss."""

    number: int
    at: float
    loss: float | None = None


class RankAxes(NamedTuple):
    """The axes along which fleet has laid out the ranks, with their sizes, slowest first."""

    axes: tuple[tuple[str, int], ...]

    def places(self, rank: int) -> dict[str, int]:
        """Return where RANK is along each axis of several ranks."""
        places = {}
        for name, size in reversed(self.axes):
            rank, place = divmod(rank, size)
            if size > 1:
                places[name] = place
        return places

    def place(self, rank: int) -> str:
        """Say where RANK is along the axes of several ranks; nothing if that is `dp` alone.

        >>> RankAxes((("dp", 2), ("pp", 1), ("sharding", 1), ("mp", 2))).place(3)
        'dp 1, mp 1'
        >>> RankAxes((("dp", 4), ("mp", 1))).place(3)
        ''
        """
        places = self.places(rank)
        known = [*(name for name in _AXES if name in places), *sorted({*places} - {*_AXES})]
        return "" if known == ["dp"] else ", ".join(f"{name} {places[name]}" for name in known)

    def axis_of(self, ranks: Sequence[int]) -> str:
        """Return the axis along which RANKS lie; nothing if that is none alone.

        >>> axes = RankAxes((("dp", 2), ("mp", 2)))
        >>> axes.axis_of([2, 3]), axes.axis_of([1, 3]), axes.axis_of([0, 3])
        ('mp', 'dp', '')
        """
        places = [self.places(rank) for rank in ranks]
        axes = [name for name in places[0] if len({one[name] for one in places}) > 1]
        is_whole = len(axes) == 1 and len(ranks) == dict(self.axes)[axes[0]]
        return axes[0] if is_whole else ""


def topology(paths: Iterable[str]) -> RankAxes | None:
    """Return the topology that the first of the files PATHS has that has one."""
    for path in filter(None, paths):
        for found in records(path, TOPOLOGY):
            axes = found.get("axes")
            if isinstance(axes, dict) and all(
                isinstance(each, int) and each > 0 for each in axes.values()
            ):
                return RankAxes(tuple(axes.items()))
    return None


def records(path: str, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the records of KIND in the file PATH."""
    for found in reading.lines(path):
        if found.get("kind") == kind and found.get("schema") == SCHEMA:
            yield found


def last(path: str, kind: str, restart: int) -> dict[str, Any] | None:
    """Return the last record of KIND in the file PATH that is of the attempt RESTART."""
    known = [one for one in records(path, kind) if one.get("restart") == restart]
    return known[-1] if known else None


def progress(path: str, restart: int) -> dict[str, float]:
    """Return the moments of PROGRESS that the file PATH has of the attempt RESTART: monotonic."""
    found = {}
    for record in reading.lines(path) if path else ():
        kind, at = record.get("kind"), record.get("monotonic")
        if kind in PROGRESS and record.get("restart") == restart and isinstance(at, float):
            found[str(kind)] = at
    return found


def path_of(spec: "ProcessSpec") -> str:
    """Return the file with the records of a process; empty: it has none."""
    return spec.env.get(variables.RECORDS, "")


def restart_of(spec: "ProcessSpec") -> int:
    """Return which attempt the process is told that it is."""
    told = spec.env.get(_RESTARTS, "")
    return int(told) if told.isdigit() else 0


def error(path: str, kind: str = EXCEPTION, restart: int = 0) -> ErrorReport | None:
    """Return the last exception, or sys.exit, that the file PATH has of the attempt RESTART."""
    found = last(path, kind, restart) if path else None
    return None if found is None else _error(found, path)


def exception(spec: "ProcessSpec") -> ErrorReport | None:
    """Return the exception that has ended the process of SPEC, if it has told."""
    restart = restart_of(spec)
    recorded = error(path_of(spec), restart=restart)
    if recorded is not None:
        return recorded
    told = read_error(spec.env.get(variables.ERROR_FILE, ""))
    return None if told is None or (not told.raw and told.restart != restart) else told


def exit_under_way(spec: "ProcessSpec") -> ErrorReport | None:
    """Return the failing sys.exit of the process of SPEC that its script has not caught."""
    found = error(path_of(spec), EXIT, restart_of(spec))
    return None if found is None or not found.code else found


def read_error(path: str) -> ErrorReport | None:
    """Return what a program has written to its $FLEETRUN_ERROR_FILE; None if there is none."""
    said = reading.content(path, _MOST) if path else None
    if said is None:
        return None
    found = reading.parse(said)
    if found is None:
        return ErrorReport(raw=said.decode(errors="replace"), path=path)
    return _error(found, path)


def evidence(run_dir: str, rank: str) -> dict[str, Any] | None:
    """Return what RANK of a run has said last of its strategy, also of one of fleetrun before 1.0.

    Those have a document for it alone.
    """
    known = list(records(os.path.join(run_dir, names.rank_records(rank)), STRATEGY))
    return known[-1] if known else reading.document(os.path.join(run_dir, f"strategy.{rank}.json"))


def updates(path: str) -> Iterator[Update]:
    """Yield the updates that the file PATH has."""
    for found in records(path, UPDATE):
        number, at = reading.whole(found.get("number")), reading.real(found.get("at"))
        if number is not None and at is not None:
            yield Update(number, at, reading.real(found.get("loss")))


def _error(found: dict[str, Any], path: str) -> ErrorReport:
    kind = reading.text(found.get("class"))
    return reading.record(ErrorReport, found, kind=kind, raw="", path=path)
