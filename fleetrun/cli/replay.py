"""Replans the launch that wrote a manifest.json.

The command line is replayed in the folder and with the variables of that launch, followed by what
is typed beside --from-manifest, which therefore wins. `rundir/manifestfile.py` describes the file.
Secrets are not in it: what had one must be typed again.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from fleetrun import __version__
from fleetrun.cli import argv, configfile
from fleetrun.cli.argv import ParsedCommand
from fleetrun.cli.options import find
from fleetrun.engines import detect
from fleetrun.errors import UsageError
from fleetrun.model import Layer
from fleetrun.rundir import manifestfile
from fleetrun.rundir.manifestfile import Manifest
from fleetrun.rundir.secrets import HIDDEN


class Replay(NamedTuple):
    """The launch to plan again: its command line and folder, and the variables that differ here."""

    parsed: ParsedCommand
    environ: dict[str, str]
    config: configfile.Config
    cwd: str
    restored: tuple[tuple[str, str | None], ...]
    notes: tuple[str, ...]
    # The contents of the strategies at that time, by name.
    layers: Mapping[str, Layer]


def replay(parsed: ParsedCommand, environ: Mapping[str, str]) -> Replay:
    """Return the launch whose manifest PARSED names, with PARSED's own options."""
    path = [given.raw for given in parsed.given if given.name == "from_manifest"][-1]
    recorded = manifestfile.read(path)
    is_named = parsed.asks("config")
    config = configfile.find(parsed.given) if is_named else configfile.NONE
    words = _words(recorded, () if is_named else recorded.config, parsed)
    strategies = [item.raw.split(",") for item in parsed.given if item.name == "strategy"]
    anew = {name.strip() for names in strategies for name in names}
    layers = {layer.name: layer for layer in recorded.layers if layer.name not in anew}
    restored = {name: value for name, value in environ.items() if not detect.is_remembered(name)}
    restored |= recorded.values
    for name in filter(detect.is_remembered, recorded.names):
        if name not in restored:
            restored[name] = environ.get(name, HIDDEN)
    _refuse_secrets(
        path,
        parsed,
        [
            *(
                word if word != HIDDEN else f"{flag} {word}"
                for flag, word in pairwise(["", *words])
            ),
            *(
                f"{name}: {row.name}={row.value}"
                for name in layers
                for row in layers[name].settings
            ),
            *(f"${name}={value}" for name, value in restored.items() if value == HIDDEN),
        ],
    )
    differing = sorted(
        name for name in {*environ, *restored} if environ.get(name) != restored.get(name)
    )
    return Replay(
        argv.split(words),
        restored,
        config,
        recorded.cwd,
        tuple((name, restored.get(name)) for name in differing),
        tuple(_notes(path, recorded)),
        layers,
    )


def _refuse_secrets(path: str, parsed: ParsedCommand, texts: Iterable[str]) -> None:
    """Raise UsageError if any of TEXTS lacks a secret that no option of PARSED overrides."""
    pairs = [given.raw for given in parsed.given if find(given.name).is_pair]
    overridden = {pair.partition("=")[0] for pair in pairs}
    missing = [
        text
        for text in texts
        if HIDDEN in text and overridden.isdisjoint(re.split(r"[=: ]+", text))
    ]
    if missing:
        raise UsageError(
            f"{path}: secrets are not written down: give again what has {', '.join(missing)}: the "
            "option, the file or the script with its arguments."
        )


def _words(recorded: Manifest, config: Sequence[str], parsed: ParsedCommand) -> list[str]:
    """Return CONFIG and the command of RECORDED followed by PARSED's options, or its script."""
    command = [*config, *recorded.command]
    then = argv.scan(command)
    start = len(command) if then.script_at is None else then.script_at
    both = (*then.given, *parsed.given)
    given = [f"{item.typed}={item.raw}" for item in both if item.name != "from_manifest"]
    at = parsed.script_at
    return [*given, "--", *(command[start:] if at is None else parsed.words[at:])]


def _notes(path: str, recorded: Manifest) -> Iterator[str]:
    """Yield which programs are not those of the launch RECORDED in PATH."""
    then = (recorded.python, f"fleetrun {recorded.fleetrun}")
    for before, now in zip(then, (sys.executable, f"fleetrun {__version__}"), strict=True):
        if before != now:
            yield f"{path} was written with {before}; this is {now}."
