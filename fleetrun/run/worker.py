"""Starting one process of a plan, and the handle on it."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from fleetrun.model import ExitStatus, LaunchPlan, ProcessSpec
from fleetrun.plan.environment import STACK_SIGNAL
from fleetrun.run import proc, terminal
from fleetrun.run.children import Ended, EndRequest, Leftover, Order
from fleetrun.run.guard import Guard
from fleetrun.rundir import names, variables
from fleetrun.rundir.folder import SHARED, Folder, closed, point, write_all

# The size of a trial write to a log: without room for a traceback, a log is of no use.
_TRIAL = b"\n" * 4096
_NOT_FOUND = ExitStatus(code=127)
_NOT_RUNNABLE = ExitStatus(code=126)
# The longest first line that may name an interpreter; the kernel reads less.
_LONGEST_LINE = 4096
# The beginning of the command of a rank that is a Python script or module.
_INTERPRETER = (sys.executable, "-u")


class SpawnRefusal(NamedTuple):
    """Why a process could not be started, with the exit code that a shell would return."""

    status: ExitStatus
    why: str


class Worker:
    """One running process, the leader of its own session and process group."""

    # Whether it gets the terminal's signals (Ctrl-C), too.
    has_terminal = False

    def __init__(self, index: int, attempt: int, pid: int, pidfd: int, guard: Guard) -> None:
        self.index = index
        self.attempt = attempt
        self.pid = pid
        self.pidfd = pidfd
        self.started_at = time.monotonic()
        self._guard = guard
        # Known when it is reaped.
        self.peak_bytes: int | None = None
        self.has_core = False
        self.left: tuple[Leftover, ...] = ()
        # Known before, if it was reaped together with others.
        self.ended: Ended | None = None
        self._request = EndRequest(pid, self._members())
        self._waited_for: int | None = None

    def ask(self, signum: int) -> None:
        """Send SIGNUM, a request to end, to the rank, and not yet to what it has started."""
        if self.ended is None:
            self._request.make(signum)

    def notify(self, signum: int) -> None:
        """Send the notice SIGNUM to the rank alone."""
        if self.ended is None:
            self._request.notify(signum)

    def ask_left(self, left: int) -> None:
        """Ask those whose parent has ended; LEFT is one of them."""
        if left != self._waited_for:
            self._waited_for = left
            self._request.repeat()

    def ask_rest(self) -> None:
        """Ask those that have not been asked to end; the rank will soon be killed."""
        if self.ended is None:
            self._request.insist()

    def signal(self, signum: int) -> None:
        """Send SIGNUM to the whole group."""
        if self.ended is not None:
            return
        # Until `reap` the leader, even a zombie, keeps the group id from being reused.
        with suppress(ProcessLookupError, PermissionError):
            # Without permission: only a set-user-id program is left in the group.
            os.killpg(self.pid, signum)

    def _members(self) -> Callable[[], list[proc.Stat]] | None:
        return None

    def left_behind(self) -> int | None:
        """Return a member of the group that has outlived its leader, or None."""
        return self._guard.left_in(self.pid)

    def reap(self) -> ExitStatus:
        """Kill what is left of the group of a worker that has ended; return its exit status."""
        ended = self.ended = self.ended or self._guard.end([self.pid])[0]
        (code, status), self.peak_bytes, self.left = ended
        os.close(self.pidfd)
        self.has_core = code == os.CLD_DUMPED
        return ExitStatus(code=status) if code == os.CLD_EXITED else ExitStatus(signum=status)


class TerminalWorker(Worker):
    """The process that reads the terminal, in the launcher's session and process group.

    The launcher and its pipeline share that group, so processes are signalled one by one.
    """

    has_terminal = True

    def signal(self, signum: int) -> None:
        """Send SIGNUM to the process and to its descendants in the launcher's group."""
        # The ids of descendants are fresh; its own cannot be reused until `reap`.
        for pid in (self.pid, *self._family()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signum)

    def left_behind(self) -> int | None:
        """Return a descendant that has outlived the process, or None."""
        return next(iter(self._family()), None)

    def reap(self) -> ExitStatus:
        """Kill the descendants of a process that has ended; return its exit status."""
        self.signal(signal.SIGKILL)
        return super().reap()

    def _members(self) -> Callable[[], list[proc.Stat]]:
        def members() -> list[proc.Stat]:
            stats = map(proc.stat, (self.pid, *self._family()))
            return [process for process in stats if process is not None]

        return members

    def _family(self) -> list[int]:
        """Return the process and its descendants, orphans too, in the launcher's group."""
        group = os.getpgrp()
        # Orphans are children of the guard, which has no other children in this group.
        roots = self._guard.pids | {self.pid}
        members = [process for process in proc.all_processes() if process.group == group]
        return sorted(proc.descendants(members, roots) - roots)


