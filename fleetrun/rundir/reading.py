"""Tolerant readers for files that other processes write, some of them while they die.

Nothing here raises because of a file's content; unexpected content counts as missing. Callers skip
unknown keys.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

Record = TypeVar("Record", bound=tuple[object, ...])

# Longer files are cut; fleetrun writes none.
MOST = 64 * 1024 * 1024
# The piece of a growing file to read at once; no line is longer.
_PIECE = 16 * 1024 * 1024
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def content(path: str, most: int = MOST, *, from_end: bool = False) -> bytes | None:
    """Return at most MOST bytes of the file PATH; None if it does not exist."""
    try:
        # A pipe or a link was not written by fleetrun.
        fd = os.open(path, _OPEN)
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
        fd = os.open(path, _OPEN)
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
    if type(value) is float and abs(value) < float("inf"):
        return value
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) < float("inf") else None


def fact(value: object) -> bool | None:
    """Return VALUE if it is true or false."""
    return value if isinstance(value, bool) else None


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
    return tuple(text(item) for item in items(value))


def wholes(value: object) -> tuple[int, ...]:
    """Return the whole numbers of a list."""
    return tuple(number for number in map(whole, items(value)) if number is not None)


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
        name: default if (value := read(get(name.rstrip("_")))) is None else value
        for name, read, default in _fields(kind, frozenset(given))
    }
    make: Any = kind
    result: Record = make(**fields, **given)
    return result


@cache
def _fields(
    kind: type[tuple[object, ...]], given: frozenset[str]
) -> tuple[tuple[str, Callable[[object], object], object], ...]:
    """Return the fields of KIND that are not GIVEN, with their readers and defaults."""
    rows = []
    for name, annotation in kind.__annotations__.items():
        if name not in given:
            # typing.NamedTuple wraps an annotation that is a text; Python 3.10 takes tuple[...]
            # for a class.
            shown = getattr(annotation, "__forward_arg__", None) or str(annotation)
            name_of = annotation.__name__ if type(annotation) is type else shown
            read, nothing = _READERS.get(name_of) or _nested(name_of, kind.__module__)
            defaults: Mapping[str, object] = getattr(kind, "_field_defaults")  # noqa: B009 - a NamedTuple has it
            rows.append((name, read, defaults.get(name, nothing)))
    return tuple(rows)


def _nested(name: str, module: str) -> tuple[Callable[[object], object], object]:
    """Return the reader of the record NAME of MODULE, or of a tuple of them; it returns one."""
    item = name.removesuffix(" | None").removeprefix("tuple[").removesuffix(", ...]")
    kind = getattr(sys.modules[module], item.rpartition(".")[2])
    if name.endswith(" | None"):
        return lambda value: record(kind, value) if isinstance(value, dict) else None, None
    if not name.startswith("tuple["):
        return lambda value: record(kind, mapping(value)), None
    return lambda value: tuple([record(kind, entry) for entry in mappings(value)]), None


_READERS: dict[str, tuple[Callable[[object], object], object]] = {
    "str": (text, ""),
    "str | None": (lambda value: text(value) or None, None),
    "int": (whole, 0),
    "int | None": (whole, None),
    "float": (real, 0.0),
    "float | None": (real, None),
    "bool": (fact, False),
    "bool | None": (fact, None),
    "tuple[str, ...]": (texts, ()),
    "tuple[int, ...]": (wholes, ()),
}


def size(path: str) -> int:
    """Return the size of the file PATH in bytes; -1 if unknown."""
    try:
        return os.stat(path).st_size
    except OSError:
        return -1
