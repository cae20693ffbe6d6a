"""Renders a snapshot for `fleetrun top`: the columns that a width has room for; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fleetrun.commands.top.sample import RankRow, Snapshot
from fleetrun.text import counted, format_duration, visible

_GAP = 2
# The last line of a log is omitted if it would be narrower.
_NARROWEST_LINE = 12
_GOOD, _BAD, _WARN, _DIM = "green", "bold red", "yellow", "dim"
# What a screen says below the rows, and what `?` shows.
_FOOTER = "q quit  ? keys"
KEYS = """\
arrows, PgUp, PgDn move through the ranks (also k, j, b, space)
Esc                back to the ranks that need attention
?                  these keys
q                  quit

`fleetrun logs --rank=N` shows a rank's output, `fleetrun stacks` what all ranks do."""


class View(NamedTuple):
    """What keys have chosen: the first row to show (None: those that need attention), or help."""

    first: int | None = None
    shows_keys: bool = False


def after(view: View, key: str, snapshot: Snapshot, page: int) -> View:
    """Return VIEW of SNAPSHOT after KEY was pressed; PAGE is the number of lines of a page."""
    moves = {"k": -1, "j": 1, "b": -page, " ": page}
    if key in moves:
        last = max(len(snapshot.rows) - 1, 0)
        return View(min(max((view.first or 0) + moves[key], 0), last))
    return View(view.first, shows_keys=not view.shows_keys) if key == "?" else View()


class TopColumn(NamedTuple):
    """A column of a fixed width; on a narrow screen those with the highest order go first."""

    head: str
    width: int
    order: int
    cell: Callable[[RankRow], str]
    is_right: bool = True


_COLUMNS = (
    TopColumn("rank", 6, 0, lambda row: row.label.removeprefix("rank ")),
    TopColumn("state", 11, 1, lambda row: row.state, is_right=False),
    TopColumn("place", 14, 15, lambda row: row.place, is_right=False),
    TopColumn("host", 15, 10, lambda row: row.host, is_right=False),
    TopColumn("device", 8, 9, lambda row: row.device, is_right=False),
    TopColumn("pid", 7, 11, lambda row: _number(row.pid)),
    TopColumn("cpu%", 5, 3, lambda row: _number(row.use and row.use.cpu_percent)),
    TopColumn("mem", 5, 4, lambda row: _size([row.use and row.use.memory_bytes])),
    TopColumn("gpu%", 4, 5, lambda row: _number(_sum(gpu.use_percent for gpu in row.gpus))),
    TopColumn("gmem", 5, 6, lambda row: _size(gpu.memory_used_bytes for gpu in row.gpus)),
    TopColumn("watt", 5, 14, lambda row: _number(_sum(gpu.power_w for gpu in row.gpus))),
    TopColumn("step", 8, 2, lambda row: _number(row.step)),
    TopColumn("step/s", 6, 7, lambda row: _rate(row.steps_per_s)),
    TopColumn("loss", 9, 8, lambda row: "" if row.loss is None else f"{row.loss:.4g}"),
)


def frame(snapshot: Snapshot, width: int, height: int | None, view: View) -> RenderableType:
    """Return SNAPSHOT as chosen by VIEW for WIDTH columns (0: no limit), at most HEIGHT lines.

    None as HEIGHT: all rows, and no keys below them.
    """
    if view.shows_keys:
        return Text(KEYS)
    counts = f"{counted(len(snapshot.rows), 'process')}: {_described(snapshot.rows)}"
    parts: list[RenderableType] = [_headline(snapshot, width), _line(counts)]
    if snapshot.notice and not snapshot.verdict:
        parts.append(_line(snapshot.notice, _WARN))
    # Without the heads, the keys, the verdict and the count of hidden rows.
    room = None if height is None else max(1, height - len(parts) - 3 - bool(snapshot.verdict))
    rows, hidden = _visible_rows(snapshot.rows, room, view)
    parts.append(_table(rows, columns(snapshot, width), width))
    if hidden:
        parts.append(_line(f"and {len(hidden)} more: {_described(hidden)}", _DIM))
    if snapshot.verdict:
        code = "" if snapshot.exit_code is None else f" (exit code {snapshot.exit_code})"
        parts.append(_line(f"{snapshot.verdict}{code}", _BAD if snapshot.exit_code != 0 else _GOOD))
    if height is not None:
        parts.append(_line(_FOOTER, _DIM))
    return Group(*parts)


