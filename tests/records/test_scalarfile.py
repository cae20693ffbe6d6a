"""Scalars of VisualDL and TensorBoard are read as far as a file is valid."""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetrun.records import scalarfile
from fleetrun.records.scalarfile import Scalar

if TYPE_CHECKING:
    from pathlib import Path

# What VisualDL 2.5.3 wrote: its own tag, then `train/loss` and `lr` at steps 0 and 1.
VISUALDL = bytes.fromhex(
    "1a000000000000000a18120d6d6574615f646174615f7461671894afd9cba0345200"
    "1a000000000000000a18120a747261696e2f6c6f73731894afd9cba034250000803f"
    "12000000000000000a1012026c721895afd9cba0342500000000"
    "1c000000000000000a1a0801120a747261696e2f6c6f73731895afd9cba034250000003f"
    "14000000000000000a12080112026c721895afd9cba03425cdcccc3d"
)


def field(number: int, kind: int, value: bytes) -> bytes:
    return bytes((number << 3 | kind,)) + (bytes((len(value),)) if kind == 2 else b"") + value


def event(step: int, value: bytes) -> bytes:
    """Make a record of TensorBoard, without valid checksums, which are not read."""
    summary = field(1, 2, field(1, 2, b"loss") + value)
    wall = field(1, 1, struct.pack("<d", 1e9))
    body = wall + field(2, 0, bytes((step,))) + field(5, 2, summary)
    return struct.pack("<Q", len(body)) + b"crc1" + body + b"crc2"


def tensor(number: int, content: bytes) -> bytes:
    return field(8, 2, field(1, 0, b"\1") + field(number, 2, content))


def test_what_visualdl_wrote_is_read(tmp_path: Path) -> None:
    (tmp_path / "vdlrecords.1795455080.log").write_bytes(VISUALDL)
    scalars = list(scalarfile.read(str(tmp_path)))
    assert [(scalar.tag, scalar.step, round(scalar.value, 6)) for scalar in scalars] == [
        ("train/loss", 0, 1.0),
        ("lr", 0, 0.0),
        ("train/loss", 1, 0.5),
        ("lr", 1, 0.1),
    ]
    assert int(scalars[0].at) == 1795455080


def test_what_tensorboard_writes_is_read_in_each_of_its_forms(tmp_path: Path) -> None:
    half = struct.pack("<f", 0.5)
    forms = (field(2, 5, half), tensor(4, half), tensor(5, half), field(4, 2, b"an image"))
    text = b"".join(event(step, form) for step, form in enumerate(forms))
    (tmp_path / "events.out.tfevents.1.host").write_bytes(text + text[:30])
    (tmp_path / "other.log").write_bytes(text)
    assert list(scalarfile.read(str(tmp_path))) == [
        Scalar("loss", step, 1e9, 0.5) for step in range(3)
    ]
    assert list(scalarfile.read(str(tmp_path / "none"))) == []


def test_where_a_script_has_written_scalars_is_found_below_its_folder(tmp_path: Path) -> None:
    for place in ("a/b", ".git", "old", "1/2/3/4/5"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "vdlrecords.1.log").touch()
    os.utime(tmp_path / "old" / "vdlrecords.1.log", (5, 5))
    (tmp_path / "a" / "link").symlink_to(tmp_path)
    (tmp_path / "a" / "other.log").touch()
    assert scalarfile.below(str(tmp_path), 10) == {str(tmp_path / "a/b")}
    assert scalarfile.below(str(tmp_path / "none"), 10) == set()


@pytest.mark.parametrize("name", ["vdlrecords.1.log", "events.out.tfevents.1"])
@given(st.data())
def test_nothing_that_a_file_may_hold_is_an_error(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "scalars"
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    usual = bytearray(VISUALDL if name[0] == "v" else event(3, tensor(4, b"1234")))
    for at in data.draw(st.lists(st.integers(0, len(usual) - 1), max_size=8)):
        usual[at] = data.draw(st.integers(0, 255))
    (folder / name).write_bytes(data.draw(st.binary(max_size=60)) or bytes(usual))
    for scalar in scalarfile.read(str(folder)):
        assert isinstance(scalar.value, float)
