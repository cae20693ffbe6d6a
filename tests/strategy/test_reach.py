"""Command lines that a strategy cannot reach."""

from __future__ import annotations

import pytest

from fleetrun.model import Script
from fleetrun.strategy import reach


@pytest.mark.parametrize(
    ("target", "words", "letter"),
    [
        ("python", "-I a.py", "I"),
        ("/opt/bin/python3.11", "-u -E a.py", "E"),
        ("python3", "-uS a.py", "S"),
        ("python3", "-W error -X dev -I -m pkg", "I"),
        ("python3", "-Werror -I a.py", "I"),
    ],
)
def test_a_python_that_ignores_its_environment_is_known(
    target: str, words: str, letter: str
) -> None:
    reason = reach.obstacle(Script("file", target, tuple(words.split())))
    assert reason is not None
    assert f" -{letter} runs " in reason


@pytest.mark.parametrize(
    ("form", "target", "words"),
    [
        ("file", "train.py", "-I"),
        ("module", "python", "-I"),
        ("file", "python3", "a.py -I"),
        ("file", "python3", "-u -m pkg -I"),
        ("file", "python3", "-cI"),
        ("file", "python3", "-X -I a.py"),
        ("file", "python3", "--help -I"),
        ("file", "python3", ""),
        ("file", "pythonic", "-I"),
        ("file", "bash", "-E"),
    ],
)
def test_any_other_command_is_not_suspected(form: str, target: str, words: str) -> None:
    assert reach.obstacle(Script(form, target, tuple(words.split()))) is None
