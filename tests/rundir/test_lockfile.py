"""A run directory is known by its mark, which no other file and no copy has."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from fleetrun.rundir import lockfile

if TYPE_CHECKING:
    from pathlib import Path


def test_a_run_is_running_while_its_lock_is_held(tmp_path: Path) -> None:
    folder, lock = lockfile.begin(str(tmp_path), "a")
    assert lockfile.launcher_of(folder.path) == os.getpid()
    assert lockfile.is_running(folder.path)
    with pytest.raises(FileExistsError):
        lockfile.begin(str(tmp_path), "a")
    os.close(lock)
    assert not lockfile.is_running(folder.path)
