"""One task per rank, as `srun -n 8` and `mpirun -n 8` start them: the first leads the others.

The first task of a host is its launcher. The others send it what is theirs alone (CPUs, devices,
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

from fleetrun.engines.detect import Detected
from fleetrun.errors import EnvironmentFault, RendezvousError
from fleetrun.model import Task
from fleetrun.plan.kinds import is_mask
from fleetrun.run import proc

# How often a task looks for the first one.
_LOOK_S = 0.05
# How long the first one waits at its end for the others to exit.
_PARTING_S = 5.0
_TAKEN, _OVER = b"taken", b"over"
_CHUNK = 1 << 16
# The exit code of a task whose first one was killed.
_LOST = 137
# The process that starts a host's tasks in Hydra (MPICH and Intel MPI).
_PROXY = "hydra_pmi_proxy"
_IGNORED = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)


class TaskPlace(NamedTuple):
    """The place of a task among the `tasks` of its host; `name` is their socket's."""

    name: str
    number: int
    tasks: int
    own: tuple[str, ...] = ()


def place(detected: Detected) -> TaskPlace:
    """Return this task's place, as the engine has set it."""
    run = detected.run or str(_starter())
    # Several "hosts" may be on this machine.
    name = f"\0fleetrun/tasks/{os.getuid()}/{detected.engine}/{run}/{detected.node}"
    return TaskPlace(name, detected.local or 0, detected.here or 1, detected.own)


def _starter() -> int:
    """Return the pid that has started the tasks of this host: Hydra's proxy, or our parent."""
    pid = os.getppid()
    while pid > 1:
        stat = proc.stat(pid)
        if stat is None:
            break
        if proc.content(f"/proc/{pid}/comm").decode(errors="replace").strip() == _PROXY:
            return pid
        pid = stat.parent
    return os.getppid()


def mine(place: TaskPlace, environ: Mapping[str, str]) -> Task:
    """Return the CPUs and variables that belong to this task."""
    env = {name: value for name, value in environ.items() if name in place.own or is_mask(name)}
    return Task(tuple(sorted(os.sched_getaffinity(0))), env)


def follow(place: TaskPlace, task: Task, timeout_s: float) -> int:
    """Wait for the end of the first task of this host, and return this one's exit code."""
    until = time.monotonic() + timeout_s
    hello = json.dumps({"number": place.number, "cpus": task.cpus, "env": task.env}).encode()
    while time.monotonic() < until:
        with _line() as link:
            try:
                link.connect(place.name)
                link.send(hello)
                taken = link.recv(_CHUNK)
            except OSError:
                taken = b""
            if taken == _TAKEN:
                # The leader gets these as well, and ends gracefully.
                for signum in _IGNORED:
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
    first = os.getpid()
    try:
        with _line() as listener:
            try:
                listener.bind(place.name)
            except OSError as error:
                raise EnvironmentFault(
                    f"Another task already leads the tasks of this run here ({error.strerror})."
                ) from None
            listener.listen(place.tasks)
            until = time.monotonic() + timeout_s
            while len(tasks) < place.tasks:
                listener.settimeout(max(0.001, until - time.monotonic()))
                link, _ = listener.accept()
                number, other = _hello(link)
                if other is None or number in tasks:
                    link.close()
                    continue
                tasks[number] = other
                links.append(link)
                link.send(_TAKEN)
    except TimeoutError:
        missing = ", ".join(str(number) for number in range(place.tasks) if number not in tasks)
        raise RendezvousError(
            f"Of the {place.tasks} tasks of this host {missing} did not join within {timeout_s:g} "
            "s."
        ) from None
    else:
        yield tuple(task for _, task in sorted(tasks.items()))
    finally:
        # This may be the supervisor, its child: what the engine sees is the end of its own task.
        if first in {os.getpid(), os.getppid()}:
            _dismiss(links)


def _hello(link: socket.socket) -> tuple[int, Task | None]:
    """Return the number and what belongs to the task behind LINK; None if it is none of ours."""
    _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    try:
        hello = json.loads(link.recv(_CHUNK)) if user == os.getuid() else {}
        return hello["number"], Task(tuple(hello["cpus"]), dict(hello["env"]))
    except (OSError, ValueError, KeyError):
        return 0, None


def _dismiss(links: Sequence[socket.socket]) -> None:
    """Release the other tasks, and wait until they end."""
    until = time.monotonic() + _PARTING_S
    for link in links:
        # A task may have been killed.
        with suppress(OSError):
            link.send(_OVER)
    for link in links:
        link.settimeout(max(0.001, until - time.monotonic()))
        with suppress(OSError), link:
            while link.recv(_CHUNK):
                pass


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


def _line() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
