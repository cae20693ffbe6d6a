"""The page as one file, and the files of which it is made."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from string import Template

from fleetrun.commands.pages.rundata import Document

SCRIPTS = ("words.js", "chart.js", "page.js")


def part(name: str) -> str:
    """Return the file NAME, a part of the page."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def page(stories: Sequence[Document]) -> str:
    """Return the page of one run or two as one file."""
    # No text may end the script.
    data = json.dumps(stories, allow_nan=False).replace("<", "\\u003c")
    script = "".join(map(part, SCRIPTS)) + f"show({data});"
    title = html.escape(", ".join(f"{run['title']}: {run['verdict']}" for run in stories))
    return Template(part("page.html")).substitute(
        title=title, style=part("page.css"), script=script
    )
