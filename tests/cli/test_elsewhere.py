"""Words of other launchers: each is answered with the word that works here."""

from __future__ import annotations

import re

from fleetrun.cli import elsewhere, options, parser


def test_a_hint_names_options_that_there_are_and_work() -> None:
    known = {*options.BY_SPELLING, *(option.flag[2:] for option in options.OPTIONS)}
    for word, says in elsewhere.HINTS.items():
        rest = says.replace("{}", "")
        for command, words in re.findall(r"`fleetrun (\w+) ([^`]*)`", rest):
            # Those of another command of ours are its own.
            own = {name for row in parser.load(command).params for name in row.opts}
            assert {f"--{name}" for name in re.findall(r"--([a-z][\w-]+)", words)} <= own, word
            rest = rest.replace(words, "")
        named = set(re.findall(r"--([a-z][\w-]+)", rest))
        assert named <= known, word
        assert not any(options.find(name.replace("-", "_")).reason for name in named), word
        assert says.endswith("."), word


def test_a_word_that_is_ours_is_no_hint() -> None:
    """It would never be read."""
    assert not elsewhere.HINTS.keys() & options.BY_SPELLING.keys() - {"np"}
