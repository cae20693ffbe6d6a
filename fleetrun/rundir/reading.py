"""Tolerant readers for files that other processes write, some of them while they die.

Nothing here raises because of a file's content; unexpected content counts as missing. Callers skip
unknown keys.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

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
    """Return the JSON object in TEXT; None if it is not one."""
    try:
        document = json.loads(text or b"")
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


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


def whole(value: object) -> int | None:
    """Return VALUE if it is a whole number."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def real(value: object) -> float | None:
    """Return VALUE if it is a finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e308 else None  # type: ignore[arg-type]


def mapping(value: object) -> dict[str, Any]:
    """Return VALUE if it is an object; else an empty one."""
    return value if isinstance(value, dict) else {}


def items(value: object) -> list[Any]:
    """Return VALUE if it is a list; else an empty one."""
    return value if isinstance(value, list) else []


def mappings(value: object) -> list[dict[str, Any]]:
    """Return the objects of a list."""
    return [item for item in items(value) if isinstance(item, dict)]


def texts(value: object) -> tuple[str, ...]:
    """Return the elements of a list as texts."""
    return tuple(map(text, items(value)))


# Records -----------------------------------------------------------------------------------------


def plain(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Return VALUE with records as objects, and null for NaN and infinity, which JSON lacks.

    The key of a field `class_` is `class`.
    """
    if isinstance(value, float):
        return real(value)
    if hasattr(value, "_asdict"):
        return {key.rstrip("_"): plain(item) for key, item in value._asdict().items()}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def record(kind: type[Record], document: Mapping[str, Any], /, **given: object) -> Record:
    """Return a KIND from the object DOCUMENT, each field read by its annotation, as `plain` has it.

    A missing or malformed field gets its default, or an empty value. GIVEN fields are taken as they
    are.
    """
    fields = {
        name: default if (value := read(document.get(name.rstrip("_")))) is None else value
        for name, read, default in _fields(kind)
        if name not in given
    }
    make: Any = kind
    result: Record = make(**fields, **given)
    return result


_Reader = Callable[[object], Any]
_SCALARS: dict[object, tuple[_Reader, object]] = {
    str: (lambda value: None if value is None else text(value), ""),
    int: (whole, 0),
    float: (real, 0.0),
    bool: (lambda value: value if isinstance(value, bool) else None, False),
    Any: (lambda value: value, None),
}


@cache
def _fields(kind: type[tuple[object, ...]]) -> tuple[tuple[str, _Reader, object], ...]:
    """Return the name of each field of KIND, what reads it, and its default."""
    defaults: Mapping[str, object] = getattr(kind, "_field_defaults")  # noqa: B009 - a NamedTuple has it
    readers = {name: _reader(hint) for name, hint in get_type_hints(kind).items()}
    return tuple((name, read, defaults.get(name, no)) for name, (read, no) in readers.items())


def _reader(annotation: Any) -> tuple[_Reader, object]:  # noqa: ANN401 - a type
    """Return what reads a value as ANNOTATION, null if it is none, and what stands for null."""
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    arguments, origin = get_args(annotation), get_origin(annotation)
    if type(None) in arguments:
        return _reader(arguments[0])[0], None
    if origin is tuple:
        read = _reader(arguments[0])[0]

        def read_items(value: object) -> tuple[object, ...] | None:
            if not isinstance(value, list):
                return None
            return tuple([known for item in value if (known := read(item)) is not None])

        return read_items, ()
    if origin is Mapping:
        return lambda value: value if isinstance(value, dict) else None, {}
    kind: type[tuple[object, ...]] = annotation
    return lambda value: record(kind, value) if isinstance(value, dict) else None, record(kind, {})
