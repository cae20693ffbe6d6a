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
RANKS, LOG, STACKS, HELP = "ranks", "log", "stacks", "help"
KEYS = (
    ("arrows, PgUp, PgDn (j, k)", "choose a rank; the table follows"),
    ("l or Enter, t", "the log of that rank, its Python stacks (all ranks are asked)"),
    ("s", "sort by the next column, the largest first"),
    ("/", "only rows with these words; odd: those that need attention"),
    ("?", "these keys"),
    ("Esc, q", "back to the table; quit"),
)
# The names of keys that are no letters.
_NAMES = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\x08": "backspace",
    "\x1b": "escape",
    "\x03": "quit",
}
_KEY = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.)?|.", re.DOTALL)


class View(NamedTuple):
    """The selection to show; `selected` is the label of a row, empty before the first arrow key."""

    what: str = RANKS
    order: str = "rank"
    words: str = ""
    is_typing: bool = False
    selected: str = ""
    is_over: bool = False


def keys(typed: bytes) -> list[str]:
    r"""Split TYPED into keys.

    >>> keys(b"s\x1b[Bq")
    ['s', 'down', 'q']
    """
    return [_NAMES.get(key, key) for key in _KEY.findall(typed.decode(errors="replace"))]


def ordered(rows: Sequence[RankRow], view: View) -> list[RankRow]:
    """Return the ROWS that match VIEW's filter in its order; unknown values come last."""
    words = view.words.lower().split()
    rows = [row for row in rows if all(word in _about(row) for word in words)]
    measure = _ORDERS.get(view.order)
    if measure is None:
        return rows
    value_of = {row: value for row in rows if (value := measure(row)) is not None}
    known = [row for row in rows if not isnan(value_of.get(row, float("nan")))]
    # The largest first, as people look for these.
    known.sort(key=lambda row: -value_of[row])
    return known + [row for row in rows if row not in known]


def _about(row: RankRow) -> str:
    odd = "odd" if row.is_odd else ""
    return f"{row.label} {row.state} {row.host} {row.device} {row.place} {odd} {row.line}".lower()


def after(  # noqa: PLR0911 - a case for each key
    view: View, key: str, rows: Sequence[RankRow], page: int
) -> View:
    """Return VIEW of ROWS after KEY was pressed; PAGE is the number of lines of a page."""
    if key == "quit":
        return view._replace(is_over=True)
    if view.is_typing:
        return _typed(view, key)
    moves = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -page, "page down": page}
    if key in moves:
        return _moved(view, moves[key], rows)
    if key in {"escape", "q"} and view.what == RANKS:
        return View() if key == "escape" else view._replace(is_over=True)
    if key in {"l", "enter", "t"}:
        # Those of the selected row, else of one that needs attention.
        chosen = [row for row in rows if row.label == view.selected]
        chosen = chosen or sorted(rows, key=lambda row: not row.is_odd)[:1]
        what = STACKS if key == "t" else LOG
        return view._replace(what=what, selected=chosen[0].label if chosen else "")
    match key:
        case "escape" | "q":
            return view._replace(what=RANKS)
        case "?":
            return view._replace(what=HELP)
        case "/":
            return view._replace(is_typing=True, words="")
        case "s":
            # The next column that has values.
            places = [*_ORDERS]
            later = places[places.index(view.order) + 1 :] if view.order in places else places
            telling = (name for name in later if any(_ORDERS[name](r) is not None for r in rows))
            return view._replace(order=next(telling, "rank"))
        case _:
            return view


def _typed(view: View, key: str) -> View:
    """Return VIEW, whose filter is being typed, after KEY."""
    match key:
        case "enter":
            return view._replace(is_typing=False)
        case "escape":
            return view._replace(is_typing=False, words="")
        case "backspace":
            return view._replace(words=view.words[:-1])
    is_text = len(key) == 1 and key.isprintable()
    return view._replace(words=view.words + key) if is_text else view


def _moved(view: View, by: int, rows: Sequence[RankRow]) -> View:
    labels = [row.label for row in ordered(rows, view)]
    if not labels:
        return view
    at = labels.index(view.selected) + by if view.selected in labels else 0
    return view._replace(selected=labels[min(max(at, 0), len(labels) - 1)])
