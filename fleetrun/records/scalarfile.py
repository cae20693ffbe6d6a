"""Reads the scalars that scripts write for VisualDL and TensorBoard, without either.

Both files are sequences of protocol buffers: VisualDL's `Record` after its length, and
TensorBoard's `Event` after its length and a checksum, with another checksum after it. Anything but
scalars, and a half-written last record, is left out.
"""

from __future__ import annotations

import os
import re
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from fleetrun.records import reading

if TYPE_CHECKING:
    from collections.abc import Iterator

# The names of TensorBoard's and VisualDL's files.
FILES = re.compile(r"(?:^|/)(?:events\.out\.tfevents\.|vdlrecords\.)[^/]*$")
# More records are sampled in pieces at even distances, each long enough for all tags.
_MOST_RECORDS, _PIECES = 1 << 16, 128
# How deep below a script's working folder to look for them.
_DEEPEST, _MOST_FOLDERS = 4, 2000
_LENGTH = struct.Struct("<Q")
# The wire types of protocol buffers.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST_VARINT = 70
_RECORD = 0x0A
_MS_PER_S = 1e3


class Scalar(NamedTuple):
    """A value of TAG at a step; AT is wall clock, in seconds."""

    tag: str
    step: int
    at: float
    value: float


class _NoMessageError(Exception):
    """What was read is not a message."""


def read(folder: str) -> Iterator[Scalar]:
    """Yield the scalars in the files of FOLDER, in the order in which each was written."""
    try:
        names = sorted(name for name in os.listdir(folder) if FILES.search(name))
    except OSError:
        return
    for name in names:
        content = reading.content(os.path.join(folder, name)) or b""
        of_record = _of_visualdl if name.startswith("vdlrecords.") else _of_tensorboard
        # VisualDL writes checksums in some file systems only; its records begin with their field.
        checked = of_record is _of_tensorboard or content[_LENGTH.size : 9] != bytes((_RECORD,))
        with suppress(_NoMessageError, ValueError, struct.error):
            for record in _spread(list(_records(content, 4 if checked else 0))):
                yield from of_record(record)


def below(folder: str, since: float) -> set[str]:
    """Return FOLDER and the folders below it that have scalar files written since SINCE.

    VisualDL does not keep its file open, so /proc does not show it.
    """
    folders: set[str] = set()
    todo = [(folder, 0)]
    for parent, depth in todo:
        try:
            with os.scandir(parent) as entries:
                for entry in entries:
                    if FILES.search(entry.name) and entry.stat().st_mtime >= since:
                        folders.add(parent)
                    is_folder = entry.is_dir(follow_symlinks=False)
                    if is_folder and depth < _DEEPEST and entry.name[0] != ".":
                        todo.append((entry.path, depth + 1))
        except OSError:
            continue
        if len(todo) > _MOST_FOLDERS:
            break
    return folders


def _records(content: bytes, checksum: int) -> Iterator[bytes]:
    """Yield the records of CONTENT, with CHECKSUM bytes of checksum after length and record."""
    at = 0
    while at + _LENGTH.size <= len(content):
        (length,) = _LENGTH.unpack_from(content, at)
        at += _LENGTH.size + checksum
        if at + length > len(content):
            return
        yield content[at : at + length]
        at += length + checksum


def _spread(records: list[bytes], most: int = _MOST_RECORDS) -> list[bytes]:
    """Return RECORDS, or of more than MOST pieces at even distances, the last at the end.

    >>> [len(_spread([b""] * count)) for count in (100, 100_000)]
    [100, 65536]
    """
    if len(records) <= most:
        return records
    size = most // _PIECES
    begins = [place * (len(records) - size) // (_PIECES - 1) for place in range(_PIECES)]
    return [record for begin in begins for record in records[begin : begin + size]]


def _of_visualdl(record: bytes) -> Iterator[Scalar]:
    for number, value in _fields(record):
        if number == 1 and isinstance(value, bytes):
            parts = dict(_fields(value))
            tag, step, at, real = (parts.get(place) for place in (2, 1, 3, 4))
            if isinstance(tag, bytes) and isinstance(real, float):
                since = at / _MS_PER_S if isinstance(at, int) else 0.0
                yield Scalar(_tag(tag), step if isinstance(step, int) else 0, since, real)


def _of_tensorboard(record: bytes) -> Iterator[Scalar]:
    parts = dict(_fields(record))
    at, step, summary = parts.get(1), parts.get(2), parts.get(5)
    if not isinstance(summary, bytes):
        return
    for number, value in _fields(summary):
        if number != 1 or not isinstance(value, bytes):
            continue
        value_fields = dict(_fields(value))
        tag, real, tensor = value_fields.get(1), value_fields.get(2), value_fields.get(8)
        if isinstance(tensor, bytes):
            real = _of_tensor(tensor)
        if isinstance(tag, bytes) and isinstance(real, float):
            since = at if isinstance(at, float) else 0.0
            yield Scalar(_tag(tag), step if isinstance(step, int) else 0, since, real)


def _of_tensor(tensor: bytes) -> float | None:
    """Return the value of a TENSOR of one float."""
    parts = dict(_fields(tensor))
    value = next((parts[number] for number in (4, 5) if number in parts), None)
    if parts.get(1) == 1 and isinstance(value, bytes) and len(value) == 4:
        return float(struct.unpack("<f", value)[0])
    return value if isinstance(value, float) else None


def _tag(tag: bytes) -> str:
    return tag.decode(errors="replace")


def _fields(message: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Yield the numbers and values of the fields of MESSAGE; _NoMessageError if it is not one."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        value: int | float | bytes
        if kind == _VARINT:
            value, at = _varint(message, at)
        elif kind == _FIXED64:
            (value,), at = struct.unpack_from("<d", message, at), at + 8
        elif kind == _FIXED32:
            (value,), at = struct.unpack_from("<f", message, at), at + 4
        elif kind == _BYTES:
            length, at = _varint(message, at)
            if at + length > len(message):
                raise _NoMessageError
            value, at = message[at : at + length], at + length
        else:
            raise _NoMessageError
        yield key >> 3, value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins AT in MESSAGE, and where it ends."""
    value = shift = 0
    while at < len(message) and shift < _LONGEST_VARINT:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            # Negative numbers are the complement to 64 bits.
            return (value - (1 << 64) if value >> 63 else value), at
    raise _NoMessageError
