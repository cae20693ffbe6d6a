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
        (b"fleetrun 4194304 a b\n", 4194304),
        (b"fleetrun 7 a c\n", None),
        (b"fleetrun 7 a b\nmore", None),
        (b"fleetrun 7 a b", None),
        (b"fleetrun x a b\n", None),
        (b"fleetrun 07 a b\n", None),
        (b"4711\n", None),
        (b"", None),
    ],
)
def test_the_launcher_is_told_by_its_whole_mark(tmp_path: Path, text: bytes, pid: int) -> None:
    path = tmp_path / "lock"
    path.write_bytes(text)
    with path.open("rb") as file:
        assert lockfile.launcher(file.fileno(), "a b") == pid


def test_a_lock_is_had_once(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    first, second = (os.open(path, os.O_RDWR) for _ in range(2))
    try:
        assert not lockfile.is_locked(first)
        assert lockfile.is_locked(second)
        os.close(first)
        first = os.open(path, os.O_RDWR)
        assert not lockfile.is_locked(second)
    finally:
        os.close(first)
        os.close(second)
