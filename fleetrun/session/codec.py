"""Messages as JSON: `[NAME, [field, ...]]`, each field checked by its annotation."""

# No `from __future__ import annotations` here, for the reason given in model.py.
import json
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from fleetrun.run.events import Lines
from fleetrun.text import visible, visible_lines

LONGEST_TEXT = 1 << 16


class Malformed(ValueError):
    """Raised for bytes that no launcher sends."""


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
            named = type(message).__name__, message
            text = json.dumps(named, separators=(",", ":"), allow_nan=False)
            self._last = (message, text.encode())
        return self._last[1]

    def read(self, payload: bytes) -> Any:  # noqa: ANN401 - any of the kinds
        """Return the message in PAYLOAD; raise Malformed if it is not one."""
        try:
            name, values = json.loads(payload.decode())
            return _read(self._kinds[name], values)
        except (ValueError, TypeError, KeyError, RecursionError):
            raise Malformed from None


@cache
def _layout(kind: Any) -> Any:  # noqa: ANN401 - a NamedTuple, and the tuple of its annotations
    hints = get_type_hints(kind, include_extras=True)
    return tuple[tuple(hints[name] for name in kind._fields)]  # type: ignore[misc]


def _read(kind: Any, value: Any) -> Any:  # noqa: ANN401, PLR0911 - an annotation, and JSON
    """Return VALUE as KIND has it, or raise ValueError."""
    origin, parts = get_origin(kind), get_args(kind)
    if hasattr(kind, "_fields"):
        record = kind(*_read(_layout(kind), value))
        getattr(record, "check", lambda: None)()
        return record
    if origin in {Union, UnionType}:
        return None if value is None else _read(parts[0], value)
    if origin is tuple and type(value) is list:
        kinds = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        return tuple(_read(part, item) for part, item in zip(kinds, value, strict=True))
    if kind in {str, Lines}:
        if type(value) is str and len(value) <= LONGEST_TEXT:
            return visible(value) if kind is str else visible_lines(value)
    elif origin is Annotated:
        result = _read(parts[0], value)
        if parts[1](result):
            return result
    # False for NaN and infinity, too.
    elif kind is float and type(value) in {int, float} and abs(value) < 1 << 1000:
        return float(value)
    elif type(value) is kind:
        return value
    raise ValueError(value)
