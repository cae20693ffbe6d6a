"""Replans the launch that wrote a manifest.json.

The command line is replayed in the folder and with the variables of that launch, followed by what
is typed beside --from-manifest, which therefore wins. `rundir/manifestfile.py` describes the file.
Values of secrets are not in it: they come from variables that must be exported again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from fleetrun import __version__
from fleetrun.cli import argv, configfile
from fleetrun.cli.argv import ParsedCommand
from fleetrun.cli.options import BY_SPELLING, find
from fleetrun.engines import detect
from fleetrun.errors import UsageError
from fleetrun.model import Layer
from fleetrun.rundir import manifestfile
from fleetrun.rundir.manifestfile import Manifest

# Returns the value of a variable, which a text lacks.
_Refill = Callable[[str, str], str]


class Replay(NamedTuple):
    """The launch to plan again: its command line and folder, and the variables that differ here."""

    parsed: ParsedCommand
    environ: dict[str, str]
    config: configfile.Config | None
    cwd: str
    restored: tuple[tuple[str, str | None], ...]
    notes: tuple[str, ...]
    # The contents of the strategies at that time, by name.
    layers: Mapping[str, Layer]


def replay(parsed: ParsedCommand, environ: Mapping[str, str]) -> Replay:
    """Return the launch whose manifest PARSED names, with PARSED's own options."""
    path = [given.raw for given in parsed.given if given.name == "from_manifest"][-1]
    if not path.strip():
        raise UsageError("--from-manifest needs a value: give FILE, a manifest.json.")
    recorded = manifestfile.read(path, BY_SPELLING.__contains__)
    # What is typed now overrides a secret anyway.
    pairs = [given.raw for given in parsed.given if find(given.name).is_pair]
    overridden = {pair.partition("=")[0] for pair in pairs}
    missing = []

    def refill(written: str, variable: str) -> str:
        if variable not in environ and variable not in overridden:
            missing.append(
                f"{written} is secret, so its value was not written down: export it first as "
                f"{variable}"
            )
        return environ.get(variable, "")

    words = _words(recorded, parsed, refill)
    named = configfile.named(parsed.given)
    config = configfile.read(named) if named else _config(recorded, refill)
    layers = dict(_layers(recorded, parsed, refill))
    restored = {name: value for name, value in environ.items() if not detect.is_remembered(name)}
    restored |= recorded.environment.values
    for name in filter(detect.is_remembered, recorded.environment.names):
        if name not in recorded.environment.values:
            restored[name] = refill(f"${name}", name)
    if missing:
        raise UsageError(f"{path}: {'; '.join(missing)}.")
    differing = sorted(
        name for name in {*environ, *restored} if environ.get(name) != restored.get(name)
    )
    return Replay(
        argv.split(words),
        restored,
        config,
        recorded.cwd,
        tuple((name, restored.get(name)) for name in differing),
        tuple(_notes(path, recorded, differing)),
        layers,
    )


def _words(recorded: Manifest, parsed: ParsedCommand, refill: _Refill) -> list[str]:
    """Return the command line of RECORDED followed by PARSED's options, or its script."""
    command = list(recorded.command)
    script_at = argv.scan(command).script_at
    start = len(command) if script_at is None else script_at
    for hidden in recorded.hidden:
        if hidden.at < start or parsed.script_at is None:
            word = command[hidden.at]
            written = word if hidden.before else f"{command[hidden.at - 1]} {word}"
            command[hidden.at] = hidden.before + refill(written, hidden.variable)
    both = (*argv.scan(command).given, *parsed.given)
    given = [f"{item.typed}={item.raw}" for item in both if item.name != "from_manifest"]
    at = parsed.script_at
    return [*given, "--", *(command[start:] if at is None else parsed.words[at:])]


def _config(recorded: Manifest, refill: _Refill) -> configfile.Config | None:
    """Return the config file as recorded."""
    if recorded.config is None:
        return None
    lines = []
    for name, raw, source, variable in recorded.config.lines:
        if variable is not None:
            raw = f"{variable}={refill(f'{source}: {raw}', variable)}"  # noqa: PLW2901
        lines.append(find(name).given(raw, name, source, name))
    return configfile.Config(recorded.config.path, tuple(lines))


def _layers(
    recorded: Manifest, parsed: ParsedCommand, refill: _Refill
) -> Iterator[tuple[str, Layer]]:
    """Yield the strategies as RECORDED, by name; those that PARSED names are read again."""
    named = [item.raw.split(",") for item in parsed.given if item.name == "strategy"]
    anew = {name.strip() for names in named for name in names}
    for record in recorded.strategies:
        if record.name not in anew:
            values = {
                name: refill(f"strategy {record.name}: {name}", name) for name in record.hidden
            }
            settings = (
                setting._replace(value=values.get(setting.name, setting.value))
                for setting in record.layer.settings
            )
            yield record.name, Layer(record.name, tuple(settings))


def _notes(path: str, recorded: Manifest, differing: Sequence[str]) -> Iterator[str]:
    """Yield the differences between this launch and the one RECORDED in PATH."""
    if differing:
        names = ", ".join(f"${name}" for name in differing)
        yield f"as in {path}, and not as in this shell: {names}."
    if recorded.cwd != os.getcwd():
        yield f"the folder is {recorded.cwd}, as in {path}."
    then = (recorded.python, f"fleetrun {recorded.versions.fleetrun}")
    for before, now in zip(then, (sys.executable, f"fleetrun {__version__}"), strict=True):
        if before != now:
            yield f"{path} was written with {before}; this is {now}."
