"""`manifest.json` in the run directory: the provenance of a result, and how to reproduce it.

Schema 2, which goes up when a key changes its meaning or goes away. `repeat` is the line of shell
that launches the same again; secrets in it are ***. Only its owner may read the file (mode 0600).
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from fleetrun import __version__
from fleetrun.model import LaunchPlan, Request
from fleetrun.rundir import installed, reading, secrets

SCHEMA = 2


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
    variables = {
        name: value
        for name, value in sorted(environ.items())
        if is_remembered(name) and secrets.redact(name, value) == value
    }
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
        "environment": {"names": sorted(environ), "values": variables},
        "repeat": _repeat(request, plan.cwd, variables),
    }
    plain: dict[str, Any] = reading.plain(document)
    return plain


def _repeat(request: Request, cwd: str, variables: Mapping[str, str]) -> str:
    """Return the line of shell that launches REQUEST again in CWD with VARIABLES.

    The lines of the config file that took effect become options.
    """
    path = next((row.value for row in request.settings if row.name == "config"), "")
    words = []
    for name, value, source in request.settings:
        option, dot, key = name.partition(".")
        if source.startswith(f"{path}:"):
            words.append(f"--{option}={key}={value}" if dot else f"--{option}={value}")
    command = ["fleetrun", "--config=/dev/null", *words, *secrets.conceal(request.typed)]
    settings = [f"{name}={value}" for name, value in variables.items()]
    return f"cd {shlex.quote(cwd)} && {shlex.join(['env', *settings, *command])}"
