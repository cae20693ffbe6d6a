"""The requested strategy of a command line: files, --set and options, and their display."""

# No `from __future__ import annotations` here, for the reason given in options.py.
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fleetrun.errors import UsageError
from fleetrun.model import Knob, Layer, Setting
from fleetrun.options import RawOption
from fleetrun.strategy import load


class NamedStrategy(NamedTuple):
    """One preset or file, and where it was requested."""

    name: str
    given: RawOption


def names(raw_options: Iterable[RawOption]) -> list[NamedStrategy]:
    """Return the names in RAW_OPTIONS of one source; separated by commas, in a variable colons."""
    named = []
    for option in raw_options:
        raw = option.raw.replace(":", ",") if option.source.startswith("$") else option.raw
        named += [NamedStrategy(name.strip(), option) for name in raw.split(",") if name.strip()]
    return named


def strategy(
    requests: Sequence[NamedStrategy], sets: Iterable[RawOption], known: Mapping[str, Layer]
) -> load.UnplacedStrategy:
    """Combine REQUESTS and SETS; a layer that is already KNOWN is not read again."""
    layers = [known.get(request.name) or _read(request) for request in requests]
    return load.combine(layers, [_set(option) for option in sets])


def _read(request: NamedStrategy) -> Layer:
    try:
        load.find(request.name)
    except UsageError as error:
        option = request.given._replace(raw=request.name)
        raise UsageError(option.blame(str(error))) from None
    return load.read(request.name)


def _set(option: RawOption) -> Knob:
    knob = load.parse_set(option.raw)
    # In a config file the source has a line.
    return knob if option.source == "command line" else knob._replace(source=option.source)


def settings(requests: Sequence[NamedStrategy], sets: Iterable[RawOption]) -> list[Setting]:
    """Return the lines of the settings: all names together, and each field that was set."""
    source = requests[-1].given.source if requests else "default"
    named = ",".join(request.name for request in requests) or "None"
    lines = [Setting("strategy", named, source)]
    for option in sets:
        key, _, value = option.raw.partition("=")
        lines.append(Setting(f"set.{key.strip()}", value, option.source))
    return lines
