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
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
    """The place of a task among the TASKS of its host; `name` is their socket's."""

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


class Leader:
    """The first task of a host, to which the others connect."""

    def __init__(self, place: TaskPlace, task: Task, timeout_s: float) -> None:
        self._count = place.tasks
        self._task = task
        self._timeout_s = timeout_s
        self._listener = _line()
        self._others: dict[int, socket.socket] = {}
        self._tasks: dict[int, Task] = {0: task}
        try:
            self._listener.bind(place.name)
        except OSError as error:
            self._listener.close()
            raise EnvironmentFault(
                f"Another task already leads the tasks of this run here ({error.strerror})."
            ) from None
        self._listener.listen(place.tasks)

    def collect(self) -> tuple[Task, ...]:
        """Wait for the others, and return all tasks, ours first.

        Raises RendezvousError if some do not come.
        """
        until = time.monotonic() + self._timeout_s
        while len(self._tasks) < self._count:
            self._listener.settimeout(max(0.001, until - time.monotonic()))
            try:
                link, _ = self._listener.accept()
            except TimeoutError:
                missing = [
                    str(number) for number in range(self._count) if number not in self._tasks
                ]
                raise RendezvousError(
                    f"Of the {self._count} tasks of this host {', '.join(missing)} did not join "
                    f"within {self._timeout_s:g} s."
                ) from None
            self._take(link)
        return tuple(task for _, task in sorted(self._tasks.items()))

    def _take(self, link: socket.socket) -> None:
        credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _, user, _ = struct.unpack("3i", credentials)
        try:
            hello = json.loads(link.recv(_CHUNK)) if user == os.getuid() else {}
            number = hello["number"]
            task = Task(tuple(hello["cpus"]), dict(hello["env"]))
        except (OSError, ValueError, KeyError):
            link.close()
            return
        if number in self._tasks:
            link.close()
            return
        self._others[number], self._tasks[number] = link, task
        link.send(_TAKEN)

    def dismiss(self) -> None:
        """Release the other tasks, and wait until they end."""
        self._listener.close()
        until = time.monotonic() + _PARTING_S
        for link in self._others.values():
            # A task may have been killed.
            with suppress(OSError):
                link.send(_OVER)
        for link in self._others.values():
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
