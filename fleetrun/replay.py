"""Reading a manifest.json back: the launch that wrote it, planned again.

The command line is replayed in the folder and with the variables that the launch had; what is
typed beside --from-manifest stands behind it, so it wins. `records/manifestfile.py` says what is
in the file.

The config file comes back as the options that it was. The command line does as its words, not as
options: the file needs them anyway, for the script's own and for the places of secrets, and the
resolved settings are for people: without secrets, rounded, and without the notes.
"""

# No `from __future__ import annotations` here, for the reason given in options.py.
import os
import sys
from collections.abc import Mapping, Sequence

from fleetrun import __version__, argv, configfile, options
from fleetrun.engines import detect
from fleetrun.errors import UsageError
from fleetrun.model import Layer
from fleetrun.namedtuples import NamedTuple
from fleetrun.options import RawOption
from fleetrun.plan.kinds import ROOT, is_mask
from fleetrun.records import manifestfile, secrets, variables
from fleetrun.records.manifestfile import Recorded

# Variables that decide how a launch is planned, or how its ranks talk and compute. Their values
# are in the manifest; of all others, the names are.
_FAMILIES = (
    *("PADDLE_", "FLAGS_", "NCCL_", "GLOO_", "OMP_", "POD_"),
    *("TRAINER_", "DISTRIBUTED_", "STAGE_", "MASTER_"),
)
_SINGLE = ("TRAINING_ROLE", "WITH_COVERAGE", ROOT, variables.ASSUME_DEVICES, variables.STRATEGY)
# Not in the manifest, but the plan is another one without them.
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


class Replay(NamedTuple):
    """The launch to plan again: what to resolve and where, and the variables that differ here."""

    parsed: argv.ParsedCommand
    environ: dict[str, str]
    config: configfile.Config | None
    cwd: str
    restored: tuple[tuple[str, str | None], ...]
    notes: tuple[str, ...]
    # What the strategies said then, by their name.
    layers: Mapping[str, Layer]


def is_remembered(name: str) -> bool:
    """Whether the value of the variable NAME is written down, unless it is secret.

    >>> is_remembered("NCCL_DEBUG"), is_remembered("CUDA_VISIBLE_DEVICES"), is_remembered("HOME")
    (True, True, False)
    """
    return (
        name.startswith(_FAMILIES) or is_mask(name) or name in _SINGLE or name in detect.VARIABLES
    )


def replay(parsed: argv.ParsedCommand, environ: Mapping[str, str]) -> Replay:
    """Return the launch whose manifest PARSED names, with what PARSED says beside it."""
    path = next(
        given.raw for given in reversed(parsed.settings) if given.option.name == "from_manifest"
    )
    if not path.strip():
        raise UsageError("--from-manifest needs a value: give FILE, a manifest.json.")
    found = manifestfile.read(path, options.is_option)
    missing: list[str] = []
    words = _arguments(found, parsed, environ, missing)
    restored_environ = _environ(found, environ, missing)
    config = _config(found, parsed, environ, missing)
    layers = _layers(found, parsed, environ, missing)
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
        found.cwd,
        tuple((name, restored_environ.get(name)) for name in differing),
        tuple(_notes(found, environ, differing)),
        layers,
    )


# -- what was asked for ---------------------------------------------------------------------------


def _arguments(
    found: Recorded,
    parsed: argv.ParsedCommand,
    environ: Mapping[str, str],
    missing: list[str],
) -> list[str]:
    """Return the command line of FOUND with PARSED's options behind its own.

    Put into MISSING what has to be exported first.
    """
    command = list(found.command)
    then, now = argv.scan(command), argv.scan(parsed.words)
    start = len(command) if then.script_at is None else then.script_at
    given_now = _pair_names(now.settings)
    for hidden in found.hidden:
        if hidden.at >= start and now.script_at is not None:
            continue
        value = environ.get(hidden.variable)
        if value is None and hidden.at < start and hidden.variable in given_now:
            # It will be replaced anyway.
            value = ""
        if value is None:
            word = command[hidden.at]
            written = word if hidden.before else f"{command[hidden.at - 1]} {word}"
            missing.append(_plea(written, hidden.variable))
        command[hidden.at] = hidden.before + (value or "")
    settings = (*argv.scan(command).settings, *now.settings)
    given = [f"{one.typed}={one.raw}" for one in settings if one.option.name != "from_manifest"]
    script = command[start:] if now.script_at is None else parsed.words[now.script_at :]
    return [*given, "--", *script]


def _plea(written: str, variable: str) -> str:
    return f"{written} is secret, so its value was not written down: export it first as {variable}"


def _pair_names(settings: Sequence[RawOption]) -> set[str]:
    return {given.raw.partition("=")[0] for given in settings if given.option.kind == "pairs"}


def _config(
    found: Recorded,
    parsed: argv.ParsedCommand,
    environ: Mapping[str, str],
    missing: list[str],
) -> configfile.Config | None:
    """Return what the config file said at the time, or what the one named now says."""
    named = configfile.named(parsed.settings)
    if named is not None:
        return configfile.read(named)
    if found.config is None:
        return None
    given_now = _pair_names(parsed.settings)
    lines = []
    for name, text, source, variable in found.lines:
        raw = text
        if variable is not None:
            value = environ.get(variable)
            if value is None and variable not in given_now:
                missing.append(_plea(f"{source}: {text}", variable))
            raw = f"{variable}={value or ''}"
        lines.append(RawOption(options.find(name), raw, name, source))
    return configfile.Config(found.config, tuple(lines))


def _layers(
    found: Recorded,
    parsed: argv.ParsedCommand,
    environ: Mapping[str, str],
    missing: list[str],
) -> dict[str, Layer]:
    """Return what the strategies of FOUND said; one that is named anew is read anew."""
    named = [given.raw.split(",") for given in parsed.settings if given.option.name == "strategy"]
    anew = {name.strip() for names in named for name in names}
    layers = {}
    for layer in found.layers:
        if layer.name in anew:
            continue
        lacking = {name for of, name in found.lacking if of == layer.name}
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


def _environ(found: Recorded, environ: Mapping[str, str], missing: list[str]) -> dict[str, str]:
    """Return ENVIRON with the variables that count as they were when FOUND was written."""
    made = {name: value for name, value in environ.items() if not is_remembered(name)}
    made |= found.values
    for name in found.names:
        if not is_remembered(name) or name in found.values:
            continue
        if name in environ:
            made[name] = environ[name]
        else:
            missing.append(_plea(f"${name}", name))
    return made


def _notes(found: Recorded, environ: Mapping[str, str], differing: Sequence[str]) -> list[str]:
    """Return how this launch differs from that of FOUND."""
    notes = []
    if differing:
        names = ", ".join(f"${name}" for name in differing)
        notes.append(f"as in {found.path}, and not as in this shell: {names}.")
    lost = [
        name
        for name in found.names
        if name not in environ
        and not is_remembered(name)
        and (secrets.is_secret(name) or name.lower() in _PROXIES)
    ]
    if lost:
        names = ", ".join(f"${name}" for name in lost)
        notes.append(f"exported when {found.path} was written, and not now: {names}.")
    if found.cwd != os.getcwd():
        notes.append(f"the folder is {found.cwd}, as in {found.path}.")
    if found.python != sys.executable:
        notes.append(f"{found.path} was written with {found.python}; this is {sys.executable}.")
    if found.version != __version__:
        notes.append(
            f"{found.path} was written by fleetrun {found.version}; this is {__version__}."
        )
    return notes
