"""Reading files that other processes write, some of them while they die: tolerant of anything.

Nothing here raises because of what is in a file, and what is not as expected is nothing. Keys that
are not known are skipped by whoever parses.
"""

from __future__ import annotations

import os
import stat
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

Record = TypeVar("Record", bound=tuple[object, ...])

# Longer files are cut; fleetrun writes none.
MOST = 64 * 1024 * 1024
# Of a file that grows, this much is read in one go; no line is longer.
_PIECE = 16 * 1024 * 1024
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def content(path: str, most: int = MOST, *, from_end: bool = False) -> bytes | None:
    """Return at most MOST bytes of the file PATH; None where there is no such file."""
    try:
        # A pipe or a link was not written by fleetrun.
        fd = os.open(path, _OPEN)
        with open(fd, "rb", buffering=0) as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                return None
            if from_end:
                file.seek(max(0, found.st_size - most))
            whole = bytearray()
            while len(whole) < most and (part := file.read(most - len(whole))):
                whole += part
            return bytes(whole)
    except OSError:
        return None


def piece(path: str, begin: int, length: int) -> bytes:
    """Return at most LENGTH bytes of the file PATH from BEGIN on; none if it cannot be read."""
    try:
        fd = os.open(path, _OPEN)
        with open(fd, "rb", buffering=0):
            return os.pread(fd, length, begin) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    except OSError:
        return b""


class GrowingFile:
    """The file PATH, whose whole lines are read as they are added."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._at = 0

    def read(self) -> bytes:
        """Return the next lines; nothing where there are none, or the file cannot be read."""
        text = piece(self._path, self._at, _PIECE)
        whole = text.rfind(b"\n") + 1
        self._at += whole
        return text[:whole]


def written_at(path: str) -> float:
    """Return when the file PATH was last written to, in seconds since 1970; 0: nobody knows."""
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def parse(text: bytes | None) -> dict[str, Any] | None:
    """Return the JSON object that TEXT is; None if it is none."""
    if text is None:
        return None
    import json  # 3 ms that a start has no use for

    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def document(path: str) -> dict[str, Any] | None:
    """Return the JSON object in the file PATH; None if there is none."""
    return parse(content(path))


def lines(path: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file that has one in each line; a line without an end is none."""
    for line in (content(path) or b"").split(b"\n")[:-1]:
        found = parse(line)
        if found is not None:
            yield found


def text(value: object) -> str:
    """Return VALUE as text that can be printed anywhere; nothing for null."""
    try:
        shown = "" if value is None else str(value)
    except (ValueError, RecursionError):
        # Nested as deeply as could just be read, or a number of very many digits.
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
        found = float(value)
    except OverflowError:
        return None
    return found if abs(found) < float("inf") else None


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
    return [one for one in items(value) if isinstance(one, dict)]


def texts(value: object) -> tuple[str, ...]:
    """Return the elements of a list as texts."""
    return tuple(text(one) for one in items(value))


def wholes(value: object) -> tuple[int, ...]:
    """Return the whole numbers of a list."""
    return tuple(one for one in map(whole, items(value)) if one is not None)


def record(kind: type[Record], found: Mapping[str, Any], /, **given: object) -> Record:
    """Return what the object FOUND says of each field of KIND, as its annotation has it.

    What is not there, or something else, is the field's default, else nothing; fields that are
    GIVEN are as they are.
    """
    fields = {
        name: default if (value := read(found.get(name))) is None else value
        for name, read, default in _fields(kind, frozenset(given))
    }
    make: Any = kind
    made: Record = make(**fields, **given)
    return made


@cache
def _fields(
    kind: type[tuple[object, ...]], given: frozenset[str]
) -> tuple[tuple[str, Callable[[object], object], object], ...]:
    """Return the fields of KIND that are not GIVEN, each with what reads it and what it is else."""
    rows = []
    for name, annotation in kind.__annotations__.items():
        if name not in given:
            # typing.NamedTuple wraps an annotation that is a text; Python 3.10 takes tuple[...]
            # for a class.
            shown = getattr(annotation, "__forward_arg__", None) or str(annotation)
            name_of = annotation.__name__ if type(annotation) is type else shown
            read, nothing = _READERS[name_of]
            defaults: Mapping[str, object] = getattr(kind, "_field_defaults")  # noqa: B009 - a NamedTuple has it
            rows.append((name, read, defaults.get(name, nothing)))
    return tuple(rows)


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
    """Return how many bytes the file PATH has; -1 if it cannot be looked at."""
    try:
        return os.stat(path).st_size
    except OSError:
        return -1
