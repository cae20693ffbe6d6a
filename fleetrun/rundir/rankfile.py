"""Reads `rank.RANK.jsonl`, to which `inject/site/rank_records.py` appends a rank's records."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from fleetrun.model import ProcessSpec
from fleetrun.rundir import names, reading, variables

SCHEMA = 1
# The kinds of records.
EXCEPTION, EXIT, STRATEGY, UPDATE = "exception", "exit", "strategy", "update"
TOPOLOGY = "topology"


class ErrorReport(NamedTuple):
    """The exception that ended a rank."""

    rank: int | None = None
    host: str = ""
    pid: int | None = None
    # Wall clock, in seconds.
    time: float | None = None
    restart: int = 0
    # The exception's class.
    class_: str = ""
    message: str = ""
    # The traceback as Python prints it.
    stack: str = ""
    # On the clock that all processes of a host share.
    monotonic: float | None = None
    # The exit code of a failing sys.exit.
    code: int | None = None
    # The file that contains this.
    path: str = ""

    @property
    def text(self) -> str:
        """What the rank reported: the stack, or else class and message."""
        return self.stack or ": ".join(filter(None, (self.class_, self.message)))


class Update(NamedTuple):
    """An update of the parameters: when it was made, on the clock of the host, and the loss."""

    number: int
    at: float
    loss: float | None = None


class RankAxes(NamedTuple):
    """The axes along which fleet has laid out the ranks, with their sizes, slowest first."""

    axes: tuple[tuple[str, int], ...]

    def places(self, rank: int) -> dict[str, int]:
        """Return RANK's coordinate on each axis of several ranks."""
        places = {}
        for name, size in reversed(self.axes):
            rank, place = divmod(rank, size)
            if size > 1:
                places[name] = place
        return places

    def place(self, rank: int) -> str:
        """Return RANK's coordinates as text; empty if `dp` is the only axis."""
        places = dict(reversed(self.places(rank).items()))
        known = [f"{name} {place}" for name, place in places.items()]
        return "" if [*places] == ["dp"] else ", ".join(known)

    def axis_of(self, ranks: Sequence[int]) -> str:
        """Return the one axis along which RANKS lie; empty if there is none.

        >>> axes = RankAxes((("dp", 2), ("mp", 2)))
        >>> axes.axis_of([2, 3]), axes.axis_of([1, 3]), axes.axis_of([0, 3])
        ('mp', 'dp', '')
        """
        places = [self.places(rank) for rank in ranks]
        axes = [name for name in places[0] if len({place[name] for place in places}) > 1]
        is_whole = len(axes) == 1 and len(ranks) == dict(self.axes)[axes[0]]
        return axes[0] if is_whole else ""


def topology(paths: Iterable[str]) -> RankAxes | None:
    """Return the first topology in the files PATHS."""
    for path in filter(None, paths):
        for record in records(path, TOPOLOGY):
            axes = (record.get("axes") or {}).items()
            if all(isinstance(axis_size, int) and axis_size > 0 for _, axis_size in axes):
                return RankAxes(tuple(axes))
    return None


def records(path: str, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the records of KIND in the file PATH."""
    for record in reading.lines(path):
        if record.get("kind") == kind and record.get("schema") == SCHEMA:
            yield record


def last(path: str, kind: str, restart: int) -> dict[str, Any] | None:
    """Return the last record of KIND and attempt RESTART in the file PATH."""
    matching = [record for record in records(path, kind) if record.get("restart") == restart]
    return matching[-1] if matching else None


def path_of(spec: ProcessSpec) -> str:
    """Return the file with a process's records; empty if it has none."""
    return spec.env.get(variables.RECORDS, "")


def restart_of(spec: ProcessSpec) -> int:
    """Return the attempt number that the process is given."""
    text = spec.env.get("PADDLE_RESTART_COUNT", "")
    return int(text) if text.isdigit() else 0


def error(path: str, kind: str = EXCEPTION, restart: int = 0) -> ErrorReport | None:
    """Return the last exception, or sys.exit, of attempt RESTART in the file PATH."""
    record = last(path, kind, restart) if path else None
    return None if record is None else reading.record(ErrorReport, record, path=path)


def exception(spec: ProcessSpec) -> ErrorReport | None:
    """Return the exception that has ended the process of SPEC, if reported."""
    return error(path_of(spec), restart=restart_of(spec))


def exit_under_way(spec: ProcessSpec) -> ErrorReport | None:
    """Return the failing sys.exit that the script of SPEC has not caught."""
    report = error(path_of(spec), EXIT, restart_of(spec))
    return report if report is not None and report.code else None


def evidence(run_dir: str, rank: str) -> dict[str, Any] | None:
    """Return RANK's last evidence about its strategy."""
    known = list(records(os.path.join(run_dir, names.rank_records(rank)), STRATEGY))
    return known[-1] if known else None


def updates(path: str) -> Iterator[Update]:
    """Yield the updates in the file PATH."""
    return (reading.record(Update, record) for record in records(path, UPDATE))
