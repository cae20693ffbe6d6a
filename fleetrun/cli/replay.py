"""Replans the launch that wrote a manifest.json.

The command line is replayed in the folder and with the variables of that launch, followed by what
is typed beside --from-manifest, which therefore wins. `rundir/manifestfile.py` describes the file.
Values of secrets are not in it: they come from variables that must be exported again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
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


class _Secrets:
    """The values that a manifest does not hold, from variables; and those that are missing."""

    def __init__(self, environ: Mapping[str, str], overridden: set[str]) -> None:
        self._environ = environ
        self._overridden = overridden
        self.missing: list[str] = []

    def value(self, written: str, variable: str) -> str:
        """Return the value of VARIABLE, which WRITTEN lacks; empty if it is missing."""
        value = self._environ.get(variable)
        # What is typed now overrides it anyway.
        if value is None and variable not in self._overridden:
            self.missing.append(
                f"{written} is secret, so its value was not written down: export it first as "
                f"{variable}"
            )
        return value or ""


def replay(parsed: ParsedCommand, environ: Mapping[str, str]) -> Replay:
    """Return the launch whose manifest PARSED names, with PARSED's own options."""
    path = [given.raw for given in parsed.given if given.name == "from_manifest"][-1]
    if not path.strip():
        raise UsageError("--from-manifest needs a value: give FILE, a manifest.json.")
    recorded = manifestfile.read(path, BY_SPELLING.__contains__)
    pairs = (given.raw for given in parsed.given if find(given.name).is_pair)
    known = _Secrets(environ, {pair.partition("=")[0] for pair in pairs})
    words = _words(recorded, parsed, known)
    config = _config(recorded, parsed, known)
    layers = _layers(recorded, parsed, known)
    restored = _environ(recorded, environ, known)
    if known.missing:
        raise UsageError(f"{path}: {'; '.join(known.missing)}.")
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


def _words(recorded: Manifest, parsed: ParsedCommand, known: _Secrets) -> list[str]:
    """Return the command line of RECORDED followed by PARSED's options, or its script."""
    command = list(recorded.command)
    then, now = argv.scan(command), argv.scan(parsed.words)
    start = len(command) if then.script_at is None else then.script_at
    for hidden in recorded.hidden:
        if hidden.at < start or now.script_at is None:
            word = command[hidden.at]
            written = word if hidden.before else f"{command[hidden.at - 1]} {word}"
            command[hidden.at] = hidden.before + known.value(written, hidden.variable)
    both = (*argv.scan(command).given, *now.given)
    given = [f"{item.typed}={item.raw}" for item in both if item.name != "from_manifest"]
    script = command[start:] if now.script_at is None else parsed.words[now.script_at :]
    return [*given, "--", *script]


def _config(recorded: Manifest, parsed: ParsedCommand, known: _Secrets) -> configfile.Config | None:
    """Return the config file as recorded, or the one that PARSED names."""
    named = configfile.named(parsed.given)
    if named is not None:
        return configfile.read(named)
    if recorded.config is None:
        return None
    lines = []
    for name, text, source, variable in recorded.config.lines:
        raw = text
        if variable is not None:
            raw = f"{variable}={known.value(f'{source}: {text}', variable)}"
        lines.append(find(name).given(raw, name, source, name))
    return configfile.Config(recorded.config.path, tuple(lines))


def _layers(recorded: Manifest, parsed: ParsedCommand, known: _Secrets) -> dict[str, Layer]:
    """Return the strategies as RECORDED; those that PARSED names are read again."""
    named = [item.raw.split(",") for item in parsed.given if item.name == "strategy"]
    anew = {name.strip() for names in named for name in names}
    layers = {}
    for strategy in (record for record in recorded.strategies if record.name not in anew):
        layer = strategy.layer
        values = {
            name: known.value(f"strategy {layer.name}: {name}", name) for name in strategy.hidden
        }
        settings = (
            setting._replace(value=values.get(setting.name, setting.value))
            for setting in layer.settings
        )
        layers[layer.name] = layer._replace(settings=tuple(settings))
    return layers


def _environ(recorded: Manifest, environ: Mapping[str, str], known: _Secrets) -> dict[str, str]:
    """Return ENVIRON with the relevant variables as RECORDED."""
    restored = {name: value for name, value in environ.items() if not detect.is_remembered(name)}
    restored |= recorded.environment.values
    for name in recorded.environment.names:
        if detect.is_remembered(name) and name not in recorded.environment.values:
            restored[name] = known.value(f"${name}", name)
    return restored


def _notes(path: str, recorded: Manifest, differing: Sequence[str]) -> list[str]:
    """Return the differences between this launch and the one RECORDED in PATH."""
    notes = []
    if differing:
        names = ", ".join(f"${name}" for name in differing)
        notes.append(f"as in {path}, and not as in this shell: {names}.")
    if recorded.cwd != os.getcwd():
        notes.append(f"the folder is {recorded.cwd}, as in {path}.")
    then = (recorded.python, f"fleetrun {recorded.versions.fleetrun}")
    for before, now in zip(then, (sys.executable, f"fleetrun {__version__}"), strict=True):
        if before != now:
            notes.append(f"{path} was written with {before}; this is {now}.")
    return notes
