"""Files of the run directory appear atomically, are private, and follow no link."""

from __future__ import annotations

import resource
import signal
from typing import TYPE_CHECKING

import pytest

from fleetrun.rundir.folder import Folder, append_whole

if TYPE_CHECKING:
    from pathlib import Path


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    folder.write("a", "old")
    before = (tmp_path / "a").stat().st_ino
    # A leftover of a killed launcher.
    (tmp_path / "a.new").write_text("half")
    folder.write("a", "new\udcff")
    assert (tmp_path / "a").read_bytes() == b"new\xff"
    assert (tmp_path / "a").stat().st_ino != before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    folder.write("a", "old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5, limits[1]))
        with pytest.raises(OSError, match="too large"):
            folder.write("a", "longer than that")
        refused = pytest.raises(OSError, match="No space left")
        with (tmp_path / "a").open("ab", buffering=0) as file, refused:
            append_whole(file.fileno(), b" and more")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert (tmp_path / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_no_link_is_written_through(tmp_path: Path) -> None:
    made = tmp_path / "run"
    made.mkdir()
    (tmp_path / "precious").write_text("precious")
    folder = Folder(str(made))
    for name in ("a", "a.new", "b"):
        (made / name).symlink_to(tmp_path / "precious")
    folder.write("a", "text")
    with pytest.raises(OSError, match="symbolic links"):
        folder.add("b", "text")
    assert (tmp_path / "precious").read_text() == "precious"
    assert (made / "a").read_text() == "text"
