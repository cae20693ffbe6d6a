"""If a script is missing, the message names the most similar file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fleetrun.host import scripts

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
