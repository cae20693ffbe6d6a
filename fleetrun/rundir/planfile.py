"""`plan.json`: the plan, without secrets; schema 1.

`schema`, `job_id`, `mode`, `engine`, `generation`, `node_rank`, `nodes`, `cwd`, `rules`, `notes`,
`env` (what all processes are given) and the `processes`: `name`, `rank` (null: none), `argv`, `env`
(what only this one is given), `unset`, `cpus`, `devices` (as `gpu:0`), `log`, `error_log` (of
standard error; null: it is in `log`), `essential`, `awaits` (groups of endpoints).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from fleetrun.model import LaunchPlan
from fleetrun.rundir import arguments, names, reading, secrets
from fleetrun.rundir.folder import Folder

SCHEMA = 1


class ProcessRecord(NamedTuple):
    """One process of this host; `log` is the name of its file in the run directory."""

    name: str
    rank: int | None
    argv: tuple[str, ...]
    log: str
    # Kind and number or UUID, as `gpu:0`.
    devices: tuple[str, ...] = ()


class PlanRecord(NamedTuple):
    """The part of the file that readers need."""

    job_id: str
    mode: str
    node_rank: int
    nodes: tuple[str, ...]
    cwd: str
    processes: tuple[ProcessRecord, ...]
    max_restarts: int = 0


def write(folder: Folder, plan: LaunchPlan, redact: Callable[[str], str] = str) -> None:
    """Write PLAN into FOLDER; OSError if that fails."""
    envs = [spec.env for spec in plan.processes]
    # Nearly all of it is common, and it may be long.
    common = {k: v for k, v in envs[0].items() if all(e.get(k) == v for e in envs)}
    # Ranks have most of the rest in common, too, such as their command.
    conceal, redact = lru_cache(arguments.conceal), lru_cache(redact)
    document = {
        "schema": SCHEMA,
        "job_id": plan.job_id,
        "mode": plan.mode,
        "engine": plan.engine,
        "generation": plan.generation,
        "node_rank": plan.node_rank,
        "nodes": plan.nodes,
        "cwd": plan.cwd,
        "rules": plan.rules._asdict(),
        "notes": plan.notes,
        "env": {name: secrets.redact(name, value) for name, value in common.items()},
    }
    processes = [
        {
            "name": spec.name,
            "rank": None if spec.rank is None else spec.rank.rank,
            "argv": conceal(spec.argv)[0],
            "env": {
                name: secrets.redact(name, value)
                for name, value in spec.env.items()
                if name not in common
            },
            "unset": spec.unset,
            "cpus": spec.cpus,
            "devices": [
                f"{device.kind}:{device.id}" for device in (spec.rank.devices if spec.rank else ())
            ],
            "log": spec.log,
            "error_log": spec.error_log or None,
            "essential": spec.essential,
            "awaits": [[str(endpoint) for endpoint in group] for group in spec.awaits],
        }
        for spec in plan.processes
    ]
    head = json.dumps(secrets.everywhere(document, redact), indent=1).removesuffix("\n}")
    # A line for each: json indents only in Python, which takes a millisecond for two ranks.
    lines = ",\n  ".join(json.dumps(secrets.everywhere(process, redact)) for process in processes)
    folder.write(names.PLAN, f'{head},\n "processes": [\n  {lines}\n ]\n}}\n')


def read(path: str) -> PlanRecord | None:
    """Return the contents of the file PATH, as far as readable; None if it is not a plan."""
    document = reading.document(path)
    if document is None or document.get("schema") != SCHEMA:
        return None
    rules = reading.mapping(document.get("rules"))
    return reading.record(PlanRecord, {**document, "max_restarts": rules.get("max_restarts")})
