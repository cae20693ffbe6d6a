"""The identity of the files that ranks run, which hosts compare."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fleetrun.model import Script
from fleetrun.session import script

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two hosts' folders, with the same script, program and package."""
    made = tmp_path / "one", tmp_path / "two"
    for folder in made:
        (folder / "pkg").mkdir(parents=True)
        for name in ("train.py", "prog", "rank.sh", "data", "pkg/mod.py", "pkg/__main__.py"):
            (folder / name).write_text(f"# {name}\n")
            (folder / name).chmod(0o755)
    return made


def of(line: str, folder: Path) -> str:
    """Return the identity of what LINE runs in FOLDER, which is also on PATH."""
    form, words = ("module", line[3:].split()) if line.startswith("-m ") else ("file", line.split())
    asked = Script(form, words[0], tuple(words[1:]))
    return script.identity(asked, str(folder), {"PATH": f"{folder}:/bin:/usr/bin"})


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("train.py --lr 1", "train.py"),
        ("./train.py", "train.py"),
        ("./prog", "prog"),
        ("prog", "prog"),
        ("sh rank.sh", "rank.sh"),
        ("./prog data", "data"),
        ("-m pkg.mod", "pkg/mod.py"),
        ("-m pkg", "pkg/__main__.py"),
    ],
)
def test_each_file_that_is_run_counts(line: str, changed: str, folders: tuple[Path, Path]) -> None:
    first, second = folders
    assert of(line, first) == of(line, second) != ""
    before = of(line, second)
    (second / changed).write_text("# other\n")
    assert of(line, second) != before
    (second / changed).unlink()
    assert of(line, second) != before


@pytest.mark.parametrize("line", ["train.py --lr 2", "train.py data", "./prog -x", "sh -c true"])
def test_what_else_stands_on_the_command_line_does_not(
    line: str, folders: tuple[Path, Path]
) -> None:
    first, second = folders
    (second / "data").write_text("other")
    assert of(line, first) == of(line, second) == of(line.split(maxsplit=1)[0], first)


@pytest.mark.parametrize("line", ["none.py", "./none", "no-such-program", "pkg"])
def test_what_cannot_be_read_has_none(line: str, folders: tuple[Path, Path]) -> None:
    assert of(line, folders[0]) == ""
