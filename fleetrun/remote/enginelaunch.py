"""A launch that an engine has started: once per host, once per rank, or once in all."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

from fleetrun.engines import detect
from fleetrun.engines.detect import Detected
from fleetrun.errors import UsageError
from fleetrun.model import Request
from fleetrun.remote import srun, tasks
from fleetrun.run import libc
from fleetrun.run.job import launch as start
from fleetrun.run.observers import Caller
from fleetrun.rundir.variables import TOKEN


def launch(
    request: Request, environ: Mapping[str, str], detected: Detected, caller: Caller | None = None
) -> int:
    """Launch REQUEST below the DETECTED engine, and return the exit code."""
    if detect.unspread(detected) is not None:
        # A launcher on each host, by srun.
        if request.detach:
            raise UsageError(
                "--detach cannot be used in an allocation of several hosts: omit it, or submit "
                "the job with `fleetrun submit slurm`."
            )
        return srun.run(request.typed, detected)
    if detected.engine in detect.MPIS:
        # If mpirun's daemons are killed, their children would go on.
        libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGTERM)
    if detected.token and not environ.get(TOKEN):
        environ = {**environ, TOKEN: detected.token}
    if not detect.has_tasks(detected):
        return start(request, environ, caller=caller)
    place_ = tasks.place(detected)
    own_task = tasks.mine(place_, environ)
    if place_.number:
        return tasks.follow(place_, own_task, request.rdzv_timeout_s)
    with tasks.led(place_, own_task, request.rdzv_timeout_s) as host_tasks:
        masks = tasks.together(host_tasks)
        # The launcher assigns to ranks what the engine has assigned to tasks.
        os.environ.update(masks)
        os.sched_setaffinity(0, {cpu for task in host_tasks for cpu in task.cpus})
        return start(request, {**environ, **masks}, host_tasks, caller=caller)
