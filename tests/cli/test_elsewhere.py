"""Words of other launchers: each is answered with the word that works here."""

from __future__ import annotations

import re

import pytest

from fleetrun.cli import elsewhere, options, parser, request
from fleetrun.cli.argv import split


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


@pytest.mark.parametrize(
    ("words", "is_on"),
    [
        (["--redirects", "3"], True),
        (["--redirects"], True),
        (["--redirects=true"], True),
        (["--redirects", "0"], False),
        ([], False),
    ],
)
def test_redirects_are_asked_for_as_torchrun_does(words: list[str], *, is_on: bool) -> None:
    made = request.resolve(split([*words, "train.py"]), {}, None)
    assert (made.redirects, made.script.target) == (is_on, "train.py")


def test_a_word_that_is_ours_is_no_hint() -> None:
    """It would never be read."""
    assert not elsewhere.HINTS.keys() & options.BY_SPELLING.keys() - {"np"}
