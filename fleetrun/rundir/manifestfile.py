"""`manifest.json` in the run directory: the provenance of a result, and how to reproduce it.

Schema 1, which goes up when a key changes its meaning or goes away; `fleetrun --from-manifest FILE`
reads it. Written when the ranks have started, once more when git has answered, in one step each
time; only its owner may read it (mode 0600). No secret is in it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

from fleetrun import __version__
from fleetrun.errors import UsageError
from fleetrun.model import FieldSetting, LaunchPlan, Layer, Request, Setting
from fleetrun.rundir import arguments, installed, names, reading, secrets
from fleetrun.rundir.arguments import Hidden
from fleetrun.rundir.folder import Folder

SCHEMA = 1


class Versions(NamedTuple):
    """What the launch ran with; None: unknown."""

    fleetrun: str
    python: str
    # Package and version, as `paddlepaddle-gpu 3.3.1`.
    paddle: str | None
    kernel: str
    driver: str | None


class ConfigLine(NamedTuple):
    """A line of a config file; without a secret, which is to come from VARIABLE."""

    option: str
    value: str
    source: str
    variable: str | None


class ConfigRecord(NamedTuple):
    """The lines of the config files that took effect, and the path of the first file."""

    path: str
    lines: tuple[ConfigLine, ...]


class StrategyRecord(NamedTuple):
    """A preset or file of the strategy; its fields HIDDEN are to come from variables."""

    name: str
    # Section, name, value and source of each.
    settings: tuple[Any, ...]
    hidden: tuple[str, ...]

    @property
    def layer(self) -> Layer:
        """Its fields, as far as they are known."""
        settings = [
            FieldSetting(section, name, tuple(value) if isinstance(value, list) else value, source)
            for section, name, value, source in self.settings
        ]
        return Layer(self.name, tuple(settings))

    @property
    def makes_sense(self) -> bool:
        """Whether each setting has its four parts."""
        return all(
            isinstance(setting, list) and len(setting) == 4 and setting[2] is not None
            for setting in self.settings
        )


class EnvironmentRecord(NamedTuple):
    """The names of all variables of the launcher, and the values of those that may be kept."""

    names: tuple[str, ...]
    values: Mapping[str, str]


class Manifest(NamedTuple):
    """The whole file."""

    schema: int
    # The words typed after `fleetrun`, and where a secret was among them.
    command: tuple[str, ...]
    hidden: tuple[Hidden, ...]
    # The folder of the launch, and the interpreter.
    cwd: str
    python: str
    versions: Versions
    # The folder of the script, its commit and branch, and whether a tracked file differs (`dirty`).
    # None: it is in no repository, or the launch was over before git answered.
    git: Mapping[str, Any] | None
    job_id: str
    mode: str
    engine: str
    generation: int
    world_size: int
    # In rank order, and the place of this host among them.
    hosts: tuple[str, ...]
    node_rank: int
    hostname: str
    launcher_pid: int
    # Seconds since 1970, and the same to be read.
    started: float
    started_utc: str
    # Of each of the job: `rank`, `host` (its place in `hosts`), `devices` (kind and id), the `cpus`
    # that it is bound to (empty: all; only of this host), and its `role`, if it is no trainer.
    ranks: tuple[Any, ...]
    settings: tuple[Setting, ...]
    config: ConfigRecord | None
    strategies: tuple[StrategyRecord, ...]
    environment: EnvironmentRecord


def of_launch(
    plan: LaunchPlan,
    request: Request,
    environment: EnvironmentRecord,
    *,
    started: float,
    pid: int,
    git: Mapping[str, object] | None,
) -> Manifest:
    """Return the manifest of the launch of PLAN by the launcher PID."""
    command, hidden = arguments.conceal(request.typed)
    system = os.uname()
    package = installed.paddle()
    return Manifest(
        schema=SCHEMA,
        command=command,
        hidden=hidden,
        cwd=plan.cwd,
        python=sys.executable,
        versions=Versions(
            fleetrun=__version__,
            python=sys.version.partition(" ")[0],
            paddle=None if package is None else str(package),
            kernel=system.release,
            driver=_driver(),
        ),
        git=git,
        job_id=plan.job_id,
        mode=plan.mode,
        engine=plan.engine,
        generation=plan.generation,
        world_size=len(plan.ranks),
        hosts=plan.nodes,
        node_rank=plan.node_rank,
        hostname=system.nodename,
        launcher_pid=pid,
        started=round(started, 3),
        started_utc=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        ranks=_ranks(plan),
        settings=request.settings,
        config=_config(request),
        strategies=_strategies(request),
        environment=environment,
    )


def environment(environ: Mapping[str, str], remembered: Mapping[str, str]) -> EnvironmentRecord:
    """Return the names of ENVIRON and the values of those REMEMBERED that are not secret."""
    shown = {k: v for k, v in sorted(remembered.items()) if secrets.redact(k, v) == v}
    return EnvironmentRecord(tuple(sorted(environ)), shown)


def write(folder: Folder, manifest: Manifest, redact: Callable[[str], str] = str) -> None:
    """Write MANIFEST into FOLDER, whole or not at all; OSError if that fails."""
    folder.write_json(names.MANIFEST, reading.plain(manifest), redact)


def _ranks(plan: LaunchPlan) -> tuple[dict[str, object], ...]:
    cpus = {spec.rank: spec.cpus for spec in plan.processes if spec.rank is not None}
    return tuple(
        {
            "rank": spec.rank,
            "host": spec.node_rank,
            "devices": [{"kind": device.kind, "id": device.id} for device in spec.devices],
            **({"cpus": cpus[spec]} if spec in cpus else {}),
            **({} if spec.is_trainer else {"role": spec.role}),
        }
        for spec in plan.ranks
    )


def _config(request: Request) -> ConfigRecord | None:
    """Return the lines of the config files that took effect."""
    paths = [
        setting.value
        for setting in request.settings
        if setting.name in {"config", "user_config"} and setting.source != "default"
    ]
    lines = []
    for name, value, source in request.settings:
        if source.startswith(tuple(f"{path}:" for path in paths)):
            option, dot, key = name.partition(".")
            chosen = dict(request.env if option == "env" else request.nccl)
            is_hidden = option != "set" and bool(dot) and chosen.get(key) != value
            text = f"{key}={value}" if dot else value
            lines.append(ConfigLine(option, text, source, key if is_hidden else None))
    return ConfigRecord(paths[0], tuple(lines)) if paths else None


def _strategies(request: Request) -> tuple[StrategyRecord, ...]:
    """Return the contents of each preset and file of the strategy."""
    records = []
    for layer in request.strategy.layers if request.strategy is not None else ():
        values = {setting.name: str(setting.value) for setting in layer.settings}
        hidden = [name for name, value in values.items() if secrets.redact(name, value) != value]
        settings = [
            (section, name, secrets.HIDDEN if name in hidden else value, source)
            for section, name, value, source, _ in layer.settings
        ]
        records.append(StrategyRecord(layer.name, tuple(settings), tuple(hidden)))
    return tuple(records)


def _driver() -> str | None:
    try:
        with open("/sys/module/nvidia/version", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None


def read(path: str, is_option: Callable[[str], bool]) -> Manifest:
    """Read the file at PATH; UsageError if it is not a manifest.

    IS_OPTION tells whether an option has a name.
    """
    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}: this manifest cannot be read.") from None
    except (ValueError, RecursionError):
        _refuse(path, "it is not JSON")
    if not isinstance(document, dict) or "schema" not in document:
        _refuse(path, "it has no schema")
    if document["schema"] != SCHEMA:
        writer = reading.mapping(document.get("versions")).get("fleetrun")
        by = f" (it was written by fleetrun {writer})" if isinstance(writer, str) else ""
        raise UsageError(
            f"{path}: this manifest has schema {document['schema']!r}, and fleetrun {__version__} "
            f"reads {SCHEMA}{by}."
        )
    manifest = reading.record(Manifest, document)
    lines = () if manifest.config is None else manifest.config.lines
    is_there = {
        "command": bool(manifest.command),
        "cwd": bool(manifest.cwd),
        "python": bool(manifest.python),
        "config": all(is_option(line.option) for line in lines),
        "hidden": all(0 <= entry.at < len(manifest.command) for entry in manifest.hidden),
        "strategies": all(strategy.makes_sense for strategy in manifest.strategies),
    }
    for name, is_well in is_there.items():
        if not is_well:
            _refuse(path, f"something is missing or wrong in it ({name})")
    return manifest


def _refuse(path: str, why: str) -> NoReturn:
    raise UsageError(
        f"{path}: this is not a manifest: {why}; give the {names.MANIFEST} of a run directory "
        "(log/latest has the last one)."
    )
