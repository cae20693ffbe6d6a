"""Lays out columns by rich: as wide as the terminal, and never wrapped or cut in a pipe."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fleetrun.text import display_width, elided

if TYPE_CHECKING:
    from rich.console import JustifyMethod

# Wider than any row; rich makes columns only as wide as necessary.
_UNLIMITED = 1 << 16
_GAP = 2
# A narrower column is useless.
_NARROWEST = 8


def width() -> int:
    """Return the width of the terminal on standard output; 0 if it is not a terminal."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return shutil.get_terminal_size().columns if is_terminal else 0


def layout(
    rows: Sequence[Sequence[str]],
    *,
    heads: Sequence[str] = (),
    numbers: int = 0,
    indent: int = 0,
    width: int = 0,
    whole: Sequence[int] = (),
) -> str:
    """Return ROWS in columns under HEADS, within WIDTH if words allow; 0: no limit.

    The first NUMBERS columns are right-aligned, and cells of the columns WHOLE are never broken. No
    line ends in blanks.

    >>> print(layout([["1", "a b"], ["10", "[c]"]], heads=["n", "what"], numbers=1, indent=2))
       n  what
       1  a b
      10  [c]
    """
    table = Table(box=None, show_header=bool(heads), padding=(0, _GAP, 0, 0), header_style="")
    count = max(map(len, (heads, *rows)))
    whole_width = sum(_widest(rows, heads, place) + _GAP for place in whole)
    if whole_width + (_NARROWEST + _GAP) * (count - len(whole)) > width - indent and whole:
        # No room for the other columns: let the terminal break the lines.
        width = 0
    for place in range(count):
        head = heads[place] if heads else ""
        justify: JustifyMethod = "right" if place < numbers else "left"
        table.add_column(head, justify=justify, overflow="fold", no_wrap=place in whole)
    for row in rows:
        # As Text, so that brackets and colons are not rich's markup.
        table.add_row(*map(Text, row))
    out = io.StringIO()
    # Independent of the environment: a file gets what a terminal shows, without its colours.
    console = Console(
        file=out, width=max(width - indent, 1) if width else _UNLIMITED, color_system=None
    )
    console.print(table)
    return "\n".join(f"{'':{indent}}{line}".rstrip() for line in out.getvalue().splitlines())


def _widest(rows: Sequence[Sequence[str]], heads: Sequence[str], place: int) -> int:
    return max((display_width(row[place]) for row in (heads, *rows) if row), default=0)


def fitted(
    rows: Sequence[Sequence[str]], heads: Sequence[str], *, cut: Sequence[int], width: int
) -> list[list[str]]:
    """Return ROWS with the cells of the columns CUT elided so that a line fits into WIDTH.

    >>> fitted([["7", "python train.py", "/home/me/job"]], ["n", "a", "b"], cut=[1, 2], width=28)
    [['7', 'pyth...n.py', '/ho.../job']]
    """
    cells = [list(row) for row in rows]
    if not width:
        return cells
    widths = [_widest(rows, heads, place) for place in range(len(heads))]
    room = width - sum(size + _GAP for place, size in enumerate(widths) if place not in cut)
    # What narrow columns do not need is left to wider ones.
    for count, place in enumerate(sorted(cut, key=lambda place: widths[place])):
        share = max(room // (len(cut) - count) - _GAP, _NARROWEST)
        for row in cells:
            row[place] = elided(row[place], share)
        room -= min(widths[place], share) + _GAP
    return cells
