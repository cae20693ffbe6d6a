"""The processes of a plan: start one, ask it to end, kill and reap it."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from fleetrun.model import ExitStatus, LaunchPlan, ProcessSpec
from fleetrun.run import children, proc
from fleetrun.rundir import names, variables
from fleetrun.rundir.folder import SHARED, Folder, write_all

# The size of a trial write to a log: without room for a traceback, a log is of no use.
_TRIAL = b"\n" * 4096
_NOT_FOUND = ExitStatus(code=127)
_NOT_RUNNABLE = ExitStatus(code=126)
_APPENDING = os.O_WRONLY | os.O_APPEND
# The longest first line that may name an interpreter; the kernel reads less.
_LONGEST_LINE = 4096


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
        # Who has been asked to end by the last signal: pid and time of the start.
        self._signum = 0
        self._asked: set[tuple[int, int]] = set()

    @property
    def has_terminal(self) -> bool:
        """Whether it is in the keeper's group, and gets the terminal's signals."""
        return self.group != self.pid

    def ask(self, signum: int) -> None:
        """Send SIGNUM, a request to end, to all that no Python of the group has started.

        A DataLoader that loses a worker raises, and its process can no longer save. So whatever a
        Python has started is asked when that has ended and this is called again.
        """
        if signum != self._signum:
            self._signum = signum
            self._asked.clear()
        leader = proc.stat(self.pid)
        is_python = leader is not None and proc.is_python(self.pid)
        self._ask([leader] if leader is not None and is_python else _tops(self._members()))

    def ask_again(self) -> None:
        """Ask those that have not been asked, as the Python that has started them has ended."""
        self.ask(self._signum or signal.SIGTERM)

    def notify(self, signum: int) -> None:
        """Send the notice SIGNUM to the process, and to no wrapper that it would end."""
        first = _tops(self._members())
        for member in first:
            if len(first) == 1 or proc.catches(member.pid, signum):
                _send(member, signum)

    def signal(self, signum: int) -> None:
        """Send SIGNUM to the whole group; of the keeper's group, to this process and its own."""
        if not self.has_terminal:
            # Until `reap` the leader, even a zombie, keeps the id of the group from being reused.
            children.send(self.pid, signum)
            return
        for member in self._members():
            _send(member, signum)

    def left_behind(self) -> bool:
        """Whether living processes of the group have outlived this one, which has ended."""
        if self.has_terminal:
            return bool(self._members())
        others = [pid for pid in children.pids() if pid != self.pid]
        return any(children.group(pid) == self.group and not children.reap(pid) for pid in others)

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

    def _members(self) -> list[proc.Stat]:
        """Return the living processes of the group, the oldest first."""
        members = [process for process in proc.all_processes() if process.group == self.group]
        if self.has_terminal:
            # The keeper is in that group, and so may be the rest of a pipeline.
            family = proc.descendants(members, {self.pid, *children.pids()})
            members = [process for process in members if process.pid in family]
        return sorted(members, key=lambda member: (member.started, member.pid))

    def _ask(self, members: Iterable[proc.Stat]) -> None:
        for member in members:
            if (member.pid, member.started) not in self._asked:
                self._asked.add((member.pid, member.started))
                _send(member, self._signum)


def _send(process: proc.Stat, signum: int) -> None:
    # Gone already, or a set-user-id program.
    with suppress(OSError):
        proc.send(process, signum)


def _tops(members: Collection[proc.Stat]) -> list[proc.Stat]:
    """Return those of MEMBERS that do not descend from a Python among them."""
    pythons = {member.pid for member in members if proc.is_python(member.pid)}
    started = {member.pid for member in members if member.parent in pythons}
    below = proc.descendants(members, started)
    return [member for member in members if member.pid not in below]


def environment(base: Mapping[bytes, bytes], spec: ProcessSpec, marker: str) -> dict[bytes, bytes]:
    """Return the environment of SPEC: BASE as it says, and the MARKER of the job."""
    env = dict(base)
    for name in spec.unset:
        env.pop(os.fsencode(name), None)
    for name, value in {**spec.env, variables.JOB: marker}.items():
        env[os.fsencode(name)] = os.fsencode(value)
    return env


def claim(plan: LaunchPlan, attempt: int, folder: Folder) -> None:
    """Write the files of PLAN into FOLDER, and make a trial write to each log of ATTEMPT.

    Raises OSError if one cannot be written, as on a full disk.
    """
    if attempt:
        # It may have been removed since the first attempt.
        os.makedirs(folder.path, exist_ok=True)
    for path, text in plan.files.items():
        folder.write(os.path.basename(path), text)
    for spec in plan.processes:
        for log in names.log_paths(plan, spec, attempt):
            fd = _append(log, folder)
            size = os.fstat(fd).st_size
            try:
                write_all(fd, _TRIAL)
            finally:
                os.ftruncate(fd, size)
                os.close(fd)


def _append(log: str, folder: Folder) -> int:
    return folder.append(os.path.basename(log), SHARED)


def spawn(
    spec: ProcessSpec,
    *,
    index: int,
    attempt: int,
    env: Mapping[bytes, bytes],
    logs: Sequence[str],
    folder: Folder,
    default_signals: Collection[int],
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
    before = _move_to(spec.cpus)
    try:
        fds.extend(_append(log, folder) for log in logs)
        # Not by dup2, which would hand on that the launcher's descriptors do not block.
        actions: list[tuple[Any, ...]] = [
            (os.POSIX_SPAWN_OPEN, 1 + stream, f"/proc/self/fd/{fds[-stream]}", _APPENDING, 0)
            for stream in (0, 1)
        ]
        if not takes_stdin:
            actions.append((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0))
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
    """Bind this thread to CPUS unless empty, and return the previous affinity.

    A process started meanwhile inherits the affinity, so it never runs elsewhere.
    """
    if not cpus:
        return ()
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        # The CPUs have gone away since planning: start the process unbound.
        return ()
    return before


def _refusal(spec: ProcessSpec, error: OSError | ValueError) -> SpawnRefusal:
    """Explain why SPEC could not be started, better than the errno alone does."""
    program = spec.argv[0]
    if isinstance(error, ValueError):
        return SpawnRefusal(_NOT_RUNNABLE, f"{error} in its command or environment.")
    why = _WHY.get(error.errno or 0, "{program}: {error}.")
    if error.errno == errno.ENOENT and os.path.exists(program):
        why = "the interpreter named in the first line of {program} does not exist."
        with suppress(OSError), open(program, "rb") as file:
            if file.readline(_LONGEST_LINE).endswith(b"\r\n"):
                why = (
                    "the first line of {program} ends in a carriage return, as lines of Windows "
                    "do: run `sed -i 's/\\r$//' {program}`."
                )
    status = _NOT_FOUND if error.errno == errno.ENOENT else _NOT_RUNNABLE
    return SpawnRefusal(status, why.format(program=program, error=error.strerror))


_WHY = {
    errno.ENOENT: "there is no program {program}.",
    errno.EACCES: "{program} may not be executed: try chmod +x, or look for a noexec mount and for "
    "a folder on its way that this user may not enter.",
    errno.ENOEXEC: "{program} is not a program: a script needs a first line such as #!/bin/sh.",
    errno.E2BIG: "its command line and environment, or one variable, exceed the kernel's limit: "
    "export less, put long values into files, or raise the limit (`ulimit -s unlimited`).",
    errno.EAGAIN: "no more processes are allowed (ulimit -u, or the pids limit of the container).",
    errno.EMFILE: "no more files may be open (ulimit -n).",
    errno.ENFILE: "no more files may be open on this host (fs.file-max).",
}
