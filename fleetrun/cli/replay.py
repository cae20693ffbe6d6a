"""Replans the launch that wrote a manifest.json.

The command line is replayed in the folder and with the variables of that launch, followed by what
is typed beside --from-manifest, which therefore wins. `rundir/manifestfile.py` describes the file.

The config file is restored as its options, the command line as its words: the file needs the words
anyway, for the script's own and for the places of secrets, and the resolved settings are for
people: without secrets, rounded, and without notes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fleetrun import __version__
from fleetrun.cli import argv, configfile
from fleetrun.cli.argv import ParsedCommand
from fleetrun.cli.options import find, is_option
from fleetrun.engines import detect
from fleetrun.errors import UsageError
from fleetrun.model import Given, Layer
from fleetrun.rundir import manifestfile, secrets
from fleetrun.rundir.manifestfile import Recorded

# Not in the manifest, although the plan depends on them.
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


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
    recorded = manifestfile.read(path, is_option)
    missing: list[str] = []
    words = _arguments(recorded, parsed, environ, missing)
    restored_environ = _environ(recorded, environ, missing)
    config = _config(recorded, parsed, environ, missing)
    layers = _layers(recorded, parsed, environ, missing)
    if missing:
        raise UsageError(f"{path}: {'; '.join(missing)}.")
    differing = sorted(
        name
        for name in {*environ, *restored_environ}
        if environ.get(name) != restored_environ.get(name)
    )
    return Replay(
        argv.split(words),
        restored_environ,
        config,
        recorded.cwd,
        tuple((name, restored_environ.get(name)) for name in differing),
        tuple(_notes(recorded, environ, differing)),
        layers,
    )


# -- the request ---------------------------------------------------------------------------------


def _arguments(
    recorded: Recorded,
    parsed: ParsedCommand,
    environ: Mapping[str, str],
    missing: list[str],
) -> list[str]:
    """Return the command line of RECORDED followed by PARSED's options.

    Add to MISSING what must be exported first.
    """
    command = list(recorded.command)
    then, now = argv.scan(command), argv.scan(parsed.words)
    start = len(command) if then.script_at is None else then.script_at
    given_now = _pair_names(now.given)
    for hidden in recorded.hidden:
        if hidden.at >= start and now.script_at is not None:
            continue
        value = environ.get(hidden.variable)
        if value is None and hidden.at < start and hidden.variable in given_now:
            # The command line overrides it anyway.
            value = ""
        if value is None:
            word = command[hidden.at]
            written = word if hidden.before else f"{command[hidden.at - 1]} {word}"
            missing.append(_plea(written, hidden.variable))
        command[hidden.at] = hidden.before + (value or "")
    both = (*argv.scan(command).given, *now.given)
    given = [f"{item.typed}={item.raw}" for item in both if item.name != "from_manifest"]
    script = command[start:] if now.script_at is None else parsed.words[now.script_at :]
    return [*given, "--", *script]


def _plea(written: str, variable: str) -> str:
    return f"{written} is secret, so its value was not written down: export it first as {variable}"


def _pair_names(given: Sequence[Given]) -> set[str]:
    return {item.raw.partition("=")[0] for item in given if find(item.name).is_pair}


def _config(
    recorded: Recorded,
    parsed: ParsedCommand,
    environ: Mapping[str, str],
    missing: list[str],
) -> configfile.Config | None:
    """Return the config file as recorded, or the one that PARSED names."""
    named = configfile.named(parsed.given)
    if named is not None:
        return configfile.read(named)
    if recorded.config is None:
        return None
    given_now = _pair_names(parsed.given)
    lines = []
    for name, text, source, variable in recorded.lines:
        raw = text
        if variable is not None:
            value = environ.get(variable)
            if value is None and variable not in given_now:
                missing.append(_plea(f"{source}: {text}", variable))
            raw = f"{variable}={value or ''}"
        lines.append(find(name).given(raw, name, source, name))
    return configfile.Config(recorded.config, tuple(lines))


def _layers(
    recorded: Recorded,
    parsed: ParsedCommand,
    environ: Mapping[str, str],
    missing: list[str],
) -> dict[str, Layer]:
    """Return the strategies as RECORDED; those that PARSED names are read again."""
    named = [item.raw.split(",") for item in parsed.given if item.name == "strategy"]
    anew = {name.strip() for names in named for name in names}
    layers = {}
    for layer in recorded.layers:
        if layer.name in anew:
            continue
        lacking = {name for of, name in recorded.lacking if of == layer.name}
        missing += [
            _plea(f"strategy {layer.name}: {name}", name)
            for name in sorted(lacking)
            if name not in environ
        ]
        layers[layer.name] = layer._replace(
            knobs=tuple(
                knob._replace(value=environ.get(knob.name, "")) if knob.name in lacking else knob
                for knob in layer.knobs
            )
        )
    return layers


# -- the environment ------------------------------------------------------------------------------


def _environ(recorded: Recorded, environ: Mapping[str, str], missing: list[str]) -> dict[str, str]:
    """Return ENVIRON with the relevant variables as RECORDED."""
    restored = {name: value for name, value in environ.items() if not detect.is_remembered(name)}
    restored |= recorded.values
    for name in recorded.names:
        if not detect.is_remembered(name) or name in recorded.values:
            continue
        if name in environ:
            restored[name] = environ[name]
        else:
            missing.append(_plea(f"${name}", name))
    return restored


def _notes(recorded: Recorded, environ: Mapping[str, str], differing: Sequence[str]) -> list[str]:
    """Return the differences between this launch and the RECORDED one."""
    notes = []
    if differing:
        names = ", ".join(f"${name}" for name in differing)
        notes.append(f"as in {recorded.path}, and not as in this shell: {names}.")
    lost = [
        name
        for name in recorded.names
        if name not in environ
        and not detect.is_remembered(name)
        and (secrets.is_secret(name) or name.lower() in _PROXIES)
    ]
    if lost:
        names = ", ".join(f"${name}" for name in lost)
        notes.append(f"exported when {recorded.path} was written, and not now: {names}.")
    if recorded.cwd != os.getcwd():
        notes.append(f"the folder is {recorded.cwd}, as in {recorded.path}.")
    if recorded.python != sys.executable:
        notes.append(
            f"{recorded.path} was written with {recorded.python}; this is {sys.executable}."
        )
    if recorded.version != __version__:
        notes.append(
            f"{recorded.path} was written by fleetrun {recorded.version}; this is {__version__}."
        )
    return notes
