"""Renders a snapshot for `fleetrun top` as lines of a given width; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rich.cells import cell_len
from rich.text import Text

from fleetrun import conversion
from fleetrun.commands.top.sample import RankRow, totals
from fleetrun.commands.top.view import HOSTS, LOG, STACKS, View, ordered
from fleetrun.plan.kinds import label
from fleetrun.plan.visible import elided, visible

if TYPE_CHECKING:
    from fleetrun.commands.top.sample import Snapshot

_GAP = 2
# The last line of a log is omitted if it would be narrower.
_NARROWEST_LINE = 12
_WIDEST_DEVICE = 24


class _Column(NamedTuple):
    """A column: its head and cells; on a narrow screen those with the highest rank go first."""

    head: str
    cell: Callable[[RankRow], str]
    rank: int
    is_right: bool = True


_COLUMNS = (
    _Column("rank", lambda row: row.label.removeprefix("rank "), 0),
    _Column("place", lambda row: row.place, 16, is_right=False),
    _Column("state", lambda row: row.state, 1, is_right=False),
    _Column("host", lambda row: row.host, 10, is_right=False),
    _Column("device", lambda row: row.device[:_WIDEST_DEVICE], 9, is_right=False),
    _Column("pid", lambda row: _number(row.pid), 11),
    _Column("cpu%", lambda row: _number(row.cpu_percent), 3),
    _Column("mem", lambda row: _size(row.memory_bytes), 4),
    _Column("gpu%", lambda row: _number(row.gpu_percent), 5),
    _Column("gmem", lambda row: _size(row.gpu_memory_bytes), 6),
    _Column("watt", lambda row: _number(row.power_w), 15),
    _Column("step", lambda row: _number(row.step), 2),
    _Column("step/s", lambda row: _rate(row.steps_per_s), 13),
    _Column("loss", lambda row: "" if row.loss is None else f"{row.loss:.4g}", 7),
    _Column("waits in", lambda row: row.waits, 2, is_right=False),
    _Column("throughput", lambda row: visible(row.throughput), 14),
)
_GOOD, _BAD, _WARN, _DIM = "green", "bold red", "yellow", "dim"
# The widths of bars and sparklines.
_BAR, _SPARK = 8, 16
_EIGHTHS, _LEVELS = " ▏▎▍▌▋▊▉█", "▁▂▃▄▅▆▇█"
# The most hosts whose totals are shown below the ranks.
_MOST_TOTALS = 4
_BARS = {"gpu use": "cyan", "cpu use": "cyan", "mem use": "magenta", "gmem use": "magenta"}
_BARS["lately"] = "cyan"


def frame(
    snapshot: Snapshot, width: int, height: int | None, view: View | None = None
) -> list[Text]:
    """Return SNAPSHOT as lines of WIDTH columns, at most HEIGHT; None: all of them.

    Width 0 cuts nothing, for a file. VIEW is the selection by keys; None, for a file: without bars.
    """
    top = [_headline(snapshot, width), _counts(snapshot)]
    if snapshot.notice and not snapshot.verdict:
        top.append(Text(visible(snapshot.notice), _WARN))
    end: list[Text] = []
    if snapshot.verdict:
        style = _GOOD if snapshot.exit_code == 0 else _BAD
        code = "" if snapshot.exit_code is None else f" (exit code {snapshot.exit_code})"
        end = [Text(f"{visible(snapshot.verdict)}{code}", style)]
    # Without the heads and the count of hidden rows.
    room = None if height is None else max(1, height - len(top) - len(end) - 2)
    rows, hidden, sums = list(snapshot.rows), list[RankRow](), list[RankRow]()
    if view is not None:
        sums = totals(snapshot.rows) if len(snapshot.rows) > 1 else []
        rows = ordered(sums if view.what == HOSTS else rows, view)
        sums = sums if len(sums) <= _MOST_TOTALS and view.what != HOSTS else []
        room = None if room is None else max(1, room - len(sums))
    if view is not None and view != View(has_bars=view.has_bars):
        rows, hidden = _window(rows, room, view.selected)
    else:
        rows, hidden = chosen(rows, room)
    columns = _fitting(snapshot, [*rows, *sums], width, has_bars=view is not None and view.has_bars)
    table = _table(rows, columns, width, view, sums)
    if hidden:
        states = "" if view is not None and view.what == HOSTS else f": {_described(hidden)}"
        table.append(Text(f"and {len(hidden)} more{states}", _DIM))
    lines = [*top, *table, *end][:height]
    return [cut(line, width) for line in lines] if width else lines


def _window(
    rows: Sequence[RankRow], room: int | None, selected: str
) -> tuple[list[RankRow], list[RankRow]]:
    """Return as many ROWS as fit into ROOM, including the one SELECTED, and the others."""
    at = next((place for place, row in enumerate(rows) if row.label == selected), 0)
    size = len(rows) if room is None else room
    begin = min(max(0, at - size // 2), max(0, len(rows) - size))
    return [*rows[begin : begin + size]], [*rows[:begin], *rows[begin + size :]]


def bar(share: float | None, width: int = _BAR) -> str:
    """Return SHARE of WIDTH columns as a bar.

    >>> [bar(share, 2) for share in (0.0, 0.6, 1.0, 7.0, None)]
    ['  ', '█▎', '██', '██', '']
    """
    if share is None:
        return ""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    whole, part = divmod(eighths, 8)
    return ("█" * whole + _EIGHTHS[part] * (part > 0)).ljust(width)


def spark(values: Sequence[float], top: float) -> str:
    """Return VALUES as a sparkline whose height is TOP.

    >>> spark([0, 50, 100], 100)
    '▁▅█'
    """
    steps = len(_LEVELS) - 1
    return "".join(_LEVELS[round(min(max(value / (top or 1), 0), 1) * steps)] for value in values)


def _share(value: float | None, total: float | None) -> float | None:
    return None if value is None or not total else value / total


def _bars(snapshot: Snapshot, rows: Sequence[RankRow]) -> tuple[_Column, ...]:
    """Return the columns of bars: of GPUs if there are any, else of processors."""
    has_gpus = any(row.gpu_percent is not None for row in rows)
    # A rank may use several processors.
    top = max((100.0, *(sample for row in rows for sample in row.use)))

    def held(row: RankRow) -> float | None:
        if has_gpus:
            return _share(row.gpu_memory_bytes, row.gpu_memory_total_bytes)
        return _share(row.memory_bytes, snapshot.memory_total_bytes)

    device = "gpu" if has_gpus else "cpu"
    memory = "gmem" if has_gpus else "mem"
    return (
        _Column(
            f"{device} use",
            lambda row: bar(row.use[-1] / top if row.use else None),
            8,
            is_right=False,
        ),
        _Column(f"{memory} use", lambda row: bar(held(row)), 14, is_right=False),
        _Column("lately", lambda row: spark(row.use, top), 12, is_right=False),
    )


def text_of(lines: Sequence[str], title: str, width: int, height: int) -> list[Text]:
    """Return the last of a rank's output LINES below a TITLE."""
    shown = [Text(visible(line.expandtabs())) for line in lines[-(height - 1) :]]
    return [cut(line, width) for line in (Text(visible(title), "bold"), *shown)]


