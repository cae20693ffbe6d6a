"""The banner: at most five lines about what starts where, and where its logs are.

The ranks have just been started, so this imports only what every launch has already loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

from fleetrun.model import UNNAMED_JOB, Device, LaunchPlan, ProcessSpec, Request
from fleetrun.plan.devices import ON_CPU
from fleetrun.rundir import names
from fleetrun.text import format_ranges, visible, wrapped

_NAME = "fleetrun: "
_TRAINER = "trainer"


def brief(request: Request, plan: LaunchPlan, *, width: int = 0) -> list[str]:
    """Return the lines, without the program's name; broken between words if there is a WIDTH."""
    lines = [_what(request, plan)]
    # A remark that follows says so, and why.
    if not any(note.endswith(ON_CPU) for note in plan.notes):
        lines.append(_devices(request, plan))
    if plan.strategy is not None:
        wins = "the script's settings win" if plan.strategy.mode == "defaults" else "it wins"
        sources = ", ".join(plan.strategy.sources) or "none but the check that ranks are equal"
        lines.append(f"strategy {sources}; {wins}")
    log_dir, run_dir = (_short(path, plan.cwd) for path in (plan.log_dir, plan.run_dir))
    lines.append(f"logs in {log_dir}/{_logs(plan.processes)}")
    lines.append(f"settings in {run_dir}/{names.LAUNCH}")
    room = width - len(_NAME) if width else 0
    return [part for line in lines for part in wrapped(visible(line), room, "  ")]


def _what(request: Request, plan: LaunchPlan) -> str:
    """Return the processes of the job that start here."""
    place = "this host"
    if len(plan.nodes) > 1:
        nodes = f"node rank {plan.node_rank} of {len(plan.nodes)} nodes"
        place = f"{plan.nodes[plan.node_rank]} ({nodes})"
    job = "" if request.job_id == UNNAMED_JOB else f", job {request.job_id},"
    return f"starting {request.script.target}{job} on {place}: {_who(plan)}"


def _who(plan: LaunchPlan) -> str:
    """Name the processes of this host, and how many ranks the job has.

    Ranks are numbered over the whole job: `ranks 2-3 of 4`; other roles are listed one by one.
    """
    groups: dict[str, list[int]] = {}
    for process in plan.processes:
        role, _, number = process.name.rpartition(".")
        groups.setdefault(role, []).append(int(number))
    if set(groups) == {_TRAINER}:
        groups = {"rank": groups[_TRAINER]}
    parts = [
        f"{role}{'s' if len(numbers) > 1 else ''} {format_ranges(numbers)}"
        for role, numbers in groups.items()
    ]
    if "rank" in groups:
        return f"{parts[0]} of {len(plan.ranks)}"
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:]))) or "nothing"


def _devices(request: Request, plan: LaunchPlan) -> str:
    """Return which devices the processes get, and how they communicate."""
    held = [p.rank.devices for p in plan.processes if p.rank is not None and p.rank.devices]
    devices = [device for group in held for device in group]
    shown = "none (CPU)"
    if devices:
        shown = "; ".join(_listed(kind, devices) for kind in dict.fromkeys(d.kind for d in devices))
        most = max(map(len, held))
        shown += f" ({most} for each process)" if most > 1 and len(held) > 1 else ""
    backends = (p.env.get("PADDLE_DISTRI_BACKEND") for p in plan.processes)
    backend = next((name for name in backends if name), request.backend)
    # Parameter servers have none.
    return f"devices {shown}" + ("" if backend == "auto" else f"; backend {backend}")


def _listed(kind: str, devices: Sequence[Device]) -> str:
    """Name the DEVICES of one KIND, each once, with numbers as ranges."""
    ids = list(dict.fromkeys(device.id for device in devices if device.kind == kind))
    if all(device_id.isdecimal() for device_id in ids):
        return f"{kind} {format_ranges(map(int, ids))}"
    return f"{kind} {', '.join(ids)}"


def _logs(processes: Sequence[ProcessSpec]) -> str:
    """Name the log files of PROCESSES: `workerlog.0 to workerlog.7`, or their kinds."""
    logs = [log for process in processes for log in (process.log, process.error_log) if log]
    kinds = list(dict.fromkeys(f"{log.rstrip('0123456789')}N" for log in logs))
    if len(kinds) == 1:
        return " to ".join(dict.fromkeys((logs[0], logs[-1])))
    return f" with {', '.join(kinds)}" if kinds else ""


def _short(path: str, cwd: str) -> str:
    """Return PATH relative to the folder CWD.

    >>> _short("/job/log", "/job"), _short("/data/log", "/job")
    ('log', '/data/log')
    """
    return path[len(cwd) + 1 :] if cwd != "/" and path.startswith(f"{cwd}/") else path
