"""`plan.json`: the plan of this host, without secrets."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from fleetrun.model import LaunchPlan
from fleetrun.rundir import names, reading, secrets
from fleetrun.rundir.folder import Folder

SCHEMA = 1


class ProcessRecord(NamedTuple):
    """One process of this host."""

    name: str
    rank: int | None
    argv: tuple[str, ...]
    # Kind and number or UUID, as `gpu:0`.
    devices: tuple[str, ...] = ()


class PlanRecord(NamedTuple):
    """The part of the file that readers need."""

    nodes: tuple[str, ...]
    cwd: str
    processes: tuple[ProcessRecord, ...]
    max_restarts: int = 0


def write(folder: Folder, plan: LaunchPlan, redact: Callable[[str], str] = str) -> None:
    """Write PLAN into FOLDER; OSError if that fails."""
    # Nearly all of the environment is common, and it may be long.
    first = plan.processes[0].env
    common = {k: v for k, v in first.items() if all(p.env.get(k) == v for p in plan.processes)}
    conceal, redact = lru_cache(secrets.conceal), lru_cache(redact)
    keys = ("job_id", "mode", "engine", "generation", "node_rank", "nodes", "cwd", "notes")
    document = {
        "schema": SCHEMA,
        **{key: getattr(plan, key) for key in keys},
        "rules": plan.rules._asdict(),
        "env": {name: secrets.redact(name, value) for name, value in common.items()},
    }
    processes = [
        {
            **{key: getattr(spec, key) for key in ("name", "unset", "cpus", "log", "essential")},
            "rank": None if spec.rank is None else spec.rank.rank,
            "argv": conceal(spec.argv),
            "env": {
                name: secrets.redact(name, value)
                for name, value in spec.env.items()
                if name not in common
            },
            "devices": [
                f"{device.kind}:{device.id}" for device in (spec.rank.devices if spec.rank else ())
            ],
            "error_log": spec.error_log or None,
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
    return reading.record(
        PlanRecord,
        document,
        processes=tuple(
            reading.record(ProcessRecord, process) for process in document.get("processes") or ()
        ),
        max_restarts=(document.get("rules") or {}).get("max_restarts", 0),
    )
