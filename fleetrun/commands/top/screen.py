"""Renders a snapshot for `fleetrun top`: the columns that a width has room for; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fleetrun.commands.top.sample import RankRow, Snapshot
from fleetrun.commands.top.view import HELP, KEYS, RANKS, View, ordered
from fleetrun.plan.kinds import label
from fleetrun.text import counted, elided, format_duration, format_size, visible

_GAP = 2
# The last line of a log is omitted if it would be narrower.
_NARROWEST_LINE = 12
_GOOD, _BAD, _WARN, _DIM = "green", "bold red", "yellow", "dim"


class TopColumn(NamedTuple):
    """A column of a fixed width; on a narrow screen those with the highest order go first."""

    head: str
    width: int
    order: int
    cell: Callable[[RankRow], str]
    is_right: bool = True
    # Shown from the moment on that any rank has a value; the others always.
    is_optional: bool = False


_COLUMNS = (
    TopColumn("rank", 6, 0, lambda row: row.label.removeprefix("rank ")),
    TopColumn("state", 11, 1, lambda row: row.state, is_right=False),
    TopColumn("place", 14, 15, lambda row: row.place, is_right=False, is_optional=True),
    TopColumn("host", 15, 10, lambda row: row.host, is_right=False),
    TopColumn("device", 8, 9, lambda row: row.device, is_right=False),
    TopColumn("pid", 7, 11, lambda row: _number(row.pid)),
    TopColumn("cpu%", 5, 3, lambda row: _number(row.cpu_percent)),
    TopColumn("mem", 5, 4, lambda row: _size(row.memory_bytes)),
    TopColumn("gpu%", 4, 5, lambda row: _number(row.gpu_percent)),
    TopColumn("gmem", 5, 6, lambda row: _size(row.gpu_memory_bytes)),
    TopColumn("watt", 5, 14, lambda row: _number(row.power_w)),
    TopColumn("step", 8, 2, lambda row: _number(row.step)),
    TopColumn("step/s", 6, 7, lambda row: _rate(row.steps_per_s)),
    TopColumn("loss", 9, 8, lambda row: "" if row.loss is None else f"{row.loss:.4g}"),
    TopColumn(
        "throughput", 16, 13, lambda row: visible(row.throughput), is_right=False, is_optional=True
    ),
    TopColumn("waits in", 32, 2, lambda row: row.waits, is_right=False, is_optional=True),
)
OPTIONAL = tuple(column for column in _COLUMNS if column.is_optional)


def optional(rows: Sequence[RankRow], before: frozenset[str] = frozenset()) -> frozenset[str]:
    """Return the heads of the optional columns of ROWS, and those that were shown BEFORE."""
    return before | {column.head for column in OPTIONAL if any(map(column.cell, rows))}


def frame(
    snapshot: Snapshot, width: int, height: int | None, view: View, shown: frozenset[str]
) -> RenderableType:
    """Return SNAPSHOT as chosen by VIEW for WIDTH columns (0: no limit), at most HEIGHT lines.

    SHOWN are the optional columns. None as HEIGHT: all rows.
    """
    if view.what == HELP:
        keys = Table(box=None, show_header=False, padding=(0, _GAP, 0, 0))
        for pressed, what in KEYS:
            keys.add_row(Text(pressed), Text(what))
        return keys
    parts: list[RenderableType] = [_headline(snapshot, width), _counts(snapshot)]
    if snapshot.notice and not snapshot.verdict:
        parts.append(_line(snapshot.notice, _WARN))
    # Without the heads, the verdict and the count of hidden rows.
    room = None if height is None else max(1, height - len(parts) - 2 - bool(snapshot.verdict))
    rows, hidden = _visible_rows(ordered(snapshot.rows, view), room, view)
    parts.append(_table(rows, columns(snapshot, width, shown), width, view))
    if hidden:
        parts.append(_line(f"and {len(hidden)} more: {_described(hidden)}", _DIM))
    if snapshot.verdict:
        code = "" if snapshot.exit_code is None else f" (exit code {snapshot.exit_code})"
        parts.append(_line(f"{snapshot.verdict}{code}", _BAD if snapshot.exit_code != 0 else _GOOD))
    return Group(*parts)


def columns(snapshot: Snapshot, width: int, shown: frozenset[str]) -> list[TopColumn]:
    """Return the columns for WIDTH: the same at each look at a job, whatever is known already."""
    has_gpus = any(row.device.startswith("gpu") for row in snapshot.rows)
    telling = [
        column
        for column in _COLUMNS
        if (column.head in shown if column.is_optional else True)
        and (has_gpus or column.head not in {"gpu%", "gmem", "watt"})
        and (snapshot.hosts > 1 or column.head != "host")
    ]
    left = width + _GAP
    kept = set()
    for column in sorted(telling, key=lambda column: column.order):
        left -= column.width + _GAP
        if width and left < 0:
            break
        kept.add(column.head)
    return [column for column in telling if column.head in kept]


def _visible_rows(
    rows: Sequence[RankRow], room: int | None, view: View
) -> tuple[list[RankRow], list[RankRow]]:
    """Return as many ROWS as fit into ROOM, and the others.

    They are around the selected one; if VIEW chooses nothing, those that need attention.
    """
    size = len(rows) if room is None else room
    if view == View():
        needed = sorted(range(len(rows)), key=lambda place: (not rows[place].is_odd, place))
        places = {*needed[:size]}
    else:
        at = next((place for place, row in enumerate(rows) if row.label == view.selected), 0)
        begin = min(max(0, at - size // 2), max(0, len(rows) - size))
        places = {*range(begin, begin + size)}
    return (
        [row for place, row in enumerate(rows) if place in places],
        [row for place, row in enumerate(rows) if place not in places],
    )


def _table(rows: Sequence[RankRow], shown: Sequence[TopColumn], width: int, view: View) -> Table:
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
        cells = [
            Text(column.cell(row), _style(row) if column.head == "state" else "")
            for column in shown
        ]
        cells += [_line(row.line, _DIM)] * has_line
        is_chosen = view.selected and row.label == view.selected
        table.add_row(*cells, style="reverse" if is_chosen else None)
    return table


def text_of(lines: Sequence[str], title: str, height: int) -> Group:
    """Return the last of a rank's output LINES below a TITLE."""
    return Group(
        _line(title, "bold"), *(_line(line.expandtabs()) for line in lines[-(height - 1) :])
    )


