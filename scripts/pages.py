"""What the scripts share that write pages of docs/ from tables of the code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import translations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# What the generated pages say in Chinese; the help's own texts are in the catalogue of the package.
CATALOGUE = Path(__file__).with_name("pages.zh_CN.po")
# Texts without a translation, which stay English.
MISSING: list[str] = []
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


def translation(page: Path) -> Callable[[str], str]:
    """Return what translates the texts of PAGE: nothing to do for those in English."""
    if not page.stem.endswith(".zh-CN"):
        return str
    files = (translations.SOURCE, CATALOGUE)
    known = {
        text: translated
        for file in files
        for text, translated in translations.read(file.read_text(encoding="utf-8")).items()
    }

    def translate(text: str) -> str:
        # The empty text of a catalogue is its header.
        if not text:
            return ""
        if text not in known and text not in MISSING:
            MISSING.append(text)
        return known.get(text, text)

    return translate


def write(pages: Iterable[Path], text: Callable[[Path], str]) -> None:
    """Write TEXT of each of PAGES, and name the texts that have no translation yet."""
    for page in pages:
        page.write_text(text(page), encoding="utf-8")
    if MISSING:
        print(f"{CATALOGUE} lacks {len(MISSING)} translations: {MISSING}", file=sys.stderr)


def in_both_languages(page: Path) -> tuple[Path, Path]:
    """Return PAGE and its twin in Chinese."""
    return page, page.with_name(f"{page.stem}.zh-CN.md")