def footer(view: View) -> str:
    """Return the line that lists the keys."""
    if view.is_typing:
        return f"filter: {view.words}_  (Enter keeps it, Esc drops it)"
    if view.what in (LOG, STACKS):
        return "arrows another rank  l log  t stacks  q back"
    words = f"[{view.words}]" if view.words else ""
    order = f"[{view.order}{' reversed' * view.is_reversed}]"
    toggle = "ranks" if view.what == HOSTS else "hosts"
    sort = f"s sort{order}  r reverse  /{words} filter  o odd"
    return f"q quit  l log  t stacks  h {toggle}  {sort}  arrows"


def fitting(hints: str, width: int) -> str:
    """Return as many of the HINTS, two blanks apart, as fit into WIDTH whole.

    >>> fitting("q quit  l log  arrows", 16)
    'q quit  l log'
    """
    if len(hints) <= width:
        return hints
    return hints[: width + 2].rpartition("  ")[0] or hints


def cut(line: Text, width: int) -> Text:
    """Return LINE cut or padded to exactly WIDTH columns."""
    line.truncate(width, overflow="crop", pad=True)
    return line


def chosen(rows: Sequence[RankRow], room: int | None) -> tuple[list[RankRow], list[RankRow]]:
    """Return as many ROWS as fit into ROOM, odd ones first, and the others."""
    if room is None or len(rows) <= room:
        return list(rows), []
    by_need = sorted(range(len(rows)), key=lambda place: (not rows[place].is_odd, place))
    visible_places = set(by_need[:room])
    return (
        [row for place, row in enumerate(rows) if place in visible_places],
        [row for place, row in enumerate(rows) if place not in visible_places],
    )


