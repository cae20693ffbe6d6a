"""The table of FLEETRUN_* variables is complete, and the pages have the public ones."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
import reference_tables

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"_?FLEETRUN_[A-Z0-9_]*")
KNOWN = {row.name for row in reference_tables.OWN}
# They belong to this checkout's tests and benchmarks.
OF_TESTS = {
    "FLEETRUN_TEST_DEVICE",
    "FLEETRUN_TEST_NCCL",
    "FLEETRUN_TEST_PLUGIN",
    "FLEETRUN_TEST_EXPLORE",
    "FLEETRUN_TEST_MARKER",
    "FLEETRUN_TEST_PADDLE26",
}
# May not import the table: the ranks, and what has to run under any Python.
SPELL_IT_OUT = (
    "fleetrun/entrance/",
    "fleetrun/inject/",
    "fleetrun/app.py",
    "fleetrun/rundir/secrets.py",
    "fleetrun/rundir/variables.py",
)


def tracked() -> list[Path]:
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("git is not here, or this is no checkout")
    return [ROOT / name for name in done.stdout.split("\n") if name and (ROOT / name).is_file()]


@cache
def named_in(folders: tuple[str, ...]) -> dict[str, set[str]]:
    """Return every variable that is named in FOLDERS, and where."""
    files_of: dict[str, set[str]] = {}
    for path in tracked():
        where = path.relative_to(ROOT).as_posix()
        if where.startswith(folders) and where != "tests/rundir/test_variables.py":
            for name in NAME.findall(path.read_text(encoding="utf-8", errors="replace")):
                files_of.setdefault(name, set()).add(where)
    return files_of


def test_no_variable_is_missing_in_the_table() -> None:
    named = named_in(("fleetrun/", "scripts/", "tests/", "docs/", "configs/", "README.md"))
    strange = {
        name: where for name, where in named.items() if name not in KNOWN | OF_TESTS | {"FLEETRUN_"}
    }
    assert not strange


def test_each_variable_is_spelled_in_one_place() -> None:
    breaches = []
    for path in sorted((ROOT / "fleetrun").rglob("*.py")):
        where = path.relative_to(ROOT).as_posix()
        if where.startswith(SPELL_IT_OUT):
            continue
        source = path.read_text(encoding="utf-8")
        # Most spell none, not even in their comments.
        if not NAME.search(source):
            continue
        tree = ast.parse(source)
        told = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        breaches += [
            f"{where} line {node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and id(node) not in told
            and isinstance(node.value, str)
            and NAME.search(node.value)
        ]
    assert not breaches


def test_the_pages_tell_of_all_that_are_public_and_of_no_other() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    told = {name for page in pages for name in NAME.findall(page.read_text(encoding="utf-8"))}
    # As a pattern, for all of them.
    assert {row.name for row in reference_tables.OWN if row.is_public} == told - {"FLEETRUN_"}
