"""Every command is parsed by click, and a mistake is one sentence."""

from __future__ import annotations

import pytest

from fleetrun.cli import app
from fleetrun.cli.parser import COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("word", ["-h", "--help"])
def test_every_command_has_help(name: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main([name, word], environ={}) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"Usage: fleetrun {name} ")
    assert err == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_a_misspelt_option_is_one_sentence_with_what_was_meant(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main([name, "--hepl"], environ={}) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.endswith("no such option: --hepl; did you mean --help?\n")
