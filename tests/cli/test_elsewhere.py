"""Words of other launchers: each is answered with the word that works here."""

from __future__ import annotations

import re
from pathlib import Path

from fleetrun.cli import elsewhere, options

COOKBOOK = Path(__file__).parents[2] / "docs" / "cookbook.md"


def test_a_hint_names_options_that_there_are_and_work() -> None:
    known = {name for name, option in options.BY_SPELLING.items() if not option.reason}
    for word, says in elsewhere.HINTS.items():
        assert set(re.findall(r"--([a-z][\w-]+)", says)) <= known, word
        assert says.endswith("."), word


def test_a_word_that_is_ours_is_no_hint() -> None:
    """It would never be read."""
    assert not elsewhere.HINTS.keys() & options.BY_SPELLING.keys() - {"np"}


def test_every_option_that_the_cookbook_translates_is_answered() -> None:
    tables = COOKBOOK.read_text(encoding="utf-8").partition("### torchrun\n")[2]
    rows = re.findall(r"(?m)^\| (`-.*?`) \| ", tables.partition("\n## ")[0])
    words = [word for row in rows for word in re.findall(r"--([\w-]+)", row)]
    assert len(words) >= 20
    for word in words:
        name = word.replace("-", "_")
        assert name in {*options.BY_SPELLING, *elsewhere.HINTS, *elsewhere.GONE}, word
