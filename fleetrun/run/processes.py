"""The processes of a plan: start one, ask it to end, kill and reap it."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from fleetrun.model import ExitStatus, LaunchPlan, ProcessSpec
from fleetrun.run import children, proc
from fleetrun.rundir import names, variables
from fleetrun.rundir.folder import SHARED, Folder

_NOT_FOUND, _NOT_RUNNABLE = ExitStatus(code=127), ExitStatus(code=126)
_APPENDING = os.O_WRONLY | os.O_APPEND


class SpawnRefusal(NamedTuple):
    """Why a process could not be started, with the exit code that a shell would return."""

    status: ExitStatus
    why: str


class Worker:
    """A running process of the plan, which leads GROUP unless it reads the terminal."""

    def __init__(self, index: int, attempt: int, pid: int, group: int) -> None:
        self.index, self.attempt = index, attempt
        self.pid, self.group = pid, group
        self.pidfd = os.pidfd_open(pid)
        self.started_at = time.monotonic()
        # Known when it is reaped.
        self.peak_bytes: int | None = None
        self.has_core = False
        # The last request to end, and who got it.
        self._signum: int = signal.SIGTERM
        self._asked: set[int] = set()

    @property
    def has_terminal(self) -> bool:
        """Whether it is in the keeper's group, unless the script has left that (os.setpgrp)."""
        return self.pid != self.group == children.group(self.pid)

    def ask(self, signum: int = 0) -> None:
        """Send SIGNUM, a request to end, to all that no Python of the process has started.

        A DataLoader that loses a worker raises, and its process can no longer save. So whatever a
        Python has started is asked when that has ended and this is called again (0: as before).
        """
        if signum and signum != self._signum:
            self._signum, self._asked = signum, set()
        for pid in self._down():
            if pid not in self._asked:
                self._asked.add(pid)
                children.send_one(pid, self._signum)

    def notify(self, signum: int) -> None:
        """Send the notice SIGNUM to the process, or what it wraps, unless it would end that."""
        for pid in self._down():
            if proc.catches(pid, signum):
                children.send_one(pid, signum)

    def signal(self, signum: int) -> None:
        """Send SIGNUM to the whole group; in the keeper's, to our children and those below."""
        # Until `reap` the leader, even a zombie, keeps the id of the group from being reused.
        for pid in self._down(is_whole=True) if self.has_terminal else [self.pid]:
            children.send(pid, signum)

    def left_behind(self) -> bool:
        """Whether living ones of the group, or that were asked, have outlived this one."""
        return any(pid != self.pid and not children.reap(pid) for pid in self._top())

    def status(self) -> ExitStatus:
        """Return the exit status of a process that has ended, and leave it a zombie."""
        info = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert info is not None
        self.has_core = info.si_code == os.CLD_DUMPED
        if info.si_code == os.CLD_EXITED:
            return ExitStatus(code=info.si_status)
        return ExitStatus(signum=info.si_status)

    def reap(self) -> None:
        """Kill what is left of the group of a process that has ended, and reap it."""
        # The zombie still pins the group's id.
        self.signal(signal.SIGKILL)
        # The kernel counts in KiB.
        self.peak_bytes = os.wait4(self.pid, 0)[2].ru_maxrss * 1024
        os.close(self.pidfd)

    def _top(self) -> list[int]:
        """Return it, and those of its orphans that are in the group or were asked."""
        own = {self.pid, *self._asked}
        return [pid for pid in children.pids() if pid in own or children.group(pid) == self.group]

    def _down(self, *, is_whole: bool = False) -> list[int]:
        """Return these, and what they have started, down to the first Python or IS_WHOLE."""
        processes = self._top()
        for pid in processes:
            if is_whole or not proc.is_python(pid):
                with suppress(OSError):
                    processes += children.pids(pid)
        return processes


def environment(base: Mapping[bytes, bytes], spec: ProcessSpec, marker: str) -> dict[bytes, bytes]:
    """Return the environment of SPEC: BASE as it says, and the MARKER of the job if it has none."""
    env = dict(base)
    for name in spec.unset:
        env.pop(os.fsencode(name), None)
    for name, value in {variables.JOB: marker, **spec.env}.items():
        env[os.fsencode(name)] = os.fsencode(value)
    return env


