"""The view of `fleetrun top` that keys have chosen: order, filter, a row, its log; pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import isnan
from typing import NamedTuple

from fleetrun.commands.top.sample import RankRow

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
RANKS, LOG, STACKS, HELP = "ranks", "log", "stacks", "help"
KEYS = (
    ("arrows, PgUp, PgDn (j, k)", "choose a rank; the table follows"),
    ("l or Enter, t", "the log of that rank, its Python stacks (all ranks are asked)"),
    ("s, r", "sort by the next column; reverse"),
    ("/, o", "only rows with these words; only those that need attention"),
    ("?", "these keys"),
    ("Esc, q", "back to the table; quit"),
)
# The escape sequences and control characters of keys.
_NAMES = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"k": "up",
    b"j": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\r": "enter",
    b"\n": "enter",
    b"\x7f": "backspace",
    b"\x08": "backspace",
    b"\x1b": "escape",
    b"\x03": "quit",
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


def keys(typed: bytes) -> list[bytes]:
    r"""Split TYPED into keys.

    >>> keys(b"s\x1b[Bq")
    [b's', b'\x1b[B', b'q']
    """
    return _KEY.findall(typed)


def ordered(rows: Sequence[RankRow], view: View) -> list[RankRow]:
    """Return the ROWS that match VIEW's filter in its order; unknown values come last."""
    words = view.words.lower().split()
    rows = [row for row in rows if all(word in _about(row) for word in words)]
    measure = _ORDERS.get(view.order)
    if measure is None:
        return rows[::-1] if view.is_reversed else rows
    value_of = {row: value for row in rows if (value := measure(row)) is not None}
    known = [row for row in rows if not isnan(value_of.get(row, float("nan")))]
    # The largest first, as people look for these.
    known.sort(key=lambda row: value_of[row], reverse=not view.is_reversed)
    return known + [row for row in rows if row not in known]


def _about(row: RankRow) -> str:
    odd = "odd" if row.is_odd else ""
    return f"{row.label} {row.state} {row.host} {row.device} {row.place} {odd} {row.line}".lower()


def after(  # noqa: C901, PLR0911, PLR0912 - a case for each key
    view: View, key: bytes, rows: Sequence[RankRow], page: int
) -> View:
    """Return VIEW of ROWS after KEY was pressed; PAGE is the number of lines of a page."""
    name = _NAMES.get(key, "")
    if view.is_typing and name != "quit":
        return _typed(view, key)
    moves = {"up": -1, "down": 1, "page up": -page, "page down": page}
    if name in moves:
        return _moved(view, moves[name], rows)
    match name or key.decode(errors="replace"):
        case "quit":
            return view._replace(is_over=True)
        case "escape" | "q" if view.what in (LOG, STACKS, HELP):
            return view._replace(what=RANKS)
        case "escape":
            return View()
        case "q":
            return view._replace(is_over=True)
        case "?":
            return view._replace(what=HELP)
        case "s":
            return _sorted(view, rows)
        case "r":
            return view._replace(is_reversed=not view.is_reversed)
        case "/":
            return view._replace(is_typing=True, words="")
        case "o":
            return view._replace(words="" if view.words == "odd" else "odd")
        case "l" | "enter" | "t" as pressed:
            # Those of the selected row, else of one that needs attention.
            chosen = [row for row in rows if row.label == view.selected]
            chosen = chosen or sorted(rows, key=lambda row: not row.is_odd)[:1]
            what = STACKS if pressed == "t" else LOG
            return view._replace(what=what, selected=chosen[0].label if chosen else "")
        case _:
            return view


def _sorted(view: View, rows: Sequence[RankRow]) -> View:
    """Return VIEW sorted by the next column that has values in ROWS."""
    place = ORDERS.index(view.order)
    following = (*ORDERS[place + 1 :], *ORDERS[: place + 1])
    order = next(
        name
        for name in following
        if name not in _ORDERS or any(_ORDERS[name](row) is not None for row in rows)
    )
    return view._replace(order=order, is_reversed=False)


def _typed(view: View, key: bytes) -> View:
    """Return VIEW, whose filter is being typed, after KEY."""
    match _NAMES.get(key):
        case "enter":
            return view._replace(is_typing=False)
        case "escape":
            return view._replace(is_typing=False, words="")
        case "backspace":
            return view._replace(words=view.words[:-1])
    text = key.decode(errors="replace")
    return view._replace(words=view.words + text) if text.isprintable() else view


def _moved(view: View, by: int, rows: Sequence[RankRow]) -> View:
    labels = [row.label for row in ordered(rows, view)]
    if not labels:
        return view
    at = labels.index(view.selected) + by if view.selected in labels else 0
    return view._replace(selected=labels[min(max(at, 0), len(labels) - 1)])