def columns(snapshot: Snapshot, width: int) -> list[TopColumn]:
    """Return the columns for WIDTH: the same at each look at a job, whatever is known already."""
    has_gpus = any(row.device.startswith("gpu") for row in snapshot.rows)
    has_places = any(row.place for row in snapshot.rows)
    fitting = [
        column
        for column in _COLUMNS
        if (has_gpus or column.head not in {"gpu%", "gmem", "watt"})
        and (snapshot.hosts > 1 or column.head != "host")
        and (has_places or column.head != "place")
    ]
    while width and sum(column.width + _GAP for column in fitting) > width + _GAP:
        fitting.remove(max(fitting, key=lambda column: column.order))
    return fitting


def _visible_rows(
    rows: Sequence[RankRow], room: int | None, view: View
) -> tuple[list[RankRow], list[RankRow]]:
    """Return as many ROWS as fit into ROOM from where VIEW is, and the others."""
    size = len(rows) if room is None else room
    first = min(view.first or 0, max(len(rows) - size, 0))
    places = {*range(first, first + size)}
    if view.first is None:
        needed = sorted(range(len(rows)), key=lambda place: (not rows[place].is_odd, place))
        places = {*needed[:size]}
    return (
        [row for place, row in enumerate(rows) if place in places],
        [row for place, row in enumerate(rows) if place not in places],
    )


def _table(rows: Sequence[RankRow], shown: Sequence[TopColumn], width: int) -> Table:
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style=_DIM)
    for column in shown:
        table.add_column(
            column.head,
            width=column.width if width else None,
            justify="right" if column.is_right else "left",
            no_wrap=True,
            overflow="ellipsis",
        )
    room = width - sum(column.width + _GAP for column in shown)
    has_line = not width or room >= _NARROWEST_LINE
    if has_line:
        table.add_column("last line", width=room if width else None, no_wrap=True, style=_DIM)
    for row in rows:
        style = _BAD if row.is_odd else _GOOD if row.state == "running" else ""
        cells = [
            Text(column.cell(row), style if column.head == "state" else "") for column in shown
        ]
        table.add_row(*cells, *([_line(row.line, _DIM)] * has_line))
    return table


def _line(text: str, style: str = "") -> Text:
    """Return TEXT of any origin as one line, which is cut at the end of the screen."""
    return Text(visible(text), style, no_wrap=True, overflow="ellipsis")


def _headline(snapshot: Snapshot, width: int) -> Text:
    line = _line(snapshot.job, "bold")
    line.append(f"  {snapshot.phase}", _GOOD if snapshot.phase == "running" else _WARN)
    more = f"  {format_duration(snapshot.seconds)}"
    if snapshot.max_restarts or snapshot.attempt:
        more += f"  restarts {snapshot.attempt} of {snapshot.max_restarts or 0}"
    if snapshot.hosts > 1:
        more += f"  {snapshot.hosts} hosts"
    line.append(more, "not bold")
    run = visible(snapshot.run)
    # The end of a path says more than its beginning.
    run = run[-max(width - line.cell_len - 2, 0) :] if width else run
    return line.append(f"  {run}", "not bold dim")


def _described(rows: Sequence[RankRow]) -> str:
    """Return how many of ROWS are in each state."""
    words = (row.state.partition(" ")[0] for row in rows)
    counts = Counter("failed" if word == "exit" else word for word in words)
    return ", ".join(f"{count} {state}" for state, count in counts.most_common())


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _size(values: Iterable[float | None]) -> str:
    size = _sum(values)
    return "" if size is None else f"{size / 2**30:.1f}G"


def _rate(value: float | None) -> str:
    """Return a rate with about three digits."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
