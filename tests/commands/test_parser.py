"""What holds of every command: click reads it, and a slip is one sentence."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from fleetrun import cli

HOUSE = Path(cli.__file__).parent


@pytest.mark.parametrize("name", cli.COMMANDS)
@pytest.mark.parametrize("word", ["-h", "--help"])
def test_every_command_has_help(name: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, word], environ={}) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"Usage: fleetrun {name} ")
    assert err == ""


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_misspelt_option_is_one_sentence_with_what_was_meant(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([name, "--hepl"], environ={}) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.endswith("no such option: --hepl; did you mean --help?\n")


def test_nothing_reads_words_by_argparse() -> None:
    for path in HOUSE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert "argparse" not in {alias.name for alias in node.names}, path
            elif isinstance(node, ast.ImportFrom):
                assert node.module != "argparse", path
