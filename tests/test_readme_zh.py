"""The Chinese README has the headings, commands and links of the English one, in its order."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENGLISH = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
# They lead to each other.
OTHERS = {"README.md", "README.zh-CN.md"}


def headings(text: str) -> list[int]:
    """Return the level of each heading."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [len(marks) for marks in re.findall(r"^(#+) ", prose, flags=re.MULTILINE)]


def blocks(text: str) -> list[str]:
    """Return what stands between fences."""
    return re.findall(r"```\w*\n(.*?)```", text, flags=re.DOTALL)


def links(text: str) -> set[str]:
    """Return where links lead."""
    return set(re.findall(r"\]\(([^)]+)\)", text)) - OTHERS


def rows(text: str) -> list[int]:
    """Return the number of columns of each row of a table."""
    return [line.count(" | ") for line in text.splitlines() if line.startswith("|")]


def test_both_have_the_same_headings_commands_tables_and_links() -> None:
    assert headings(CHINESE) == headings(ENGLISH)
    assert blocks(CHINESE) == blocks(ENGLISH)
    assert rows(CHINESE) == rows(ENGLISH)
    assert links(CHINESE) == links(ENGLISH)


def test_they_lead_to_each_other() -> None:
    assert "(README.zh-CN.md)" in ENGLISH
    assert "(README.md)" in CHINESE
