"""A launch that an engine has started: once in all, once per host, or once per rank.

Of one task per rank, as `srun -n 8` and `mpirun -n 8` start them, the first leads the others. The
first task of a host is its launcher. The others send it what is theirs alone (CPUs, devices,
the engine's rank) and wait for its end. They end before it, with 0, because an engine that ends a
job at its first bad exit code would hide the right one.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from fleetrun.engines import detect
from fleetrun.engines.detect import Detected
from fleetrun.errors import EnvironmentFault, RendezvousError, UsageError
from fleetrun.model import Request, Task
from fleetrun.plan.kinds import is_mask
from fleetrun.remote import srun
from fleetrun.run import job, libc
from fleetrun.run.keeper import REQUESTS
from fleetrun.run.observers import Caller
from fleetrun.rundir.variables import TOKEN

# How often a task looks for the first one.
_LOOK_S = 0.05
# How long the first one waits at its end for the others to exit.
_PARTING_S = 5.0
_TAKEN, _OVER = b"taken", b"over"
_CHUNK = 1 << 16
# The exit code of a task whose first one was killed.
_LOST = 137


class TaskPlace(NamedTuple):
    """The place of a task among the `tasks` of its host; `name` is their socket's."""

    name: str
    number: int
    tasks: int


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
        return job.launch(request, environ, caller=caller)
    # Hydra (MPICH and Intel MPI) names no run: its proxy has started all tasks of the host. And
    # several "hosts" may be on this machine.
    run = detected.run or os.getppid()
    name = f"\0fleetrun/tasks/{os.getuid()}/{detected.engine}/{run}/{detected.node}"
    place = TaskPlace(name, detected.local or 0, detected.here or 1)
    env = {key: value for key, value in environ.items() if key in detected.own or is_mask(key)}
    own = Task(tuple(sorted(os.sched_getaffinity(0))), env)
    if place.number:
        return follow(place, own, request.rdzv_timeout_s)
    with led(place, own, request.rdzv_timeout_s) as host_tasks:
        masks = together(host_tasks)
        # The launcher assigns to ranks what the engine has assigned to tasks.
        os.environ.update(masks)
        os.sched_setaffinity(0, {cpu for task in host_tasks for cpu in task.cpus})
        return job.launch(request, {**environ, **masks}, host_tasks, caller=caller)


def follow(place: TaskPlace, task: Task, timeout_s: float) -> int:
    """Wait for the end of the first task of this host, and return this one's exit code."""
    until = time.monotonic() + timeout_s
    hello = json.dumps([place.number, *task]).encode()
    while time.monotonic() < until:
        with _socket() as link, suppress(OSError):
            link.connect(place.name)
            link.send(hello)
            if link.recv(_CHUNK) == _TAKEN:
                # The leader gets these as well, and ends gracefully.
                for signum in REQUESTS:
                    signal.signal(signum, signal.SIG_IGN)
                return 0 if link.recv(_CHUNK) == _OVER else _LOST
        time.sleep(_LOOK_S)
    raise RendezvousError(
        f"The first of the {place.tasks} tasks of this host did not join within {timeout_s:g} s."
    )


@contextmanager
def led(place: TaskPlace, task: Task, timeout_s: float) -> Iterator[tuple[Task, ...]]:
    """Collect all tasks of this host, ours first, and release the others at the end.

    Raises RendezvousError if some do not come within TIMEOUT_S seconds, and EnvironmentFault if
    another task leads.
    """
    tasks, links = {0: task}, list[socket.socket]()
    first, until = os.getpid(), time.monotonic() + timeout_s
    try:
        with _socket() as listener:
            listener.bind(place.name)
            listener.listen(place.tasks)
            while len(tasks) < place.tasks:
                listener.settimeout(max(0.001, until - time.monotonic()))
                link, _ = listener.accept()
                peer = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                if struct.unpack("3i", peer)[1] == os.getuid():
                    number, cpus, env = json.loads(link.recv(_CHUNK))
                    tasks[number] = Task(tuple(cpus), env)
                    links.append(link)
                    link.send(_TAKEN)
    except TimeoutError:
        missing = ", ".join(str(number) for number in range(place.tasks) if number not in tasks)
        raise RendezvousError(
            f"Of {place.tasks} tasks of this host {missing} did not join within {timeout_s:g} s."
        ) from None
    except OSError as error:
        raise EnvironmentFault(f"This run's tasks cannot be led here ({error.strerror}).") from None
    try:
        yield tuple(task for _, task in sorted(tasks.items()))
    finally:
        # This may be the supervisor, its child: what the engine sees is the end of its own task.
        if first in {os.getpid(), os.getppid()}:
            # A task may have been killed.
            for link in links:
                link.settimeout(_PARTING_S)
                with suppress(OSError):
                    link.send(_OVER)
            for link in links:
                with suppress(OSError), link:
                    link.recv(_CHUNK)


def together(tasks: Sequence[Task]) -> dict[str, str]:
    """Return the joined device masks of TASKS if each has its own.

    Raises EnvironmentFault if some devices belong to several tasks, and others to one.

    >>> together([Task((), {"CUDA_VISIBLE_DEVICES": gpu}) for gpu in "01"])
    {'CUDA_VISIBLE_DEVICES': '0,1'}
    """
    joined: dict[str, str] = {}
    for name in sorted({name for task in tasks for name in task.env if is_mask(name)}):
        masks = [task.env.get(name, "") for task in tasks]
        if len(set(masks)) == 1:
            continue
        devices = [entry.strip() for mask in masks for entry in mask.split(",") if entry.strip()]
        if len(set(devices)) < len(devices) or not all(masks):
            raise EnvironmentFault(
                f"{name} is {' and '.join(dict.fromkeys(mask or 'not set' for mask in masks))} in "
                "tasks of this host: give each its own devices, or all the same."
            )
        joined[name] = ",".join(devices)
    return joined


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
