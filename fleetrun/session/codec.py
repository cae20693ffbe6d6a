"""Messages as JSON: `[NAME, [field, ...]]`, each field checked by its annotation."""

# No `from __future__ import annotations` here, for the reason given in model.py.
import base64
import json
import zlib
from collections.abc import Callable
from functools import cache, partial
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from fleetrun.run.events import Lines
from fleetrun.text import visible, visible_lines

LONGEST_TEXT = 1 << 16


class Malformed(ValueError):
    """Raised for bytes that no launcher sends; the message says what is wrong with them."""


class Codec:
    """Writes and reads messages of KINDS, which they name as their classes are called.

    A kind is a NamedTuple of numbers, texts, truth values, other NamedTuples and tuples of these,
    or None. `Annotated[KIND, TEST]` is a value of KIND for which TEST is true. A type may have a
    method `check`, which raises ValueError for values that make no sense together. What would act
    on a terminal is escaped in texts that are read.
    """

    def __init__(self, *kinds: type) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}
        # A roster goes to all hosts.
        self._last: tuple[object, bytes] = (None, b"")

    def write(self, message: tuple[object, ...]) -> bytes:
        """Return MESSAGE as JSON."""
        if self._last[0] is not message:
            name = type(message).__name__
            assert name in self._kinds, name
            text = json.dumps((name, message), separators=(",", ":"), allow_nan=False)
            self._last = (message, text.encode())
        return self._last[1]

    def read(self, payload: bytes) -> Any:  # noqa: ANN401 - any of the kinds
        """Return the message in PAYLOAD; raise Malformed if it is not one."""
        try:
            name, values = json.loads(payload.decode())
            kind = self._kinds[name]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise Malformed("no message") from None
        return _reader(kind)(values)


def pack(content: bytes) -> str:
    """Return CONTENT, compressed, as a text that fits into a message; empty: it does not."""
    text = base64.b64encode(zlib.compress(content)).decode("ascii")
    return text if len(text) <= LONGEST_TEXT else ""


def unpack(text: str, most: int) -> bytes:
    """Return the bytes that `pack` made TEXT of; empty if it did not, or if they exceed MOST."""
    unpacking = zlib.decompressobj()
    try:
        content = unpacking.decompress(base64.b64decode(text, validate=True), most)
    except (ValueError, zlib.error):
        return b""
    return content if unpacking.eof else b""


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:  # noqa: ANN401, PLR0911 - an annotation, and its kinds
    """Return a function that returns a value as KIND has it, or raises Malformed."""
    if kind is str or kind == Lines:
        return partial(_text, visible if kind is str else visible_lines)
    if hasattr(kind, "_fields"):
        hints = get_type_hints(kind, include_extras=True)
        return partial(_record, kind, tuple(_reader(hints[name]) for name in kind._fields))
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return partial(_tested, _reader(parts[0]), parts[1])
    if origin in {Union, UnionType}:
        optional = _reader(parts[0])
        return lambda value: None if value is None else optional(value)
    if origin is tuple and parts[-1] is Ellipsis:
        read = _reader(parts[0])
        return lambda value: tuple(map(read, _list(value)))
    if origin is tuple:
        return partial(_group, tuple(map(_reader, parts)))
    return partial(_value, kind)


def _value(kind: type, value: Any) -> Any:  # noqa: ANN401 - as above
    if kind is float and type(value) in {int, float}:
        if abs(value) < 1 << 1000:  # false for NaN and infinity, too
            return float(value)
    elif type(value) is kind:
        return value
    raise Malformed("not what it must be")


def _text(escape: Callable[[str], str], value: object) -> str:
    text: str = _value(str, value)
    if len(text) > LONGEST_TEXT:
        raise Malformed(f"longer than {LONGEST_TEXT} characters")
    return escape(text)


def _tested(read: Callable[[Any], Any], test: Callable[[Any], bool], value: object) -> object:
    read_value = read(value)
    if not test(read_value):
        raise Malformed("not what it must be")
    return read_value


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise Malformed("not what it must be")
    return value


def _group(readers: tuple[Callable[[Any], Any], ...], value: object) -> tuple[object, ...]:
    values = _list(value)
    if len(values) != len(readers):
        raise Malformed("with other fields")
    return tuple(read(item) for read, item in zip(readers, values, strict=True))


def _record(kind: Any, readers: tuple[Callable[[Any], Any], ...], value: object) -> object:  # noqa: ANN401 - a NamedTuple
    try:
        record = kind(*_group(readers, value))
        getattr(record, "check", lambda: None)()
    except ValueError as error:
        raise Malformed(f"{kind.__name__}: {error}") from None
    return record
