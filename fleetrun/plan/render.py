"""A plan as text: a table for people, and the dry run as JSON.

Every function returns text that any terminal can show; it contains no secret values.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence

from fleetrun.model import LaunchPlan, ProcessSpec, Request, Setting
from fleetrun.rundir import secrets
from fleetrun.text import counted, format_ranges, visible

WIDTH = 100
SCHEMA = 2

# Always shown, as readers of the table look for these first.
_MAIN_SETTINGS = (
    *("backend", "devices", "gpus", "host", "ips", "job_id", "log_dir", "master", "nnodes"),
    *("nproc_per_node", "run_mode", "start_port"),
)


def table(plans: Sequence[LaunchPlan], request: Request, *, here: int = 0) -> str:
    """Return the dry run as text: settings with their source, then every node and rank.

    HERE is the index of this host's plan in PLANS.
    """
    return f"Dry run: nothing was started.\n\n{overview(plans, request, here=here)}"


def overview(plans: Sequence[LaunchPlan], request: Request, *, here: int = 0) -> str:
    """Return what PLANS start, and why, as text of 100 columns."""
    lines = ["Settings"]
    settings = [s for s in request.settings if s.source != "default" or s.name in _MAIN_SETTINGS]
    settings.sort(key=lambda setting: (setting.source == "default", setting.name))
    indent = 4 + max((len(setting.name) for setting in settings), default=0)
    for setting in settings:
        is_unset = (setting.value, setting.source) == ("None", "default")
        value = "not set" if is_unset else _setting_value(setting) or "none"
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
        lines += _hanging("  note", note, 8)
    lines += _strategy_lines(first)
    common, unset = _common(plans)
    lines += ["", "Environment of every process", *_env_lines(common, indent="  ")]
    lines += [f"  {name} is removed" for name in sorted(unset)]
    for place, plan in enumerate(plans):
        lines += ["", *_node_lines(plan, common, unset, here=place == here)]
    return "\n".join(map(visible, lines)) + "\n"


def attempt(plan: LaunchPlan) -> str:
    """Return the processes of another attempt as text, with its number."""
    common, unset = _common([plan])
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
    lines = ["", *_hanging("Strategy", f"{sources} ({winner})", 10)]
    names = [f"{setting.section}.{setting.name}" for setting in strategy.settings]
    indent = 4 + max(map(len, names), default=0)
    for name, setting in zip(names, strategy.settings, strict=True):
        text = str(setting.value)
        if isinstance(setting.value, bool):
            text = text.lower()
        elif isinstance(setting.value, tuple):
            text = f"[{', '.join(map(str, setting.value))}]"
        value = secrets.redact(setting.name, text)
        reason = f"; {setting.reason}" if setting.reason else ""
        lines += _hanging(f"  {name}", f"{value}  ({setting.source}{reason})", indent)
    return lines


def _node_lines(
    plan: LaunchPlan, common: Mapping[str, str], unset: frozenset[str], *, here: bool
) -> list[str]:
    host = plan.nodes[plan.node_rank]
    lines = [
        f"Node {plan.node_rank}, host {host}" + (" (this host)" if here else ""),
        *_hanging("  folder", plan.cwd, 12),
        *_hanging("  run", plan.run_dir, 12),
    ]
    lines += [
        f"  file      {path}: {counted(len(text), 'character')}"
        for path, text in sorted(plan.files.items())
    ]
    for process in plan.processes:
        rank = process.rank
        is_trainer = rank is not None and rank.is_trainer
        title = f"rank {rank.rank}" if rank and is_trainer else process.name.replace(".", " ")
        lines += ["", f"  {title}"]
        lines += _hanging("    command", shlex.join(secrets.conceal(process.argv)), 14)
        if rank is not None:
            devices = [f"{device.kind} {device.id}" for device in rank.devices]
            lines += _hanging("    devices", ", ".join(devices) or "cpu", 14)
            lines += _hanging("    endpoint", str(rank.endpoint), 14)
        if process.cpus:
            lines += _hanging("    cpus", format_ranges(process.cpus, ","), 14)
        logs = " and ".join(filter(None, (process.log, process.error_log)))
        lines += _hanging("    log", f"{plan.run_dir}/{logs}", 14)
        own_env = {name: value for name, value in process.env.items() if name not in common}
        if own_env:
            lines += ["    environment", *_env_lines(own_env, indent="      ")]
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
        "script": request.script._asdict() | {"args": list(secrets.conceal(request.script.args))},
        "settings": [
            setting._asdict() | {"value": _setting_value(setting)} for setting in request.settings
        ],
        "rules": first.rules._asdict(),
        "nodes": [
            {
                "node_rank": plan.node_rank,
                "host": plan.nodes[plan.node_rank],
                "here": place == here,
                "cwd": plan.cwd,
                "log_dir": plan.log_dir,
                "run_dir": plan.run_dir,
                "files": dict(plan.files),
                "notes": list(plan.notes),
                "processes": list(map(_json_process, plan.processes)),
            }
            for place, plan in enumerate(plans)
        ],
    }
    return json.dumps(document, indent=2) + "\n"


def _json_process(process: ProcessSpec) -> dict[str, object]:
    fields = process._asdict()
    fields["argv"] = list(secrets.conceal(process.argv))
    fields["env"] = {name: secrets.redact(name, value) for name, value in process.env.items()}
    fields["error_log"] = process.error_log or None
    rank = process.rank
    if rank is not None:
        devices = [device._asdict() for device in rank.devices]
        fields["rank"] = rank._asdict() | {"endpoint": str(rank.endpoint), "devices": devices}
    return fields


def _hanging(label: str, text: str, indent: int) -> list[str]:
    """Put TEXT beside LABEL, from column INDENT on, and break it after commas and blanks.

    >>> _hanging("  name", "value", 8)
    ['  name  value']
    """
    room, text = WIDTH - indent, visible(text)
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
        first, *more = _hanging("", f"{name}={secrets.redact(name, value)}", len(indent) + 2)
        lines += [first[2:], *more]
    return lines


def _common(plans: Sequence[LaunchPlan]) -> tuple[dict[str, str], frozenset[str]]:
    """Return the variables that every process of the job gets with the same value, or loses."""
    processes = [process for plan in plans for process in plan.processes]
    if not processes:
        return {}, frozenset()
    shared = {
        name: value
        for name, value in processes[0].env.items()
        if all(process.env.get(name) == value for process in processes)
    }
    return shared, frozenset.intersection(*(frozenset(process.unset) for process in processes))


def _setting_value(setting: Setting) -> str:
    """Return SETTING's value without secrets; `env.HF_TOKEN` is named like its variable."""
    return secrets.redact(setting.name.rpartition(".")[2], setting.value)
