"""The strategy of a command line: files, --set and options, and how they are shown."""

# No `from __future__ import annotations` here, for the reason given in options.py.
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fleetrun.errors import UsageError
from fleetrun.model import Knob, Layer, Setting, Strategy
from fleetrun.options import RawOption
from fleetrun.strategy import load


class NamedStrategy(NamedTuple):
    """One preset or file, and where it was requested."""

    name: str
    given: RawOption


def names(given: Iterable[RawOption]) -> list[NamedStrategy]:
    """Return the names in GIVEN, all from one tier; separated by commas, in a variable colons."""
    named = []
    for each in given:
        raw = each.raw.replace(":", ",") if each.source.startswith("$") else each.raw
        named += [NamedStrategy(name.strip(), each) for name in raw.split(",") if name.strip()]
    return named


def strategy(
    wanted: Sequence[NamedStrategy], sets: Iterable[RawOption], known: Mapping[str, Layer]
) -> load.UnplacedStrategy:
    """Combine WANTED and SETS; a layer that is already KNOWN is not read again."""
    layers = [known.get(each.name) or _read(each) for each in wanted]
    return load.combine(layers, [_set(each) for each in sets])


def _read(wanted: NamedStrategy) -> Layer:
    try:
        load.find(wanted.name)
    except UsageError as error:
        given = wanted.given._replace(raw=wanted.name)
        raise UsageError(given.blame(str(error))) from None
    return load.read(wanted.name)


def _set(given: RawOption) -> Knob:
    knob = load.parse_set(given.raw)
    # In a config file it has a line.
    return knob if given.source == "command line" else knob._replace(source=given.source)


def settings(wanted: Sequence[NamedStrategy], sets: Iterable[RawOption]) -> list[Setting]:
    """Return the lines of the settings: all names together, and each field that was set."""
    source = wanted[-1].given.source if wanted else "default"
    named = ",".join(each.name for each in wanted) or "None"
    lines = [Setting("strategy", named, source)]
    for given in sets:
        key, _, value = given.raw.partition("=")
        lines.append(Setting(f"set.{key.strip()}", value, given.source))
    return lines


def settle(
    asked: load.UnplacedStrategy,
    *,
    mode: str,
    is_strict: bool,
    check_ranks: int | str | None,
    merge_tail: str,
) -> Strategy:
    """Return the strategy ASKED for, with the options that apply to it."""
    return asked.strategy._replace(
        mode=mode,
        is_strict=is_strict,
        check_ranks="auto" if check_ranks is None else check_ranks,
        merge_tail=merge_tail,
    )
