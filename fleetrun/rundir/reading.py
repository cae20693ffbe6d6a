"""Tolerant readers for files that other processes write, some of them while they die.

Nothing here raises because of a file's content; unexpected content counts as missing. Callers skip
unknown keys.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

Record = TypeVar("Record", bound=tuple[object, ...])

# Longer files are cut; fleetrun writes none.
MOST = 64 * 1024 * 1024
# The piece of a growing file to read at once; no line is longer.
_PIECE = 16 * 1024 * 1024
# Neither follow a link nor wait for the other end of a pipe.
READING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def content(path: str, most: int = MOST, *, from_end: bool = False) -> bytes | None:
    """Return at most MOST bytes of the file PATH; None if it does not exist."""
    try:
        # A pipe or a link was not written by fleetrun.
        fd = os.open(path, READING)
        with open(fd, "rb", buffering=0) as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return None
            if from_end:
                file.seek(max(0, status.st_size - most))
            whole = bytearray()
            while len(whole) < most and (part := file.read(most - len(whole))):
                whole += part
            return bytes(whole)
    except OSError:
        return None


def piece(path: str, begin: int, length: int) -> bytes:
    """Return at most LENGTH bytes of the file PATH from BEGIN on; empty if unreadable."""
    try:
        fd = os.open(path, READING)
        with open(fd, "rb", buffering=0):
            return os.pread(fd, length, begin) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
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
    if text is None:
        return None

    try:
        document = json.loads(text)
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
    try:
        shown = "" if value is None else str(value)
    except (ValueError, RecursionError):
        # Barely readable nesting, or a number of very many digits.
        return ""
    return shown.encode(errors="backslashreplace").decode()


def whole(value: object) -> int | None:
    """Return VALUE if it is a whole number."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def real(value: object) -> float | None:
    """Return VALUE if it is a finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) < float("inf") else None


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
        return value if abs(value) < float("inf") else None
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
    get = document.get
    fields = {
        name: default if (value := read(get(key))) is None else value
        for name, key, read, default in _fields(kind)
        if name not in given
    }
    make: Any = kind
    result: Record = make(**fields, **given)
    return result


_Reader = Callable[[object], Any]


@cache
def _fields(kind: type[tuple[object, ...]]) -> tuple[tuple[str, str, _Reader, object], ...]:
    """Return the name of each field of KIND, its key, what reads it, and its default."""
    defaults: Mapping[str, object] = getattr(kind, "_field_defaults")  # noqa: B009 - a NamedTuple has it
    rows = []
    for name, annotation in get_type_hints(kind).items():
        read, nothing = _reader(annotation)
        rows.append((name, name.rstrip("_"), read, defaults.get(name, nothing)))
    return tuple(rows)


def _reader(annotation: Any) -> tuple[_Reader, object]:  # noqa: ANN401 - a type
    """Return what reads a value as ANNOTATION, null if it is none, and what stands for null."""
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    arguments, origin = get_args(annotation), get_origin(annotation)
    if type(None) in arguments:
        return _reader(arguments[0])[0], None
    if origin is tuple:
        read = _reader(arguments[0])[0]
        return lambda value: _known(map(read, value)) if isinstance(value, list) else None, ()
    if origin is Mapping:
        read = _reader(arguments[1])[0]
        return (
            lambda value: (
                {text(key): read(item) for key, item in value.items()}
                if isinstance(value, dict)
                else None
            ),
            {},
        )
    kind: type[tuple[object, ...]] = annotation
    return lambda value: record(kind, value) if isinstance(value, dict) else None, record(kind, {})


def _known(values: Iterable[object]) -> tuple[object, ...]:
    return tuple([value for value in values if value is not None])


_SCALARS: dict[object, tuple[_Reader, object]] = {
    str: (lambda value: None if value is None else text(value), ""),
    int: (whole, 0),
    float: (real, 0.0),
    bool: (lambda value: value if isinstance(value, bool) else None, False),
    Any: (lambda value: value, None),
}
