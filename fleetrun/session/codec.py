"""Messages as JSON: `{"is": NAME, field: value, ...}`, each field checked by its annotation."""

# No `from __future__ import annotations` here, for the reason given in model.py.
import base64
import json
import re
import zlib
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from fleetrun.run.events import Lines
from fleetrun.text import visible, visible_lines

LONGEST_TEXT = 1 << 16
# Characters that act on a terminal or reorder text. Other unprintable ones pass, because two
# hosts' Pythons may disagree about them.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_NAME = "is"
# The longest that escapes may make a text.
_ESCAPED = 8 * 1024


class Malformed(ValueError):
    """Raised for bytes that no launcher sends; the message says what is wrong with them."""


def dump(values: Mapping[str, object]) -> bytes:
    """Write VALUES as JSON."""
    text = json.dumps(values, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode()


def load(payload: bytes) -> dict[str, Any]:
    """Return the JSON object in PAYLOAD; raise Malformed if it is not one."""
    try:
        values = json.loads(payload.decode())
    except (ValueError, RecursionError):
        raise Malformed("no JSON") from None
    if not isinstance(values, dict):
        raise Malformed("no JSON object")
    return values


class Codec:
    """Writes and reads messages of KINDS, which they name as their classes are called.

    A kind is a NamedTuple of numbers, texts, truth values, other NamedTuples and tuples of these,
    or None. `Annotated[KIND, TEST]` is a value of KIND for which TEST is true. A type may have a
    method `check`, which raises ValueError for values that make no sense together.
    """

    def __init__(self, *kinds: type) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}
        # A roster goes to all hosts.
        self._last: tuple[object, bytes] = (None, b"")

    def write(self, message: tuple[object, ...]) -> bytes:
        """Return MESSAGE as JSON; what would act on a terminal is escaped."""
        if self._last[0] is not message:
            name = type(message).__name__
            assert name in self._kinds, name
            self._last = (message, dump({_NAME: name, **_plain(message)}))
        return self._last[1]

    def read(self, payload: bytes) -> Any:  # noqa: ANN401 - any of the kinds
        """Return the message in PAYLOAD; raise Malformed if it is not one."""
        values = load(payload)
        name = values.pop(_NAME, None)
        kind = self._kinds.get(name) if isinstance(name, str) else None
        if kind is None:
            raise Malformed("an unknown message")
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


def _plain(value: Any, kind: object = None) -> Any:  # noqa: ANN401 - whatever a message holds
    """Return VALUE, of the annotation KIND, as JSON has it."""
    if hasattr(value, "_fields"):
        kinds = _hints(value.__class__)
        return {name: _plain(item, kinds[name]) for name, item in value._asdict().items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if not isinstance(value, str) or value.isprintable():
        return value
    # Escapes make it longer; keep it within the limits.
    shown = visible_lines(value) if kind == Lines else visible(value)
    return shown[: max(len(value), _ESCAPED)]


@cache
def _hints(kind: Any) -> dict[str, Any]:  # noqa: ANN401 - a NamedTuple
    return get_type_hints(kind, include_extras=True)


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:  # noqa: ANN401, PLR0911 - an annotation, and its kinds
    """Return a function that returns a value as KIND has it, or raises Malformed."""
    if kind == Lines:
        return partial(_text, has_lines=True)
    if hasattr(kind, "_fields"):
        return partial(_record, kind, {name: _reader(hint) for name, hint in _hints(kind).items()})
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
    return _text if kind is str else partial(_value, kind)


def _value(kind: type, value: Any) -> Any:  # noqa: ANN401 - as above
    if kind is float and type(value) in {int, float}:
        if abs(value) < 1 << 1000:  # false for NaN and infinity, too
            return float(value)
    elif type(value) is kind:
        return value
    raise Malformed("not what it must be")


def _text(value: object, *, has_lines: bool = False) -> str:
    text: str = _value(str, value)
    if len(text) > LONGEST_TEXT:
        raise Malformed(f"longer than {LONGEST_TEXT} characters")
    if _CONTROL.search(text.replace("\n", "") if has_lines else text):
        raise Malformed("a text with control characters")
    return text


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
        raise Malformed("not what it must be")
    return tuple(read(item) for read, item in zip(readers, values, strict=True))


def _record(kind: Any, readers: Mapping[str, Callable[[Any], Any]], values: object) -> object:  # noqa: ANN401 - a NamedTuple
    if not isinstance(values, dict) or values.keys() != readers.keys():
        raise Malformed(f"{kind.__name__} with other fields")
    fields, name = {}, ""
    try:
        for name, read in readers.items():
            fields[name] = read(values[name])
    except Malformed as error:
        raise Malformed(f"{kind.__name__}.{name}: {error}") from None
    record = kind(**fields)
    try:
        getattr(record, "check", lambda: None)()
    except ValueError as error:
        raise Malformed(f"{kind.__name__}: {error}") from None
    return record
