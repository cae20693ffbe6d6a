"""How the script is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import a_request, some_facts

from fleetrun.model import Script
from fleetrun.plan import command

PYTHON = "/usr/bin/python3"
AWKWARD = ("", "--", "-m", "--gpus=0", "a b", "ünïcode\n", "$HOME")


@pytest.mark.parametrize(
    ("form", "target", "program", "expected"),
    [
        ("file", "train.py", "train.py", (PYTHON, "-u", "train.py")),
        ("file", "a/b.py", "a/b.py", (PYTHON, "-u", "a/b.py")),
        ("file", "train.pyxes", "train.pyxes", (PYTHON, "train.pyxes")),
        ("file", "train.pyz", "train.pyz", (PYTHON, "-u", "train.pyz")),
        ("module", "package.train", None, (PYTHON, "-u", "-m", "package.train")),
        ("file", "./run.sh", "./run.sh", ("./run.sh",)),
        ("file", "bash", "/usr/bin/bash", ("/usr/bin/bash",)),
        ("file", "./run.sh", None, ("./run.sh",)),
        ("file", "-dash.py", "-dash.py", (PYTHON, "-u", "./-dash.py")),
        ("file", "-dash.pyxes", "-dash.pyxes", (PYTHON, "./-dash.pyxes")),
        ("file", "-dash.sh", "./-dash.sh", ("./-dash.sh",)),
    ],
)
def test_scripts_modules_and_programs(
    form: str, target: str, program: str | None, expected: tuple[str, ...]
) -> None:
    request = a_request(script=Script(form, target, AWKWARD))
    argv = command.argv(request, some_facts(program=program))
    assert argv == (*expected, *AWKWARD)


def test_run_check_is_a_script_of_ours() -> None:
    argv = command.argv(a_request(script=Script("file", "run_check", ())), some_facts())
    assert argv[:2] == (PYTHON, "-u")
    assert Path(argv[2]).is_file()
    other = command.argv(a_request(script=Script("file", "./run_check", ())), some_facts())
    assert other == ("./run_check",)


@pytest.mark.parametrize(
    ("form", "target", "expected"),
    [
        ("file", "train.py", ("train.py",)),
        ("module", "package.train", ("-m", "package.train")),
    ],
)
def test_coverage_stands_before_python_scripts(
    form: str, target: str, expected: tuple[str, ...]
) -> None:
    facts = some_facts(environ={"WITH_COVERAGE": "ON"})
    argv = command.argv(a_request(script=Script(form, target, ())), facts)
    assert argv == (PYTHON, "-u", "-m", "coverage", "run", "--branch", "-p", *expected)