def reap_together(workers: Sequence[Worker], guard: Guard, sweep_s: float | None) -> None:
    """Reap WORKERS, which have ended, up to the first that has failed, as `Guard.end` does."""
    together = [worker for worker in workers if not worker.has_terminal]
    if not together:
        return
    ended = guard.end([worker.pid for worker in together], sweep_s)
    for worker, how in zip(together, ended, strict=False):
        worker.ended = how


def reap_alone(workers: Sequence[Worker], guard: Guard) -> None:
    """Reap those of WORKERS, which have ended, that leave nobody in their groups."""
    together = [worker for worker in workers if not worker.has_terminal]
    ended = guard.end_alone([worker.pid for worker in together]) if together else {}
    for worker in together:
        worker.ended = ended.get(worker.pid)


class Environments:
    """The environments of processes: BASE without what each removes and with what it sets.

    EXTRA is set in all.
    """

    def __init__(self, base: Mapping[bytes, bytes], extra: Mapping[str, str]) -> None:
        self._base, self._extra = base, extra
        # Those after the first one differ little from it.
        self._first: tuple[ProcessSpec, dict[bytes, bytes]] | None = None

    def of(self, spec: ProcessSpec) -> dict[bytes, bytes]:
        """Return the environment of SPEC."""
        if self._first is None:
            self._first = spec, _environment(self._base, spec, self._extra)
        like, env = self._first
        if spec.env.keys() != like.env.keys() or spec.unset != like.unset:
            return _environment(self._base, spec, self._extra)
        env = dict(env)
        for name, value in spec.env.items() - like.env.items():
            if name not in self._extra:
                env[os.fsencode(name)] = os.fsencode(value)
        return env


def _environment(
    base: Mapping[bytes, bytes], spec: ProcessSpec, extra: Mapping[str, str]
) -> dict[bytes, bytes]:
    env = dict(base)
    for name in spec.unset:
        env.pop(os.fsencode(name), None)
    for more in (spec.env, extra):
        env.update(zip(map(os.fsencode, more), map(os.fsencode, more.values()), strict=True))
    return env


def is_starting(worker: Worker, spec: ProcessSpec) -> bool:
    """Whether WORKER is a Python that has not reached the user's script; False for other programs.

    Our `sitecustomize` catches STACK_SIGNAL just before the script begins.
    """
    if spec.argv[:2] != _INTERPRETER or not spec.env.get(variables.STACK_SIGNAL_VARIABLE):
        return False
    words = b"".join(os.fsencode(word) + b"\0" for word in spec.argv)
    # It may have replaced itself by another program.
    is_itself = proc.content(f"/proc/{worker.pid}/cmdline").rstrip(b"\0") == words.rstrip(b"\0")
    return is_itself and not proc.catches(worker.pid, STACK_SIGNAL)


class OpenLogs:
    """The logs that `claim` has opened, until the process of each is started."""

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}

    def open(self, log: str, folder: Folder) -> int:
        """Return a descriptor of LOG, a file of FOLDER, which is the caller's to close."""
        return self._fds.pop(log) if log in self._fds else _append(log, folder)

    def claim(self, log: str, folder: Folder) -> None:
        """Open LOG and make a trial write to it; OSError if that fails."""
        fd = self._fds[log] = _append(log, folder)
        size = os.fstat(fd).st_size
        try:
            write_all(fd, _TRIAL)
        finally:
            os.ftruncate(fd, size)

    def close(self) -> None:
        """Close those of processes that were not started."""
        _close(tuple(self._fds.values()))
        self._fds.clear()


def _append(log: str, folder: Folder) -> int:
    return folder.append(os.path.basename(log), SHARED)


def claim(plan: LaunchPlan, attempt: int, folder: Folder, logs: OpenLogs) -> None:
    """Write the files of PLAN into FOLDER, and open and try each log of ATTEMPT.

    Raises OSError if one cannot be written, as on a full disk.
    """
    logs.close()
    if attempt:
        # It may have been removed since the first attempt.
        folder.revive()
    for path, text in plan.files.items():
        folder.write(os.path.basename(path), text)
    for path, target in plan.links.items():
        point(os.path.basename(path), target, folder.fd)
    for spec in plan.processes:
        for log in names.log_paths(plan, spec, attempt):
            logs.claim(log, folder)


