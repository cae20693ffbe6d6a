"""Readers for files that other processes write, some of them while they die.

A file that is missing or a line that is no JSON object is skipped; a key may be missing.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

Record = TypeVar("Record", bound=tuple[object, ...])

# Longer files are cut; fleetrun writes none.
MOST = 64 * 1024 * 1024
# The piece of a growing file to read at once; no line is longer.
_PIECE = 16 * 1024 * 1024
# Neither follow a link nor wait for the other end of a pipe: fleetrun has not written these.
READING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def content(path: str, most: int = MOST, *, from_end: bool = False) -> bytes | None:
    """Return at most MOST bytes of the file PATH; None if it cannot be read."""
    try:
        with open(os.open(path, READING), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most) if from_end else 0)
            return file.read(most)
    except OSError:
        return None


def piece(path: str, begin: int, length: int) -> bytes:
    """Return at most LENGTH bytes of the file PATH from BEGIN on; empty if unreadable."""
    try:
        with open(os.open(path, READING), "rb", buffering=0) as file:
            return os.pread(file.fileno(), length, begin)
    except OSError:
        return b""


class GrowingFile:
    """The file PATH, whose complete lines are read as they are added."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._at = 0

    def read(self) -> bytes:
        """Return the next lines; empty if there are none or the file is unreadable."""
        text = piece(self._path, self._at, _PIECE)
        whole = text.rfind(b"\n") + 1
        self._at += whole
        return text[:whole]


def written_at(path: str) -> float:
    """Return when the file PATH was last written, in seconds since 1970; 0: unknown."""
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def size(path: str) -> int:
    """Return the size of the file PATH in bytes; -1 if unknown."""
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def parse(text: bytes | None) -> dict[str, Any] | None:
    """Return the JSON object in TEXT, whose texts can be printed; None if it is not one."""
    text = text or b""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    return _printable(document) if rb"\ud" in text else document


def _printable(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Escape halves of characters, such as those of names that are no UTF-8."""
    if isinstance(value, dict):
        return {key: _printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return list(map(_printable, value))
    return text(value) if isinstance(value, str) else value


def document(path: str) -> dict[str, Any] | None:
    """Return the JSON object in the file PATH; None if there is none."""
    return parse(content(path))


def lines(path: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file, one per line; ignore an unterminated line."""
    for line in (content(path) or b"").split(b"\n")[:-1]:
        document = parse(line)
        if document is not None:
            yield document


# Values ------------------------------------------------------------------------------------------


def text(value: object) -> str:
    """Return VALUE as printable text; empty for null."""
    if type(value) is str and value.isascii():
        # Files of metrics have millions.
        return value
    return "" if value is None else str(value).encode(errors="backslashreplace").decode()


# Records -----------------------------------------------------------------------------------------


def plain(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Return VALUE with records as objects, and null for NaN and infinity, which JSON lacks.

    The key of a field `class_` is `class`.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "_asdict"):
        return {key.rstrip("_"): plain(item) for key, item in value._asdict().items()}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def record(kind: type[Record], document: Mapping[str, Any], /, **given: object) -> Record:
    """Return a KIND from the object DOCUMENT, as `plain` has it; keys of no field are ignored.

    A field that is null, missing or of another plain type gets its default, or None. GIVEN fields
    are taken as they are.
    """
    make: Any = kind
    values = {name: _frozen(document.get(name.rstrip("_"))) for name in make._fields}
    for name, plain in _plain_fields(kind):
        if not isinstance(values[name], plain):
            values[name] = None
    known = {name: value for name, value in values.items() if value is not None}
    result: Record = make(**{**values, **make._field_defaults, **known, **given})
    return result


_PLAIN: dict[str, Any] = {"int": int, "float": (int, float), "str": str, "bool": bool}


@cache
def _plain_fields(kind: type[tuple[object, ...]]) -> list[tuple[str, Any]]:
    """Return the fields of KIND that are of a plain type, with that: a file has many of a kind."""
    # typing.NamedTuple keeps the text of an annotation like this.
    texts = {
        name: getattr(annotation, "__forward_arg__", "").partition(" ")[0]
        for name, annotation in kind.__annotations__.items()
    }
    return [(name, _PLAIN[text]) for name, text in texts.items() if text in _PLAIN]


def _frozen(value: object) -> object:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