def footer(view: View) -> Text:
    """Return the line that lists the keys."""
    if view.is_typing:
        return _line(f"filter: {view.words}_  (Enter keeps it, Esc drops it)", _DIM)
    if view.what != RANKS:
        return _line("arrows another rank  l log  t stacks  q back", _DIM)
    words = f"[{view.words}]" if view.words else ""
    return _line(f"q quit  ? keys  l log  t stacks  s sort[{view.order}]  /{words} filter", _DIM)


def _line(text: str, style: str = "") -> Text:
    """Return TEXT of any origin as one line, which is cut at the end of the screen."""
    return Text(visible(text), style, no_wrap=True, overflow="ellipsis")


def _headline(snapshot: Snapshot, width: int) -> Text:
    style = {"running": _GOOD, "over": "bold"}.get(snapshot.phase, _WARN)
    line = _line(snapshot.job, "bold").append(f"  {snapshot.phase}", style)
    line.append(f"  {format_duration(snapshot.seconds, is_short=True)}", "not bold")
    if snapshot.max_restarts or snapshot.attempt:
        restarts = f"  restarts {snapshot.attempt} of {snapshot.max_restarts or 0}"
        line.append(restarts, _WARN if snapshot.attempt else "not bold")
    if snapshot.hosts > 1:
        line.append(f"  {snapshot.hosts} hosts", "not bold")
    if snapshot.eta_s is not None:
        eta = format_duration(snapshot.eta_s, is_short=True)
        line.append(f"  ETA {eta}", "not bold")
    run = visible(snapshot.run)
    # The end of a path says more than its beginning.
    run = elided(run, max(width - line.cell_len - 2, 0)) if width else run
    return line.append(f"  {run}", "not bold dim")


def _counts(snapshot: Snapshot) -> Text:
    if not snapshot.rows:
        return _line("no process has been started yet", _DIM)
    count = counted(len(snapshot.rows), "process")
    line = _line(f"{count}: {_described(snapshot.rows)}")
    # Only their vendors' tools can read them.
    unread = sorted({row.device.partition(":")[0] for row in snapshot.rows} - {"", "cpu", "gpu"})
    if unread:
        line.append(f"; use of {' and '.join(f'{label(kind)}s' for kind in unread)} is not known")
    return line


def _described(rows: Sequence[RankRow]) -> str:
    """Return how many of ROWS are in each state."""
    words = (row.state.partition(" ")[0] for row in rows)
    counts = Counter("failed" if word == "exit" else word for word in words)
    return ", ".join(f"{count} {state}" for state, count in counts.most_common())


def _style(row: RankRow) -> str:
    """Return the style of ROW's state."""
    if row.is_odd:
        return _BAD if row.state.startswith(("failed", "exit", "lost")) else _WARN
    return _GOOD if row.state == "running" else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _size(value: float | None) -> str:
    return "" if value is None else format_size(value, is_short=True)


def _rate(value: float | None) -> str:
    """Return a rate with about three digits."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
