"""Columns laid out by rich: as wide as the terminal, and in a pipe never wrapped or cut."""

from __future__ import annotations

import io
import shutil
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

# Wider than any row; rich makes columns only as wide as what is in them.
_UNLIMITED = 1 << 16


def width() -> int:
    """Return the columns of the terminal that standard output is; 0: it is none."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return shutil.get_terminal_size().columns if is_terminal else 0


def layout(
    rows: Sequence[Sequence[str]],
    *,
    heads: Sequence[str] = (),
    numbers: int = 0,
    indent: int = 0,
    width: int = 0,
) -> str:
    """Return ROWS in columns under HEADS, within WIDTH where words allow; 0: no limit.

    The first NUMBERS columns are aligned at their right. No line ends in blanks.

    >>> print(layout([["1", "a b"], ["10", "[c]"]], heads=["n", "what"], numbers=1, indent=2))
       n  what
       1  a b
      10  [c]
    """
    table = Table(box=None, show_header=bool(heads), padding=(0, 2, 0, 0), header_style="")
    for place in range(max(map(len, (heads, *rows)))):
        head = heads[place] if heads else ""
        table.add_column(head, justify="right" if place < numbers else "left", overflow="fold")
    for row in rows:
        # As Text: what stands in brackets or between colons is no markup of rich.
        table.add_row(*map(Text, row))
    out = io.StringIO()
    # Nothing of the environment counts: a file gets what a terminal shows, without its colours.
    console = Console(
        file=out, width=max(width - indent, 1) if width else _UNLIMITED, color_system=None
    )
    console.print(table)
    return "\n".join(f"{'':{indent}}{line}".rstrip() for line in out.getvalue().splitlines())
