"""The view of `fleetrun top` that keys have chosen: order, filter, a row, its log; pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import isnan
from typing import NamedTuple

from fleetrun.commands.top.sample import RankRow, totals

# The columns by which rows can be sorted.
_ORDERS: dict[str, Callable[[RankRow], float | None]] = {
    "cpu%": lambda row: row.cpu_percent,
    "mem": lambda row: row.memory_bytes,
    "gpu%": lambda row: row.gpu_percent,
    "gmem": lambda row: row.gpu_memory_bytes,
    "step": lambda row: row.step,
    "step/s": lambda row: row.steps_per_s,
    "loss": lambda row: row.loss,
}
ORDERS = ("rank", *_ORDERS)
RANKS, HOSTS, LOG, STACKS = "ranks", "hosts", "log", "stacks"
# The escape sequences and control characters of keys.
_KEYS = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\r": "enter",
    b"\n": "enter",
    b"\x7f": "backspace",
    b"\x08": "backspace",
    b"\x1b": "escape",
}
_KEY = re.compile(
    rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.)?|[\x00-\x7f]|[\xc0-\xff][\x80-\xbf]*", re.DOTALL
)


class View(NamedTuple):
    """The selection to show; `selected` is the label of a row, empty before the first arrow key."""

    what: str = RANKS
    order: str = "rank"
    is_reversed: bool = False
    words: str = ""
    is_typing: bool = False
    selected: str = ""
    is_over: bool = False
    # Whether the terminal shows block characters.
    has_bars: bool = True


def keys(typed: bytes) -> list[bytes]:
    r"""Split TYPED into keys.

    >>> keys(b"s\x1b[Bq")
    [b's', b'\x1b[B', b'q']
    """
    return _KEY.findall(typed)


def ordered(rows: Sequence[RankRow], view: View) -> list[RankRow]:
    """Return the ROWS that match VIEW's filter in its order; unknown values come last."""
    words = view.words.lower().split()
    matching = [row for row in rows if all(word in _about(row) for word in words)]
    measure = _ORDERS.get(view.order)
    if measure is None:
        return matching[::-1] if view.is_reversed else matching
    known, unknown = [], []
    for row in matching:
        value = measure(row)
        if value is None or isnan(value):
            unknown.append(row)
        else:
            known.append((value, row))
    # The largest first, as people look for these.
    known.sort(key=lambda pair: pair[0], reverse=not view.is_reversed)
    return [row for _, row in known] + unknown


def _about(row: RankRow) -> str:
    odd = "odd" if row.is_odd else ""
    return f"{row.label} {row.state} {row.host} {row.device} {row.place} {odd} {row.line}".lower()


def after(view: View, key: bytes, rows: Sequence[RankRow], page: int) -> View:
    """Return VIEW of ROWS after KEY was pressed; PAGE is the number of lines of a page."""
    name = _KEYS.get(key, "")
    if view.is_typing:
        return _typed(view, key, name)
    moves = {"up": -1, "down": 1, "page up": -page, "page down": page}
    name = name or {b"k": "up", b"j": "down"}.get(key, "")
    if name in moves:
        return _moved(view, moves[name], rows)
    act = _ACTIONS.get(key)
    return view if act is None else act(view, rows)


def _back(view: View) -> View:
    """Return to the table, or leave it."""
    return view._replace(what=RANKS) if view.what in (LOG, STACKS) else view._replace(is_over=True)


def _sorted(view: View, step: int, rows: Sequence[RankRow]) -> View:
    """Return VIEW sorted by the next column that has values in ROWS."""
    place = ORDERS.index(view.order)
    for _ in ORDERS:
        place = (place + step) % len(ORDERS)
        measure = _ORDERS.get(ORDERS[place])
        if measure is None or any(measure(row) is not None for row in rows):
            break
    return view._replace(order=ORDERS[place], is_reversed=False)


def _opened(view: View, text_kind: str, rows: Sequence[RankRow]) -> View:
    """Return VIEW with the log or stacks of the selected row of ROWS, else of an odd one.

    If a host is selected, those of one of its rows.
    """
    candidates = [row for row in rows if view.selected in (row.label, row.host)] or rows
    # Stable: an odd one, else the first.
    chosen = sorted(candidates, key=lambda row: not row.is_odd)[:1]
    return view._replace(what=text_kind, selected=chosen[0].label if chosen else "")


_ACTIONS: dict[bytes, Callable[[View, Sequence[RankRow]], View]] = {
    b"q": lambda view, _: _back(view),
    b"Q": lambda view, _: view._replace(is_over=True),
    b"\x03": lambda view, _: view._replace(is_over=True),
    b"\x1b": lambda view, _: (
        _back(view) if view.what in (LOG, STACKS) else View(has_bars=view.has_bars)
    ),
    b"s": lambda view, rows: _sorted(view, 1, rows),
    b"S": lambda view, rows: _sorted(view, -1, rows),
    b"r": lambda view, _: view._replace(is_reversed=not view.is_reversed),
    b"/": lambda view, _: view._replace(is_typing=True, words=""),
    b"o": lambda view, _: view._replace(words="" if view.words == "odd" else "odd"),
    b"h": lambda view, _: view._replace(what=RANKS if view.what == HOSTS else HOSTS),
    b"l": lambda view, rows: _opened(view, LOG, rows),
    b"\r": lambda view, rows: _opened(view, LOG, rows),
    b"\n": lambda view, rows: _opened(view, LOG, rows),
    b"t": lambda view, rows: _opened(view, STACKS, rows),
}


def _typed(view: View, key: bytes, name: str) -> View:
    """Return VIEW, whose filter is being typed, after KEY."""
    if name in ("enter", "escape"):
        return view._replace(is_typing=False, words="" if name == "escape" else view.words)
    if name == "backspace":
        return view._replace(words=view.words[:-1])
    text = key.decode(errors="replace")
    return view._replace(words=view.words + text) if text.isprintable() and not name else view


def _moved(view: View, by: int, rows: Sequence[RankRow]) -> View:
    shown = totals(rows) if view.what == HOSTS else rows
    labels = [row.label for row in ordered(shown, view)]
    if not labels:
        return view
    at = labels.index(view.selected) + by if view.selected in labels else 0
    return view._replace(selected=labels[min(max(at, 0), len(labels) - 1)])
