"""The possible values of options, for shell completion."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fleetrun.options import Option
from fleetrun.strategy import fields, load


class Completion(NamedTuple):
    """What a shell may put in the place of a word: click's CompletionItem, without click."""

    value: str
    # `file` and `dir`: the shell completes it.
    type: str = "plain"
    help: str | None = None


def of(option: Option, incomplete: str, before: str) -> list[Completion]:
    """Return the completions of INCOMPLETE, a value of OPTION.

    BEFORE precedes it in the same word and is part of the result.
    """
    match option.name:
        case "strategy":
            # Files first: bash would drop what precedes them.

            earlier, comma, last = incomplete.rpartition(",")
            presets = among(load.PRESETS, last, before=before + earlier + comma)
            return [Completion(before + incomplete, type=option.path), *presets]
        case "set":
            return _knobs(incomplete, before)
        case "vary":
            key, equals, values = incomplete.partition("=")
            earlier, comma, last = values.rpartition(",")
            return _knobs(f"{key}{equals}{last}", before, between=earlier + comma)
    if option.path:
        return [Completion(before + incomplete, type=option.path)]
    if option.kind in ("bool", "flag"):
        words: tuple[str, ...] = ("true", "false")
    else:
        words = option.words or ((option.bare,) if option.bare else ())
    return among(words, incomplete, before=before)


def _knobs(incomplete: str, before: str, between: str = "") -> list[Completion]:
    """Return fields as KEY=, or the values of one; BETWEEN precedes the last value."""
    key, equals, value = incomplete.partition("=")
    known = _settable()
    if not equals:
        return among(tuple(f"{name}=" for name in known), key, before=before)
    field = known.get(key)
    if field is None:
        return []
    words = {"bool": ("true", "false"), "choice": field.words}.get(field.kind, ())
    words += fields.special_values(field)
    return among(words, value, before=f"{before}{key}={between}")


def _settable() -> dict[str, fields.Field]:
    """Return the keys of --set: fields, and the parts of fields that have parts."""
    settable: dict[str, fields.Field] = {}
    for field in fields.TABLE:
        # Fields need no section, as their names are unique.
        parts = {f"{field.name}.{key.name}": key for key in field.keys}
        settable |= parts or {field.name: field}
    return settable


def files(incomplete: str) -> list[Completion]:
    """Let the shell complete INCOMPLETE as a file."""
    return [Completion(incomplete, type="file")]


def among(words: Iterable[str], incomplete: str, *, before: str = "") -> list[Completion]:
    """Return the WORDS that start with INCOMPLETE, after BEFORE in the same word."""
    return [Completion(before + word) for word in words if word.startswith(incomplete)]
