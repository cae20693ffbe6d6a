"""What the scripts share that write pages of docs/ from tables of the code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# They look into the fleetrun beside them, whichever Python they are run by.
sys.path.insert(0, str(ROOT))


def cell(text: str) -> str:
    r"""Return TEXT as a cell of a table.

    >>> cell("a|b\nc")
    'a\\|b c'
    """
    return text.replace("|", "\\|").replace("\n", " ")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown, after an empty line.

    >>> print(table(("code", "meaning"), [("0", "all well")]), end="")
    <BLANKLINE>
    | code | meaning |
    | --- | --- |
    | 0 | all well |
    """
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def with_section(page: Path, begin: str, end: str, text: str) -> str:
    """Return the text of PAGE with TEXT between the marks BEGIN and END, which must be there."""
    before, begin_found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, end_found, after = rest.partition(end)
    if not begin_found or not end_found:
        raise SystemExit(f"{page}: {begin} and {end} are missing.")
    return f"{before}{begin}\n{text}{end}{after}"


def in_both_languages(page: Path) -> tuple[Path, Path]:
    """Return PAGE and its twin in Chinese."""
    return page, page.with_name(f"{page.stem}.zh-CN.md")
