"""Whatever others write to a file, reading returns what it can, and never fails."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from fleetrun.rundir import reading

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "{", "\ud800", "null", "[1]", "", '{"a": 1e9999999']
)
def test_what_is_no_json_object_is_none(text: str) -> None:
    assert reading.parse(text.encode(errors="surrogatepass")) is None


def test_links_pipes_and_folders_are_no_files_of_ours(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.write_text("{}")
    (tmp_path / "link").symlink_to(real)
    os.mkfifo(tmp_path / "pipe")
    assert reading.content(str(real)) == b"{}"
    assert reading.content(str(tmp_path / "link")) is None
    # A FIFO without a writer must not block the reader.
    assert reading.content(str(tmp_path / "pipe")) is None
    assert reading.content(str(tmp_path)) is None


def test_a_line_without_an_end_is_none(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b'{"a": 1}\nnonsense\n[2]\n\xff\n{"a": 2}\n{"a": 3}')
    assert list(reading.lines(str(path))) == [{"a": 1}, {"a": 2}]
    assert list(reading.lines(str(tmp_path / "none"))) == []
