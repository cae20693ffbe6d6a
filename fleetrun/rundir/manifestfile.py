"""`manifest.json` in the run directory: the provenance of a result, and how to reproduce it.

Schema 1, which goes up when a key changes its meaning or goes away; `fleetrun --from-manifest FILE`
reads it. Only its owner may read it (mode 0600). No secret is in it.
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
from fleetrun.model import FieldSetting, LaunchPlan, Layer, Request
from fleetrun.rundir import installed, names, reading, secrets

SCHEMA = 1


class Manifest(NamedTuple):
    """The part of the file that repeats the launch."""

    # The words typed after `fleetrun`.
    command: tuple[str, ...]
    # The folder of the launch, the interpreter, and the version of fleetrun.
    cwd: str
    python: str
    fleetrun: str
    # The lines of config files, as words.
    config: tuple[str, ...]
    # The presets and files of the strategy.
    layers: tuple[Layer, ...]
    # The names of all variables of the launcher, and the values of those that may be kept.
    names: tuple[str, ...]
    values: Mapping[str, str]


def of_launch(
    plan: LaunchPlan,
    request: Request,
    environ: Mapping[str, str],
    is_remembered: Callable[[str], bool],
    *,
    started: float,
    pid: int,
    git: Mapping[str, object] | None,
) -> dict[str, Any]:
    """Return the manifest of the launch of PLAN by the launcher PID.

    Of ENVIRON it has the values of variables that are REMEMBERED and not secret. GIT: the commit
    and branch of the script's folder, and whether a tracked file differs (`dirty`); None: it is in
    no repository, or git has not answered yet.
    """
    system = os.uname()
    package = next(installed.paddles(sys.path), None)
    driver = reading.content("/sys/module/nvidia/version") or b""
    cpus = {spec.rank: spec.cpus for spec in plan.processes if spec.rank is not None}
    document = {
        "schema": SCHEMA,
        "command": secrets.conceal(request.typed),
        "cwd": plan.cwd,
        "python": sys.executable,
        # What is not known is null.
        "versions": {
            "fleetrun": __version__,
            "python": sys.version.partition(" ")[0],
            "paddle": None if package is None else str(package),
            "kernel": system.release,
            "driver": driver.decode().strip() or None,
        },
        "git": git,
        "job_id": plan.job_id,
        "mode": plan.mode,
        "engine": plan.engine,
        "generation": plan.generation,
        "world_size": len(plan.ranks),
        # In rank order, and the place of this host among them.
        "hosts": plan.nodes,
        "node_rank": plan.node_rank,
        "hostname": system.nodename,
        "launcher_pid": pid,
        # Seconds since 1970, and the same to be read.
        "started": round(started, 3),
        "started_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        # Of the whole job; `host` is the place in `hosts`, and only this host's have `cpus`.
        "ranks": [
            {
                "rank": spec.rank,
                "host": spec.node_rank,
                "devices": [{"kind": device.kind, "id": device.id} for device in spec.devices],
                **({"cpus": cpus[spec]} if spec in cpus else {}),
                **({} if spec.is_trainer else {"role": spec.role}),
            }
            for spec in plan.ranks
        ],
        "settings": request.settings,
        "config": _config(request),
        "strategies": _strategies(request),
        "environment": {
            "names": sorted(environ),
            "values": {
                name: value
                for name, value in sorted(environ.items())
                if is_remembered(name) and secrets.redact(name, value) == value
            },
        },
    }
    plain: dict[str, Any] = reading.plain(document)
    return plain


def _config(request: Request) -> list[str]:
    """Return the lines of the config file that took effect as words of a command line."""
    files = tuple(
        f"{setting.value}:"
        for setting in request.settings
        if setting.name == "config" and setting.source != "default"
    )
    words = []
    for name, value, source in request.settings:
        option, dot, key = name.partition(".")
        if files and source.startswith(files):
            words.append(f"--{option}={key}={value}" if dot else f"--{option}={value}")
    return words


def _strategies(request: Request) -> list[dict[str, Any]]:
    """Return the name of each preset and file of the strategy, and the rows of its settings."""
    layers = []
    for layer in request.strategy.layers if request.strategy is not None else ():
        rows = []
        for section, name, value, source, _ in layer.settings:
            shown = secrets.redact(name, str(value))
            rows.append((section, name, value if shown == str(value) else shown, source))
        layers.append({"name": layer.name, "settings": rows})
    return layers


def read(path: str) -> Manifest:
    """Read the file at PATH; UsageError if it is not a manifest."""
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
        raise UsageError(
            f"{path}: this manifest has schema {document['schema']!r}, and fleetrun {__version__} "
            f"reads {SCHEMA}."
        )
    try:
        return Manifest(
            command=tuple(document["command"]),
            cwd=document["cwd"],
            python=document["python"],
            fleetrun=document["versions"]["fleetrun"],
            config=tuple(document["config"]),
            layers=tuple(
                Layer(layer["name"], tuple(map(_setting, layer["settings"])))
                for layer in document["strategies"]
            ),
            names=tuple(document["environment"]["names"]),
            values=document["environment"]["values"],
        )
    except (KeyError, TypeError, ValueError):
        _refuse(path, "something is missing or wrong in it")


def _setting(row: list[Any]) -> FieldSetting:
    section, name, value, source = row
    return FieldSetting(section, name, tuple(value) if isinstance(value, list) else value, source)


def _refuse(path: str, why: str) -> NoReturn:
    raise UsageError(
        f"{path}: this is not a manifest: {why}; give the {names.MANIFEST} of a run directory "
        "(log/latest has the last one)."
    )