def _headline(snapshot: Snapshot, width: int) -> Text:
    style = {"running": _GOOD, "over": "bold"}.get(snapshot.phase, _WARN)
    line = Text.assemble((visible(snapshot.job), "bold"), (f"  {snapshot.phase}", style))
    line.append(f"  {conversion.duration(snapshot.seconds, is_short=True)}")
    if snapshot.max_restarts or snapshot.attempt:
        restarts = f"  restarts {snapshot.attempt} of {snapshot.max_restarts or 0}"
        line.append(restarts, _WARN if snapshot.attempt else "")
    if snapshot.hosts > 1:
        line.append(f"  {snapshot.hosts} hosts")
    if snapshot.eta_s is not None:
        line.append(f"  ETA {conversion.duration(snapshot.eta_s, is_short=True)}")
    run = visible(snapshot.run)
    # The end of a path says more than its beginning.
    run = elided(run, max(width - line.cell_len - 2, 0)) if width else run
    return line.append(f"  {run}", _DIM)


def _counts(snapshot: Snapshot) -> Text:
    if not snapshot.rows:
        return Text("no process has been started yet", _DIM)
    count = len(snapshot.rows)
    line = Text(f"{conversion.counted(count, 'process')}: {_described(snapshot.rows)}")
    speeds = [row.steps_per_s for row in snapshot.rows if row.steps_per_s is not None]
    if speeds:
        line.append(f"; {_rate(min(speeds))} steps/s")
    # Only their vendors' tools can read them.
    unread = sorted({row.device.partition(":")[0] for row in snapshot.rows} - {"", "cpu", "gpu"})
    if unread:
        line.append(f"; use of {' and '.join(f'{label(kind)}s' for kind in unread)} is not known")
    return line


def _described(rows: Sequence[RankRow]) -> str:
    """Return how many of ROWS are in each state."""
    words = (row.state.partition(" ")[0] for row in rows)
    counted = Counter("failed" if word == "exit" else word for word in words)
    return ", ".join(f"{count} {state}" for state, count in counted.most_common())


def _fitting(
    snapshot: Snapshot, rows: Sequence[RankRow], width: int, *, has_bars: bool
) -> list[_Column]:
    """Return the columns that have content and fit, in their order."""
    telling = [
        column
        for column in (*_COLUMNS, *(_bars(snapshot, rows) if has_bars else ()))
        if any(column.cell(row) for row in rows) and (column.head != "host" or snapshot.hosts > 1)
    ]
    if not width:
        return telling
    kept: list[_Column] = []
    left = width
    for column in sorted(telling, key=lambda column: column.rank):
        needed = _width(column, rows) + (_GAP if kept else 0)
        if needed <= left:
            kept.append(column)
            left -= needed
    return [column for column in telling if column in kept]


def _width(column: _Column, rows: Sequence[RankRow]) -> int:
    return max(len(column.head), *(cell_len(column.cell(row)) for row in rows), 1)


def _table(
    rows: Sequence[RankRow],
    columns: Sequence[_Column],
    width: int,
    view: View | None,
    sums: Sequence[RankRow],
) -> list[Text]:
    widths = [_width(column, [*rows, *sums]) for column in columns]
    room = width - sum(widths) - _GAP * len(widths)
    has_line = (not width or room >= _NARROWEST_LINE) and any(row.line for row in rows)
    heads = [
        _padded(column.head, size, column) for column, size in zip(columns, widths, strict=True)
    ]
    lines = [Text((" " * _GAP).join([*heads, *(["last line"] if has_line else [])]), _DIM)]
    for row in (*rows, *sums):
        line = Text(style="reverse" if view is not None and row.label == view.selected else "")
        for column, size in zip(columns, widths, strict=True):
            style = style_of(row) if column.head == "state" else _BARS.get(column.head, "")
            line.append(_padded(column.cell(row), size, column) + " " * _GAP, style)
        lines.append(line.append(visible(row.line), _DIM) if has_line else line)
    return lines


def style_of(row: RankRow) -> str:
    """Return the style of ROW's state."""
    if row.is_odd:
        return _BAD if row.state.startswith(("failed", "exit", "lost")) else _WARN
    return _GOOD if row.state == "running" else ""


def _padded(text: str, width: int, column: _Column) -> str:
    blanks = " " * (width - cell_len(text))
    return blanks + text if column.is_right else text + blanks


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _size(value: float | None) -> str:
    return "" if value is None else conversion.size(value, is_short=True)


def _rate(value: float | None) -> str:
    """Return a rate with about three digits."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
