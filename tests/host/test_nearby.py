"""If a script is missing, the message names the most similar file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from fleetrun.errors import EnvironmentFault
from fleetrun.host import scripts
from fleetrun.model import Script

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder with scripts."""
    for name in ("train.py", "train.py.orig", "eval.py", "run.sh", "data.csv", "scripts/train.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (tmp_path / "package.py").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("tarin.py", "train.py"),
        ("Train.py", "train.py"),
        ("train", "train.py"),
        ("run", "run.sh"),
        ("./tarin.py", "./train.py"),
        ("scripts/tarin.py", "scripts/train.py"),
        ("ruun.sh", "run.sh"),
        # A folder is not a script, and another word is not a typo.
        ("packaje.py", None),
        ("finetune.py", None),
        ("nowhere/train.py", None),
        ("data.py", None),
        ("traim.py", "train.py"),
        ("eva.py", "eval.py"),
        # The suffix alone does not make names similar.
        ("grin.py", None),
    ],
)
def test_the_file_that_was_meant_is_found(folder: Path, typed: str, meant: str | None) -> None:
    assert scripts.nearby(typed, str(folder)) == meant
    absolute = None if meant is None else str(folder / meant)
    assert scripts.nearby(str(folder / typed), str(folder)) == absolute


@pytest.mark.parametrize("typed", ["tarin.py", "./tarin", "tarin"])
def test_the_refusal_of_a_script_names_it(folder: Path, typed: str) -> None:
    meant = re.escape("./train.py" if typed[0] == "." else "train.py")
    with pytest.raises(EnvironmentFault, match=rf"; did you mean {meant}\?$"):
        scripts.find(Script("file", typed, ()), str(folder), {"PATH": "/bin"})


def test_a_folder_that_cannot_be_read_is_no_reason_to_fail(tmp_path: Path) -> None:
    assert scripts.nearby("gone/train.py", str(tmp_path / "gone")) is None


@pytest.mark.parametrize(
    ("typed", "meant"), [("tarin", "train"), ("scripts.tarin", "scripts.train")]
)
def test_the_refusal_of_a_module_names_it(folder: Path, typed: str, meant: str) -> None:
    with pytest.raises(EnvironmentFault, match=rf"module {typed} .*; did you mean {meant}\?$"):
        scripts.check_module(typed, str(folder), is_ours=False)


@pytest.mark.parametrize(
    "name",
    [
        "train",
        "scripts.train",
        "scripts.other",
        "compiled",
        "trace",
        "json.tool",
        ".tarin",
    ],
)
def test_other_modules_are_left_to_python(folder: Path, name: str) -> None:
    # Nearly `train`, but Python has it; one that is not written in Python; a package.
    (folder / "compiled.so").touch()
    (folder / "compile.py").touch()
    (folder / "scripts" / "other").mkdir()
    (folder / "scripts" / "others.py").touch()
    scripts.check_module(name, str(folder), is_ours=True)


@pytest.mark.parametrize("name", ["nosuch", "nosuch.train", "scripts.nosuch", "finetune"])
def test_a_module_that_our_python_does_not_find_is_refused(folder: Path, name: str) -> None:
    scripts.check_module(name, str(folder), is_ours=False)
    # One whose package is here may do anything when it is imported.
    if name == "scripts.nosuch":
        scripts.check_module(name, str(folder), is_ours=True)
        return
    first = name.partition(".")[0]
    with pytest.raises(EnvironmentFault, match=f"There is no module {first} in {folder}, and "):
        scripts.check_module(name, str(folder), is_ours=True)
