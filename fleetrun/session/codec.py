"""Messages as JSON, read with bounds on everything in them.

A message is a NamedTuple, which is written as `{"is": NAME, field: value, ...}` and checked by the
annotations of its fields.
"""

# No `from __future__ import annotations` here, for the reason given in model.py.
import base64
import re
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from itertools import repeat
from json import JSONDecoder, JSONEncoder
from math import isfinite
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_type_hints

from fleetrun.run.events import Lines
from fleetrun.text import visible, visible_lines

LONGEST_TEXT = 1 << 16
# Characters that act on a terminal or reorder text. Other unprintable ones pass, because two
# hosts' Pythons may disagree about them.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_NAME = "is"
# The longest that escapes may make a text.
_ESCAPED = 8 * 1024


class Malformed(ValueError):
    """Raised for bytes that no launcher sends; the message says what is wrong with them."""


# JSON --------------------------------------------------------------------------------------------


def dump(values: Mapping[str, object]) -> bytes:
    r"""Write VALUES as JSON; characters that no encoding has become an escape.

    >>> dump({"who": "n\udc80", "code": 1})
    b'{"who":"n\\\\udc80","code":1}'
    """
    text = _encoder().encode(values)
    try:
        return text.encode()
    except UnicodeEncodeError:
        # File names may contain lone surrogates; JSON doubles a backslash.
        return re.sub("[\ud800-\udfff]", lambda match: f"\\\\u{ord(match[0]):04x}", text).encode()


# Making an encoder takes longer than encoding a heartbeat.
@cache
def _encoder() -> "JSONEncoder":
    return JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


@cache
def _decoder() -> "JSONDecoder":
    return JSONDecoder(parse_float=_finite, parse_constant=_no_constant)


def load(payload: bytes) -> Mapping[str, object]:
    """Return the JSON object in PAYLOAD; raise Malformed if it is not one."""
    try:
        values = _decoder().decode(payload.decode())
    except Malformed:
        raise
    except (ValueError, RecursionError):
        raise Malformed("no JSON") from None
    if not isinstance(values, dict):
        raise Malformed("no JSON object")
    return values


def _finite(digits: str) -> float:
    number = float(digits)
    if not isfinite(number):
        raise Malformed("a number that is too large")
    return number


def _no_constant(name: str) -> float:
    raise Malformed(f"{name}, which is not a number")


# Messages ----------------------------------------------------------------------------------------


class Codec:
    """Writes and reads messages of KINDS, which they name as their classes are called.

    `Annotated[KIND, TEST]` is a value of KIND for which TEST is true. A type may have a method
    `check`, which raises ValueError for values that its annotations allow but that make no sense.
    """

    def __init__(self, *kinds: type) -> None:
        self._types = {kind.__name__: kind for kind in kinds}
        # A roster goes to a thousand hosts.
        self._last: tuple[object, bytes] = (None, b"")

    def write(self, message: tuple[object, ...]) -> bytes:
        """Return MESSAGE as JSON."""
        if self._last[0] is not message:
            name = type(message).__name__
            assert name in self._types, name
            values = {_NAME: name, **_plain_fields(message)}
            self._last = (message, dump(values))
        return self._last[1]

    def read(self, payload: bytes) -> Any:  # noqa: ANN401 - any of the types it was made with
        """Return the message in PAYLOAD; raise Malformed if it is not one."""
        values = dict(load(payload))
        name = values.pop(_NAME, None)
        kind = self._types.get(name) if isinstance(name, str) else None
        if kind is None:
            raise Malformed("an unknown message")
        return _typed(kind, values, str(name))


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


def _plain_fields(message: tuple[object, ...]) -> dict[str, object]:
    names: tuple[str, ...] = getattr(message, "_fields")  # noqa: B009 - a NamedTuple has it
    kinds = _hints(type(message))
    return {
        name: _plain(value, has_lines=kinds[name] == Lines)
        for name, value in zip(names, message, strict=True)
    }


def _plain(value: object, *, has_lines: bool = False) -> object:
    if isinstance(value, tuple):
        return (
            _plain_fields(value) if hasattr(value, "_fields") else [_plain(item) for item in value]
        )
    if not isinstance(value, str) or value.isprintable():
        return value
    # Escapes make it longer; keep it within the limits.
    shown = visible_lines(value) if has_lines else visible(value)
    return shown[: max(len(value), _ESCAPED)]


def _typed(kind: Any, value: object, where: str) -> Any:  # noqa: ANN401, PLR0911 - one line for each kind of value
    """Return VALUE as the annotation KIND requires; raise Malformed if it does not match."""
    if kind is float and type(value) is int:
        return float(value)
    if kind in {bool, int, float, NoneType} and type(value) is kind:
        return value
    if kind in {str, Lines} and type(value) is str:
        return _text(value, where, has_lines=kind == Lines)
    origin, arguments = _shape(kind)
    if origin in {UnionType, Union}:
        return _one_of(arguments, value, where)
    if origin is Annotated:
        return _tested(arguments[0], arguments[1], value, where)
    if origin is tuple and isinstance(value, list):
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(kinds) == len(value):
            return tuple(map(_typed, kinds, value, repeat(where)))
    if hasattr(kind, "_fields") and isinstance(value, dict):
        return _record(kind, value, where)
    raise Malformed(f"{where} is not what it must be")


@cache
def _shape(kind: Any) -> tuple[Any, tuple[Any, ...]]:  # noqa: ANN401 - an annotation
    """Return origin and arguments of KIND, cached because a roster has thousands of values."""
    tests = getattr(kind, "__metadata__", ())
    if tests:
        return Annotated, (kind.__origin__, *tests)
    return getattr(kind, "__origin__", type(kind)), getattr(kind, "__args__", ())


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _one_of(kinds: tuple[Any, ...], value: object, where: str) -> object:
    for kind in kinds:
        with suppress(Malformed):
            return _typed(kind, value, where)
    raise Malformed(f"{where} is not what it must be")


def _tested(kind: Any, test: Callable[[Any], bool], value: object, where: str) -> object:  # noqa: ANN401 - an annotation
    typed = _typed(kind, value, where)
    if not test(typed):
        raise Malformed(f"{where} is not what it must be")
    return typed


def _record(kind: Any, values: Mapping[str, object], where: str) -> object:  # noqa: ANN401 - a NamedTuple
    annotations = _hints(kind)
    if values.keys() != annotations.keys():
        raise Malformed(f"{where} has other fields")
    record = kind(**{n: _typed(annotations[n], v, f"{where}.{n}") for n, v in values.items()})
    try:
        check = getattr(record, "check", None)
        if check is not None:
            check()
    except ValueError as error:
        raise Malformed(f"{where}: {error}") from None
    return record


def _text(text: str, where: str, *, has_lines: bool) -> str:
    if len(text) > LONGEST_TEXT:
        raise Malformed(f"{where} is longer than {LONGEST_TEXT} characters")
    try:
        text.encode()
    except UnicodeEncodeError:
        # JSON can encode half of a surrogate pair, which cannot be printed.
        raise Malformed(f"{where} is no text") from None
    if _CONTROL.search(text.replace("\n", "") if has_lines else text):
        raise Malformed(f"{where} holds control characters")
    return text
