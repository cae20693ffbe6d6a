"""A run directory is known by its mark, which no other file and no copy has."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from fleetrun.rundir import lockfile

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "pid"),
    [
        (b"fleetrun 7 a b\n", 7),
        (b"fleetrun 7 a c\n", None),
        (b"fleetrun 7 a b\nmore", None),
        (b"fleetrun 7 a b", None),
        (b"fleetrun x a b\n", None),
        (b"4711\n", None),
        (b"", None),
    ],
)
def test_the_launcher_is_told_by_its_whole_mark(tmp_path: Path, text: bytes, pid: int) -> None:
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b/lock").write_bytes(text)
    assert lockfile.launcher_of(str(tmp_path / "a b")) == pid


def test_a_run_is_running_while_its_lock_is_held(tmp_path: Path) -> None:
    folder, lock = lockfile.begin(str(tmp_path), "a")
    assert lockfile.launcher_of(folder.path) == os.getpid()
    assert lockfile.is_running(folder.path)
    with pytest.raises(FileExistsError):
        lockfile.begin(str(tmp_path), "a")
    os.close(lock)
    assert not lockfile.is_running(folder.path)