def claim(plan: LaunchPlan, attempt: int, folder: Folder) -> None:
    """Write the files of PLAN into FOLDER, and create each log of ATTEMPT; OSError if not."""
    # It may have been removed since the first attempt.
    os.makedirs(folder.path, exist_ok=True)
    for path, text in plan.files.items():
        folder.write(os.path.basename(path), text)
    for spec in plan.processes:
        for log in names.log_paths(plan, spec, attempt):
            os.close(folder.append(os.path.basename(log), SHARED))


def spawn(
    spec: ProcessSpec,
    *,
    index: int,
    attempt: int,
    env: Mapping[bytes, bytes],
    logs: Sequence[str],
    folder: Folder,
    default_signals: Collection[int],
    open_files: tuple[int, int],
    takes_stdin: bool,
    terminal_group: int | None,
) -> Worker | SpawnRefusal:
    """Start SPEC with its output appended to LOGS, files of FOLDER.

    It leads a session; one that reads the terminal joins TERMINAL_GROUP, the keeper's.
    """
    place: dict[str, Any] = {"setsid": True}
    if terminal_group is not None:
        place = {"setpgroup": terminal_group}
        # Ctrl-\ asks the launcher for stacks; it must not end who shares the terminal.
        default_signals = set(default_signals) - {signal.SIGQUIT}
    fds: list[int] = []
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = _move_to(spec.cpus)
    try:
        fds.extend(folder.append(os.path.basename(log), SHARED) for log in logs)
        # Not by dup2, which would hand on that the launcher's descriptors do not block.
        actions: list[tuple[Any, ...]] = [
            (os.POSIX_SPAWN_OPEN, 1 + stream, f"/proc/self/fd/{fds[-stream]}", _APPENDING, 0)
            for stream in (0, 1)
        ]
        if not takes_stdin:
            actions.append((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0))
        resource.setrlimit(resource.RLIMIT_NOFILE, open_files)
        pid = os.posix_spawnp(
            *(spec.argv[0], spec.argv, env),
            file_actions=actions,
            setsigmask=(),
            setsigdef=default_signals,
            **place,
        )
    except (OSError, ValueError) as error:
        if len(fds) < len(logs) and isinstance(error, OSError):
            why = f"its log {logs[len(fds)]} cannot be written ({error.strerror})."
            return SpawnRefusal(_NOT_RUNNABLE, why)
        return _refusal(spec, error)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
        _move_to(before)
        for fd in fds:
            os.close(fd)
    try:
        return Worker(index, attempt, pid, terminal_group or pid)
    except OSError as error:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return _refusal(spec, error)


def _move_to(cpus: Collection[int]) -> Collection[int]:
    """Bind this thread, and what it starts, to CPUS unless empty; return the previous affinity."""
    if not cpus:
        return ()
    before = os.sched_getaffinity(0)
    # If the CPUs have gone away since planning, the process starts unbound.
    with suppress(OSError):
        os.sched_setaffinity(0, cpus)
    return before


def _refusal(spec: ProcessSpec, error: OSError | ValueError) -> SpawnRefusal:
    """Explain why SPEC could not be started, better than the errno alone does."""
    program = spec.argv[0]
    if isinstance(error, ValueError):
        return SpawnRefusal(_NOT_RUNNABLE, f"{error} in its command or environment.")
    why = _WHY.get(error.errno or 0, "{program}: {error}.")
    if error.errno == errno.ENOENT and os.path.exists(program):
        why = (
            "the interpreter named in the first line of {program} does not exist, or that line "
            "ends in a carriage return, as those of Windows do."
        )
    status = _NOT_FOUND if error.errno == errno.ENOENT else _NOT_RUNNABLE
    return SpawnRefusal(status, why.format(program=program, error=error.strerror))


_WHY = {
    errno.ENOENT: "there is no program {program}.",
    errno.EACCES: "{program} may not be executed: try chmod +x, or look for a noexec mount and for "
    "a folder on its way that this user may not enter.",
    errno.ENOEXEC: "{program} is not a program: a script needs a first line such as #!/bin/sh.",
    errno.E2BIG: "its command line and environment, or one variable, exceed the kernel's limit.",
    errno.EAGAIN: "no more processes are allowed (ulimit -u, or the pids limit of the container).",
    errno.EMFILE: "no more files may be open (ulimit -n).",
}
