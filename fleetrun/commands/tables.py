"""Lays out columns by rich: as wide as the terminal, and never wrapped or cut in a pipe."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Collection, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

# Wider than any row; rich makes columns only as wide as necessary.
_UNLIMITED = 1 << 16


def width() -> int:
    """Return the width of the terminal on standard output; 0 if it is not a terminal."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return shutil.get_terminal_size().columns if is_terminal else 0


def layout(
    rows: Sequence[Sequence[str]],
    *,
    heads: Sequence[str] = (),
    numbers: int = 0,
    whole: Collection[int] = (),
    width: int = 0,
) -> str:
    """Return ROWS in columns under HEADS, wrapped within WIDTH columns; 0: no limit.

    The first NUMBERS columns are right-aligned, and other columns than WHOLE are wrapped first.

    >>> print(layout([["1", "a b"], ["10", "[c]"]], heads=["n", "what"], numbers=1))
     n  what
     1  a b
    10  [c]
    """
    table = Table(box=None, show_header=bool(heads), padding=(0, 2, 0, 0), header_style="")
    for place in range(max(map(len, (heads, *rows)))):
        head = heads[place] if heads else ""
        table.add_column(
            head,
            justify="right" if place < numbers else "left",
            overflow="fold",
            no_wrap=place in whole,
        )
    for row in rows:
        # As Text, so that brackets and colons are not rich's markup.
        table.add_row(*map(Text, row))
    out = io.StringIO()
    # Independent of the environment: a file gets what a terminal shows, without its colours.
    Console(file=out, width=width or _UNLIMITED, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
