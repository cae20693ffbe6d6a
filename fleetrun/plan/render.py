"""A plan as text: a table for people, and the dry run as JSON.

Every function returns text that any terminal can show; it contains no secret values.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence

from fleetrun.model import FieldSetting, LaunchPlan, ProcessSpec, RankSpec, Request, Setting
from fleetrun.rundir import secrets
from fleetrun.text import counted, format_ranges, visible

WIDTH = 100
SCHEMA = 2

# Always shown, as readers of the table look for these first.
_MAIN_SETTINGS = frozenset(
    {
        "backend",
        "devices",
        "gpus",
        "host",
        "ips",
        "job_id",
        "log_dir",
        "master",
        "nnodes",
        "nproc_per_node",
        "run_mode",
        "start_port",
    }
)


def table(plans: Sequence[LaunchPlan], request: Request, *, here: int = 0) -> str:
    """Return the dry run as text: settings with their source, then every node and rank.

    HERE is the index of this host's plan in PLANS.
    """
    return f"Dry run: nothing was started.\n\n{overview(plans, request, here=here)}"


def overview(plans: Sequence[LaunchPlan], request: Request, *, here: int = 0) -> str:
    """Return what PLANS start, and why, as text of 100 columns."""
    lines = ["Settings"]
    settings = sorted(_worth_showing(request), key=lambda s: (s.source == "default", s.name))
    indent = 4 + max((len(setting.name) for setting in settings), default=0)
    for setting in settings:
        is_unset = (setting.value, setting.source) == ("None", "default")
        value = "not set" if is_unset else visible(_setting_value(setting)) or "none"
        lines += _hanging(f"  {setting.name}", f"{value}  ({setting.source})", indent)
    first = plans[0]
    world = sum(len(plan.processes) for plan in plans)
    lines += [
        "",
        (
            f"Job {first.job_id}: {first.mode} mode, {first.engine} engine, "
            f"{counted(world, 'process')} on {counted(len(plans), 'node')}"
        ),
    ]
    for note in first.notes:
        lines += _hanging("  note", visible(note), 8)
    lines += _strategy_lines(first)
    common = _common_env(plans)
    unset = _common_unset(plans)
    lines += ["", "Environment of every process"]
    lines += _env_lines(common, indent="  ")
    lines += [f"  {name} is removed" for name in sorted(unset)]
    for place, plan in enumerate(plans):
        lines += ["", *_node_lines(plan, common, unset, here=place == here)]
    return "\n".join(map(visible, lines)) + "\n"


def attempt(plan: LaunchPlan) -> str:
    """Return the processes of another attempt as text, with its number."""
    common, unset = _common_env([plan]), _common_unset([plan])
    lines = [f"Attempt {plan.generation}", *_env_lines(common, indent="  ")]
    lines += _node_lines(plan, common, unset, here=True)
    return "\n" + "\n".join(map(visible, lines)) + "\n"


def _strategy_lines(plan: LaunchPlan) -> list[str]:
    """Return the settings of the strategy, their sources, and the values of auto."""
    strategy = plan.strategy
    if strategy is None:
        return []
    winner = "the script's own settings win" if strategy.mode == "defaults" else "it wins"
    sources = ", ".join(strategy.sources) or "only the check of the ranks"
    lines = ["", *_hanging("Strategy", f"{visible(sources)} ({winner})", 10)]
    names = [f"{setting.section}.{setting.name}" for setting in strategy.settings]
    indent = 4 + max(map(len, names), default=0)
    for name, setting in zip(names, strategy.settings, strict=True):
        value = secrets.redact(setting.name, _field_value(setting))
        reason = f"; {setting.reason}" if setting.reason else ""
        lines += _hanging(f"  {name}", visible(f"{value}  ({setting.source}{reason})"), indent)
    return lines


def _field_value(setting: FieldSetting) -> str:
    if isinstance(setting.value, bool):
        return str(setting.value).lower()
    if isinstance(setting.value, tuple):
        return f"[{', '.join(map(str, setting.value))}]"
    return str(setting.value)


def _node_lines(
    plan: LaunchPlan, common: Mapping[str, str], unset: frozenset[str], *, here: bool
) -> list[str]:
    lines = [
        f"Node {plan.node_rank}, host {_host(plan)}" + (" (this host)" if here else ""),
        *_hanging("  folder", visible(plan.cwd), 12),
        *_hanging("  run", visible(plan.run_dir), 12),
    ]
    lines += [
        f"  file      {visible(path)}: {counted(len(text), 'character')}"
        for path, text in sorted(plan.files.items())
    ]
    for process in plan.processes:
        lines += ["", f"  {_title(process)}"]
        lines += _hanging("    command", visible(_command(process.argv)), 14)
        if process.rank is not None:
            devices = [f"{device.kind} {device.id}" for device in process.rank.devices]
            lines += _hanging("    devices", ", ".join(devices) or "cpu", 14)
            lines += _hanging("    endpoint", str(process.rank.endpoint), 14)
        if process.cpus:
            lines += _hanging("    cpus", format_ranges(process.cpus, ","), 14)
        logs = [process.log, *filter(None, (process.error_log,))]
        lines += _hanging("    log", visible(_under(plan.run_dir, " and ".join(logs))), 14)
        own_env = {name: value for name, value in process.env.items() if name not in common}
        if own_env:
            lines.append("    environment")
            lines += _env_lines(own_env, indent="      ")
        lines += [f"      {name} is removed" for name in process.unset if name not in unset]
    return lines


def as_json(plans: Sequence[LaunchPlan], request: Request, *, here: int = 0) -> str:
    """Return the dry run as JSON; SCHEMA increases when a key changes or is removed."""
    first = plans[0]
    document = {
        "schema": SCHEMA,
        "job_id": first.job_id,
        "mode": first.mode,
        "engine": first.engine,
        "generation": first.generation,
        "script": {
            "form": request.script.form,
            "target": request.script.target,
            "args": list(secrets.conceal(request.script.args)),
        },
        "settings": [
            {
                "name": setting.name,
                "value": _setting_value(setting),
                "source": setting.source,
            }
            for setting in request.settings
        ],
        "rules": first.rules._asdict(),
        "nodes": [_json_node(plan, here=place == here) for place, plan in enumerate(plans)],
    }
    return json.dumps(document, indent=2) + "\n"


def _json_node(plan: LaunchPlan, *, here: bool) -> dict[str, object]:
    return {
        "node_rank": plan.node_rank,
        "host": _host(plan),
        "here": here,
        "cwd": plan.cwd,
        "log_dir": plan.log_dir,
        "run_dir": plan.run_dir,
        "files": dict(plan.files),
        "notes": list(plan.notes),
        "processes": [
            {
                "name": process.name,
                "argv": list(secrets.conceal(process.argv)),
                "env": {name: secrets.redact(name, value) for name, value in process.env.items()},
                "unset": list(process.unset),
                "log": process.log,
                "error_log": process.error_log or None,
                "essential": process.essential,
                "rank": _json_rank(process.rank),
                "cpus": list(process.cpus),
            }
            for process in plan.processes
        ],
    }


def _json_rank(rank: RankSpec | None) -> dict[str, object] | None:
    if rank is None:
        return None
    return {
        "role": rank.role,
        "rank": rank.rank,
        "local_rank": rank.local_rank,
        "node_rank": rank.node_rank,
        "endpoint": str(rank.endpoint),
        "devices": [device._asdict() for device in rank.devices],
    }


def _command(argv: Sequence[str]) -> str:
    return shlex.join(secrets.conceal(argv))


def _hanging(label: str, text: str, indent: int) -> list[str]:
    """Put TEXT beside LABEL, from column INDENT on, and break it after commas and blanks.

    >>> _hanging("  name", "value", 8)
    ['  name  value']
    """
    room = WIDTH - indent
    lines = []
    while len(text) > room:
        cut = max(text.rfind(",", 0, room), text.rfind(" ", 0, room)) + 1 or room
        lines.append(text[:cut].rstrip(" "))
        text = text[cut:]
    lines.append(text)
    return [f"{(label if not at else ''):<{indent}}{line}" for at, line in enumerate(lines)]


def _env_lines(env: Mapping[str, str], *, indent: str) -> list[str]:
    lines: list[str] = []
    for name, value in sorted(env.items()):
        text = visible(f"{name}={secrets.redact(name, value)}")
        first, *more = _hanging("", text, len(indent) + 2)
        lines += [first[2:], *more]
    return lines


def _common_env(plans: Sequence[LaunchPlan]) -> dict[str, str]:
    """Return the variables that every process of the job gets with the same value."""
    environments = [process.env for plan in plans for process in plan.processes]
    if len(environments) < 2:  # with one process, all of it is per rank
        return dict(environments[0]) if environments else {}
    first, *remaining = environments
    return {k: v for k, v in first.items() if all(env.get(k) == v for env in remaining)}


def _common_unset(plans: Sequence[LaunchPlan]) -> frozenset[str]:
    removals = [frozenset(process.unset) for plan in plans for process in plan.processes]
    return frozenset.intersection(*removals) if removals else frozenset()


def _worth_showing(request: Request) -> list[Setting]:
    return [s for s in request.settings if s.source != "default" or s.name in _MAIN_SETTINGS]


def _setting_value(setting: Setting) -> str:
    """Return SETTING's value without secrets; `env.HF_TOKEN` is named like its variable."""
    return secrets.redact(setting.name.rpartition(".")[2], setting.value)


def _title(process: ProcessSpec) -> str:
    if process.rank is not None and process.rank.is_trainer:
        return f"rank {process.rank.rank}"
    return process.name.replace(".", " ")


def _host(plan: LaunchPlan) -> str:
    return plan.nodes[plan.node_rank]


def _under(folder: str, name: str) -> str:
    return name if name.startswith("/") else f"{folder}/{name}"
