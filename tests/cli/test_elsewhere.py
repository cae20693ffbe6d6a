"""Words of other launchers: each is answered with the word that works here."""

from __future__ import annotations

import re

from fleetrun.cli import elsewhere, options


def test_a_hint_names_options_that_there_are_and_work() -> None:
    known = {name for name, option in options.BY_SPELLING.items() if not option.reason}
    for word, says in elsewhere.HINTS.items():
        assert set(re.findall(r"--([a-z][\w-]+)", says)) <= known, word
        assert says.endswith("."), word


def test_a_word_that_is_ours_is_no_hint() -> None:
    """It would never be read."""
    assert not elsewhere.HINTS.keys() & options.BY_SPELLING.keys() - {"np"}
