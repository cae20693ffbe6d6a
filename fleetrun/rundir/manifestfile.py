"""`manifest.json` in the run directory: the provenance of a result, and how to reproduce it.

Schema 1; `fleetrun --from-manifest FILE` reads it. Written when the ranks have started, once more
when git has answered, in one step each time; only its owner may read it (mode 0600).

- `schema`: 1; goes up when a key changes its meaning or goes away.
- `command`: the words typed after `fleetrun`. No secret is among them: `hidden` lists the places
  (`at`) where one was, what stands `before` it in its word, and the `variable` it may come from.
- `cwd`, `python`: the folder of the launch, and the interpreter.
- `versions`: of `fleetrun`, `python`, `paddle` (package and version), `kernel`, `driver`; null is
  unknown.
- `git`: the `folder` of the script, its `commit` and `branch`, and whether a tracked file differs
  from it (`dirty`; null: the launch was over before git answered). Null outside of a repository.
- `job_id`, `mode`, `engine`, `generation`, `world_size`, `hosts` in rank order, `node_rank` (ours),
  `hostname`, `launcher_pid`.
- `started`: seconds since 1970; `started_utc` is the same to be read.
- `ranks`: for each of the job `rank`, `host` (its place in `hosts`) and `devices` (kind and id);
  for those on this host also the `cpus` it is bound to (empty: all); `role`, if not a trainer.
- `environment`: the `names` of all variables that the launcher had, and the `values` of those that
  planning and Paddle read (PADDLE_*, FLAGS_*, NCCL_*, ...), unless they are secret.
- `settings`: every option's `name`, `value` and `source`.
- `config`: the `path` of the config file and its `lines` that counted; null without a file. A
  line's secret is to come from its `variable`.
- `strategies`: for each preset or file of the strategy its `name`, its `settings` (section, name,
  value, and where it was said), and the `hidden` variables whose values are secret.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, NoReturn, TypeVar

from fleetrun import __version__
from fleetrun.errors import UsageError
from fleetrun.model import FieldSetting, LaunchPlan, Layer, Request
from fleetrun.rundir import arguments, installed, names, secrets
from fleetrun.rundir.arguments import Hidden

Kind = TypeVar("Kind", str, list[object], dict[str, object])

SCHEMA = 1


class Recorded(NamedTuple):
    """The part of the file that is needed to plan the launch again."""

    path: str
    version: str
    command: list[str]
    hidden: list[Hidden]
    cwd: str
    python: str
    names: list[str]
    values: dict[str, str]
    config: str | None
    # Option, text, source, and the variable that holds what the text lacks.
    lines: list[tuple[str, str, str, str | None]]
    # Each strategy's fields, and the variables that hold what they lack.
    layers: list[Layer]
    lacking: list[tuple[str, str]]


def document(
    plan: LaunchPlan, request: Request, started: float, pid: int, git: Mapping[str, object] | None
) -> dict[str, object]:
    """Return the manifest, without the environment, of the launch of PLAN by the launcher PID."""
    command, hidden = arguments.conceal(request.typed)
    system = os.uname()
    return {
        "schema": SCHEMA,
        "command": command,
        "hidden": [entry._asdict() for entry in hidden],
        "cwd": plan.cwd,
        "python": sys.executable,
        "versions": _versions(system.release),
        "git": git,
        "job_id": plan.job_id,
        "mode": plan.mode,
        "engine": plan.engine,
        "generation": plan.generation,
        "world_size": len(plan.ranks),
        "hosts": plan.nodes,
        "node_rank": plan.node_rank,
        "hostname": system.nodename,
        "launcher_pid": pid,
        "started": round(started, 3),
        "started_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "ranks": _ranks(plan),
        "settings": [setting._asdict() for setting in request.settings],
        "config": _config(request),
        "strategies": _strategies(request),
    }


def environment(environ: Mapping[str, str], remembered: Mapping[str, str]) -> dict[str, object]:
    """Return the names of ENVIRON and the values of those REMEMBERED that are not secret."""
    return {
        "names": sorted(environ),
        "values": {
            name: value
            for name, value in sorted(remembered.items())
            if secrets.redact(name, value) == value
        },
    }


def _ranks(plan: LaunchPlan) -> list[dict[str, object]]:
    cpus = {spec.rank: spec.cpus for spec in plan.processes if spec.rank is not None}
    return [
        {
            "rank": spec.rank,
            "host": spec.node_rank,
            "devices": [{"kind": device.kind, "id": device.id} for device in spec.devices],
            **({"cpus": cpus[spec]} if spec in cpus else {}),
            **({} if spec.is_trainer else {"role": spec.role}),
        }
        for spec in plan.ranks
    ]


def _config(request: Request) -> dict[str, object] | None:
    """Return the lines of the config files that took effect."""
    paths = [
        setting.value
        for setting in request.settings
        if setting.name in {"config", "user_config"} and setting.source != "default"
    ]
    if not paths:
        return None
    lines = []
    for setting in request.settings:
        if not setting.source.startswith(tuple(f"{path}:" for path in paths)):
            continue
        option, dot, key = setting.name.partition(".")
        chosen = dict(request.env if option == "env" else request.nccl)
        is_hidden = option != "set" and bool(dot) and chosen.get(key) != setting.value
        lines.append(
            {
                "option": option,
                "value": f"{key}={setting.value}" if dot else setting.value,
                "source": setting.source,
                "variable": key if is_hidden else None,
            }
        )
    return {"path": paths[0], "lines": lines}


def _strategies(request: Request) -> list[dict[str, object]]:
    """Return the contents of each preset and file of the strategy."""
    layers: list[dict[str, object]] = []
    for layer in request.strategy.layers if request.strategy is not None else ():
        hidden = [
            setting.name
            for setting in layer.settings
            if secrets.redact(setting.name, str(setting.value)) != str(setting.value)
        ]
        settings = [
            (
                setting.section,
                setting.name,
                secrets.HIDDEN if setting.name in hidden else setting.value,
                setting.source,
            )
            for setting in layer.settings
        ]
        layers.append({"name": layer.name, "settings": settings, "hidden": hidden})
    return layers


def _versions(kernel: str) -> dict[str, str | None]:
    return {
        "fleetrun": __version__,
        "python": sys.version.partition(" ")[0],
        "paddle": _paddle(),
        "kernel": kernel,
        "driver": _driver(),
    }


def _paddle() -> str | None:
    """Return the name and version of the installed Paddle, as `paddlepaddle-gpu 3.3.1`."""
    package = installed.paddle()
    return None if package is None else str(package)


def _driver() -> str | None:
    try:
        with open("/sys/module/nvidia/version", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None


def read(path: str, is_option: Callable[[str], bool]) -> Recorded:
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
        versions = document.get("versions")
        writer = versions.get("fleetrun") if isinstance(versions, dict) else None
        by = f" (it was written by fleetrun {writer})" if isinstance(writer, str) else ""
        raise UsageError(
            f"{path}: this manifest has schema {document['schema']!r}, and fleetrun {__version__} "
            f"reads {SCHEMA}{by}."
        )
    try:
        return _parse(path, document, is_option)
    except (KeyError, TypeError, ValueError) as error:
        _refuse(path, f"something is missing or wrong in it ({error})")


def _refuse(path: str, why: str) -> NoReturn:
    raise UsageError(
        f"{path}: this is not a manifest: {why}; give the {names.MANIFEST} of a run directory "
        "(log/latest has the last one)."
    )


def _parse(path: str, document: dict[str, object], is_option: Callable[[str], bool]) -> Recorded:
    """Extract the required parts of DOCUMENT; raises a Python error if one is missing."""
    environment = _of(document, "environment", dict)
    values = _of(environment, "values", dict)
    config = None if document["config"] is None else _of(document, "config", dict)
    command = _texts(document, "command")
    strategies = [_of({"": entry}, "", dict) for entry in _of(document, "strategies", list)]
    layers = [
        Layer(
            _of(entry, "name", str),
            tuple(_setting(setting) for setting in _of(entry, "settings", list)),
        )
        for entry in strategies
    ]
    return Recorded(
        path,
        _of(_of(document, "versions", dict), "fleetrun", str),
        command,
        [_hidden(entry, len(command)) for entry in _of(document, "hidden", list)],
        _of(document, "cwd", str),
        _of(document, "python", str),
        _texts(environment, "names"),
        {name: _of(values, name, str) for name in values},
        None if config is None else _of(config, "path", str),
        [] if config is None else [_line(entry, is_option) for entry in _of(config, "lines", list)],
        layers,
        [
            (_of(entry, "name", str), name)
            for entry in strategies
            for name in _texts(entry, "hidden")
        ],
    )


def _of(document: dict[str, object], key: str, kind: type[Kind]) -> Kind:
    value = document[key]
    if not isinstance(value, kind):
        raise TypeError(f"{key!r} is {value!r:.40}")
    return value


def _texts(document: dict[str, object], key: str) -> list[str]:
    return [_of({key: item}, key, str) for item in _of(document, key, list)]


def _hidden(entry: object, words: int) -> Hidden:
    match entry:
        case {"at": int() as at, "before": str() as before, "variable": str() as variable} if (
            0 <= at < words
        ):
            return Hidden(at, before, variable)
    raise TypeError(f"'hidden' has {entry!r:.40}")


def _line(entry: object, is_option: Callable[[str], bool]) -> tuple[str, str, str, str | None]:
    match entry:
        case {
            "option": str() as name,
            "value": str() as value,
            "source": str() as source,
            "variable": (None | str()) as variable,
        } if is_option(name):
            return name, value, source, variable
    raise TypeError(f"'lines' has {entry!r:.40}")


def _setting(entry: object) -> FieldSetting:
    match entry:
        case [str() as section, str() as name, value, str() as source]:
            content = tuple(value) if isinstance(value, list) else value
            if isinstance(content, bool | int | float | str | tuple):
                return FieldSetting(section, name, content, source)
    raise TypeError(f"'strategies' has {entry!r:.40}")
