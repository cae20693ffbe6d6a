"""docs/architecture.md describes the tree as it is: rooms, floors and events."""

from __future__ import annotations

import re
import symtable
import sys
from collections import Counter
from pathlib import Path

from test_floors import FLOORS

ROOT = Path(__file__).parents[1]
HOUSE = ROOT / "fleetrun"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
# Files of one name are of one thing: a plan divides, or a sink writes, what the other reads.
SAME_FILES = {"devices.py", "outputtimes.py"}

# They do not tell what the value is.
NO_NAMES = {"shall", "one", "each", "said", "found"}


def section(title: str) -> str:
    """Return the text below the heading TITLE."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_every_room_and_no_other_has_a_sentence() -> None:
    rooms = {
        path.stem
        for path in HOUSE.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|$", section("Rooms"), flags=re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(rooms - {"__init__"})
    for _, sentence in rows:
        assert sentence.endswith(".")


def test_the_floors_are_those_that_are_guarded() -> None:
    floors = re.findall(r"^\d+\. ((?:.+\n)(?:   .+\n)*)", section("Floors"), flags=re.MULTILINE)
    told = [{f"fleetrun.{name}" for name in re.findall(r"`([\w.]+)`", floor)} for floor in floors]
    assert told == [set(floor) for floor in FLOORS]


def test_every_file_and_folder_that_is_named_is_there() -> None:
    """Names as in `run/policy.py`, `tests/train` or `engines/`, from the checkout or fleetrun/."""
    named = set(re.findall(r"`((?:[\w.]+/)+[\w.]*|\w+\.py)`", PAGE))
    made = {"log/latest/events.jsonl", "fleetrun/configs"}
    assert len(named) >= 20
    missing = [
        name for name in named - made if not ((HOUSE / name).exists() or (ROOT / name).exists())
    ]
    assert not missing


def test_no_two_files_of_tests_have_one_name() -> None:
    """They are files and not a package: pytest would refuse to collect both."""
    files = sorted(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in files if files.count(name) > 1] == []


def test_no_helper_of_tests_hides_a_module_of_python() -> None:
    """Tests put the folders of their helpers in front of Python's own on sys.path."""
    helpers = {path.stem for path in (ROOT / "tests").rglob("*.py")}
    assert "running_statistics" in helpers
    assert helpers & sys.stdlib_module_names == set()


def repeated(names: list[str]) -> set[str]:
    """Return those of NAMES that are there more than once."""
    return {name for name, count in Counter(names).items() if count > 1}


def test_no_class_name_means_two_things() -> None:
    classes = [
        name
        for path in sorted(HOUSE.rglob("*.py"))
        for name in re.findall(r"(?m)^ *class _?(\w+)", path.read_text(encoding="utf-8"))
    ]
    assert len(classes) > 200
    assert repeated(classes) == set()


def test_no_file_name_means_two_things() -> None:
    files = [path.name for path in HOUSE.rglob("*.py")]
    assert repeated(files) - {"__init__.py"} == SAME_FILES


def identifiers(scope: symtable.SymbolTable) -> set[str]:
    """Return the names of variables, parameters, functions and classes in SCOPE."""
    return {*scope.get_identifiers()}.union(*map(identifiers, scope.get_children()))


def names_in(path: Path) -> set[str]:
    """Return all names in the file at PATH, and those of attributes."""
    text = path.read_text(encoding="utf-8")
    # Thirty times as fast as a walk through a tree of the syntax, but without attributes.
    return identifiers(symtable.symtable(text, path.name, "exec")).union(
        re.findall(r"\.(\w+)", text)
    )


def test_names_tell_what_they_stand_for() -> None:
    names = {
        path.relative_to(ROOT).as_posix(): names_in(path)
        for folder in ("fleetrun", "scripts", "tests")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {"main", "stderr"} <= set().union(*names.values())
    assert {path: known & NO_NAMES for path, known in names.items() if known & NO_NAMES} == {}