def spawn(
    spec: ProcessSpec,
    *,
    index: int,
    attempt: int,
    env: Mapping[bytes, bytes],
    logs: Sequence[str],
    open_logs: OpenLogs,
    default_signals: Sequence[int],
    guard: Guard,
    folder: Folder,
    stdin: terminal.Stdin,
) -> Worker | SpawnRefusal:
    """Start SPEC in a session of its own, its output appended to LOGS, files of FOLDER.

    The one that reads the terminal stays in the launcher's session.
    """
    fds: list[int] = []
    log = ""
    try:
        for log in logs:
            fds.append(open_logs.open(log, folder))
    except OSError as error:
        _close(fds)
        return SpawnRefusal(_NOT_RUNNABLE, f"its log {log} cannot be written ({error.strerror}).")
    has_stdin = index == stdin.process
    has_terminal = has_stdin and stdin.is_terminal and terminal.is_foreground()
    order = Order(
        argv=tuple(spec.argv),
        env=env,
        output=fds[0],
        errors=fds[-1],
        # In a session of its own it could not read a terminal.
        takes_our_stdin=has_terminal or (has_stdin and not stdin.is_terminal),
        default_signals=tuple(map(int, default_signals)),
        cpus=tuple(spec.cpus),
        group=os.getpgrp() if has_terminal else 0,
    )
    try:
        pid = guard.start(order)
    except (OSError, ValueError) as error:
        return _refusal(spec, error)
    finally:
        _close(fds)
    try:
        worker_type = TerminalWorker if has_terminal else Worker
        return worker_type(index, attempt, pid, os.pidfd_open(pid), guard)
    except OSError as error:
        os.kill(pid, signal.SIGKILL)
        guard.end([pid])
        return _refusal(spec, error)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _refusal(spec: ProcessSpec, error: OSError | ValueError) -> SpawnRefusal:
    """Explain why SPEC could not be started, better than the errno alone does."""
    program = spec.argv[0]
    if isinstance(error, ValueError):
        return SpawnRefusal(_NOT_RUNNABLE, f"{error} in its command or environment.")
    status = _NOT_FOUND if error.errno == errno.ENOENT else _NOT_RUNNABLE
    return SpawnRefusal(status, _why(program, error.errno))


def _why(program: str, number: int | None) -> str:
    """Explain the errno NUMBER with which PROGRAM could not be started."""
    match number:
        case errno.ENOENT if os.path.exists(program):
            why = _lost_interpreter(program)
        case errno.ENOENT:
            why = f"there is no program {program}."
        case errno.EACCES if shut := _closed_way(program):
            why = shut
        case errno.EACCES:
            why = f"{program} may not be executed: try chmod +x, or look for a noexec mount."
        case errno.ENOEXEC:
            why = f"{program} is not a program: a script needs a first line such as #!/bin/sh."
        case errno.E2BIG:
            why = "its command and environment exceed the system's limit."
        case errno.EAGAIN:
            why = "no more processes are allowed (ulimit -u, or the pids limit of the container)."
        case errno.ECANCELED:
            why = "the guard, which was about to start it, was killed."
        case errno.EMFILE | errno.ENFILE:
            why = "no more files may be open (ulimit -n)."
        case _:
            why = f"{program}: {os.strerror(number or 0)}."
    return why


def _lost_interpreter(program: str) -> str:
    """Explain why the kernel finds no interpreter of PROGRAM."""
    with suppress(OSError), open(program, "rb") as file:
        if file.readline(_LONGEST_LINE).endswith(b"\r\n"):
            return (
                f"the first line of {program} ends in a carriage return, as lines of Windows do: "
                f"run `sed -i 's/\\r$//' {program}`."
            )
    return f"the interpreter named in the first line of {program} does not exist."


def _closed_way(program: str) -> str:
    """Name the folder that keeps this user from PROGRAM or its interpreter; empty if none does."""
    names = [program]
    with suppress(OSError), open(program, "rb") as file:
        line = file.readline(_LONGEST_LINE)
        if line.startswith(b"#!") and line[2:].split():
            names.append(os.fsdecode(line[2:].split()[0]))
    for name in names:
        shut = closed(name)
        if shut is not None:
            return f"{name} cannot be reached: this user may not enter the folder {shut}."
    return ""
