"""Writes the tables of docs/options.md, in both languages: python scripts/options_page.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pages import DOCS, cell, in_both_languages, table, translation, with_section, write

PAGES = in_both_languages(DOCS / "options.md")
# Of the Chinese one; what the help has is translated there.
HEADS = {
    "option": "选项",
    "default": "默认值",
    "variable": "环境变量",
    "meaning": "含义",
}
BEGIN = "<!-- options: made by scripts/options_page.py from fleetrun/options.py -->"
END = "<!-- end of options -->"

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fleetrun.options import Option


def row(option: Option, translate: Callable[[str], str]) -> list[str]:
    """Return OPTION's line of a table: its spellings, default, variables and meaning."""
    if option.kind == "flag":
        value = ""
    else:
        value = f"[={option.metavar}]" if option.bare is not None else f" {option.metavar}"
    spellings = [f"{option.flag}{value}", *(f"--{alias}" for alias in option.aliases)]
    reason = translate(option.reason)
    meaning = translate(option.help) or reason[:1].upper() + reason[1:]
    default = "" if option.default in {None, "false"} else f"`{option.default}`"
    cells = (
        ", ".join(f"`{spelling}`" for spelling in spellings),
        default,
        ", ".join(f"`{name}`" for name in option.env),
        meaning,
    )
    return [cell(text) for text in cells]


def tables(page: Path) -> str:
    """Return a table of options for each section of the help, in the language of PAGE."""
    from fleetrun import options

    is_chinese = page != PAGES[0]
    translate = translation(page)
    heads = [HEADS[head] if is_chinese else head for head in HEADS]
    parts = []
    for group in options.GROUPS:
        rows = [row(option, translate) for option in options.KNOWN if option.group == group]
        parts.append(f"\n### {translate(group)}\n{table(heads, rows)}")
    return "".join(parts) + "\n"


def text(page: Path) -> str:
    """Return PAGE as it should be."""
    return with_section(page, BEGIN, END, tables(page))


if __name__ == "__main__":
    write(PAGES, text)
