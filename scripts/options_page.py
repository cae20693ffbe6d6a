"""Writes the tables of options into docs/options.md: .venv/bin/python scripts/options_page.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pages import DOCS, cell, table, with_section

PAGE = DOCS / "options.md"
BEGIN = "<!-- options: made by scripts/options_page.py from fleetrun/options.py -->"
END = "<!-- end of options -->"

if TYPE_CHECKING:
    from fleetrun.options import Option


def row(option: Option) -> list[str]:
    """Return OPTION's line of a table: its spellings, default, variables and meaning."""
    if option.kind == "flag":
        value = ""
    else:
        value = f"[={option.metavar}]" if option.bare is not None else f" {option.metavar}"
    spellings = [f"{option.flag}{value}", *(f"--{alias}" for alias in option.aliases)]
    meaning = [option.help, option.reason[:1].upper() + option.reason[1:]]
    default = "" if option.default in {None, "false"} else f"`{option.default}`"
    cells = (
        ", ".join(f"`{one}`" for one in spellings),
        default,
        ", ".join(f"`{name}`" for name in option.env),
        " ".join(filter(None, meaning)),
    )
    return [cell(each) for each in cells]


def tables() -> str:
    """Return a table of options for each section of the help."""
    from fleetrun import options

    parts = []
    for group in options.GROUPS:
        rows = [row(option) for option in options.TABLE if option.group == group]
        made = table(("option", "default", "variable", "meaning"), rows)
        parts.append(f"\n### {group}\n{made}")
    return "".join(parts) + "\n"


def page() -> str:
    """Return the page as it should be."""
    return with_section(PAGE, BEGIN, END, tables())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
