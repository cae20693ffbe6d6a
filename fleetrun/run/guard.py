"""A small process that ends the job when the launcher dies without a word (`kill -9`).

It is forked before the first worker (0.4 ms) and sleeps on a pipe that only the launcher can
write to. When that pipe ends it kills, until none is left, every process that carries the job's
marker in its environment, belongs to a session of the job, or descends from such a one.
"""

# pathlib costs start-up time.
# ruff: noqa: PTH208

import os
import select
import signal
import time
from typing import NamedTuple

from fleetrun.run import libc

# A process that does not die waits for a device; the guard shall not wait for ever with it.
_SECONDS = 30.0
_PAUSE_MS = 5


class Guard:
    """The launcher's end of it."""

    def __init__(self, marker: str) -> None:
        read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        # A signal in between would be seen by both through the launcher's wake-up descriptor.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self.pid = os.fork()
        if self.pid == 0:
            _be_guard(read_fd, os.fsencode(marker))
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(read_fd)
        self._ended = False

    def note(self, pid: int) -> None:
        """Remember the session that PID leads."""
        self._write(b"+%d\n" % pid)

    def forget(self, pid: int) -> None:
        """PID was reaped: its number may belong to a stranger soon."""
        self._write(b"-%d\n" % pid)

    def dismiss(self) -> None:
        """Let it go: the job is over."""
        if not self.has_ended():
            # Not reaped yet, so the id is its own even if somebody else kills it just now.
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._write_fd)

    def has_ended(self) -> bool:
        """Whether somebody killed it; the job goes on without."""
        if not self._ended:
            self._ended = os.waitpid(self.pid, os.WNOHANG)[0] != 0
        return self._ended

    def _write(self, line: bytes) -> None:
        try:
            os.write(self._write_fd, line)
        except BlockingIOError:
            # Thousands of workers fill the pipe; the marker finds the rest.
            return
        except BrokenPipeError:
            # Somebody killed the guard.
            return


def _be_guard(read_fd: int, marker: bytes) -> None:
    """Be the guard; never return into the launcher's code."""
    try:
        os.setsid()
        for one in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
            signal.signal(one, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        # `pkill -9 -f fleetrun`, or -f train.py, shall find the launcher and not us.
        libc.prctl(libc.PR_SET_NAME, b"rank-guard")
        libc.set_command(b"rank-guard of %d" % os.getppid())
        # Whoever reads the launcher's output shall see its end when the launcher ends.
        os.closerange(0, read_fd)
        os.closerange(read_fd + 1, os.sysconf("SC_OPEN_MAX"))
        os.chdir("/")
        # Without POLLIN: notes pile up in the pipe unread, and only its end wakes us.
        pipe = select.poll()
        pipe.register(read_fd, 0)
        pipe.poll()
        hunt(marker, sessions(_read_all(read_fd)), _SECONDS)
    finally:
        os._exit(0)


def _read_all(fd: int) -> bytes:
    parts = []
    while part := os.read(fd, 65536):
        parts.append(part)
    return b"".join(parts)


def sessions(notes: bytes) -> frozenset[int]:
    r"""Return the sessions noted and not forgotten.

    >>> sorted(sessions(b"+7\n+8\n-7\n+9\n"))
    [8, 9]
    """
    found: set[int] = set()
    for line in notes.split():
        pid = int(line[1:])
        if line[:1] == b"+":
            found.add(pid)
        else:
            found.discard(pid)
    return frozenset(found)


class Process(NamedTuple):
    """What /proc says of one process."""

    pid: int
    parent: int
    group: int
    session: int
    started: int
    is_marked: bool


def doomed(
    processes: list[Process], leaders: frozenset[int], spare: frozenset[int]
) -> list[Process]:
    """Return the processes of the job: marked, in a session of LEADERS, or born of such."""
    found = {p.pid: p for p in processes if p.is_marked or p.session in leaders}
    grown = True
    while grown:
        more = {p.pid: p for p in processes if p.parent in found and p.pid not in found}
        found |= more
        grown = bool(more)
    return [process for pid, process in found.items() if pid not in spare]


def hunt(marker: bytes, leaders: frozenset[int], seconds: float) -> bool:
    """Kill every process of the job until none is left; say whether that came true."""
    deadline = time.monotonic() + seconds
    spare = frozenset((os.getpid(),))
    pause = select.poll()
    while time.monotonic() < deadline:
        targets = doomed(_look_around(marker), leaders, spare)
        if not targets:
            return True
        for process in targets:
            _kill(process)
        pause.poll(_PAUSE_MS)
    return False


def _look_around(marker: bytes) -> list[Process]:
    """Read every living process from /proc, and kill those with the marker at once.

    The newest come first: a process that forks and exits all the time (a "hopper") has a new
    number by the time that older ones are read.
    """
    # Who dies with its group before it is read was somebody's parent, and its children are
    # nobody's by then.
    before = [one for pid in _pids() if (one := _read_process(pid, b"")) is not None]
    seen = []
    for pid in _pids():
        process = _read_process(pid, marker)
        if process is not None:
            seen.append(process)
            if process.is_marked:
                _kill_group(process)
    groups = {process.group for process in seen if process.is_marked}
    return [*seen, *(one._replace(is_marked=one.group in groups) for one in before)]


def _pids() -> list[int]:
    """Return all processes, the newest first, as far as numbers tell."""
    return sorted((int(name) for name in os.listdir("/proc") if name.isdigit()), reverse=True)


def _kill_group(process: Process) -> None:
    """Kill the process group of a marked process: a fork cannot get away from that.

    The group is the job's own, as ranks lead sessions of theirs and groups never span sessions.
    """
    if process.group not in {0, os.getpgrp()}:
        try:
            os.killpg(process.group, signal.SIGKILL)
        except OSError:
            # Gone already, or only a set-user-id program is left.
            return


def _read_process(pid: int, marker: bytes) -> Process | None:
    """Return how PID is, without a look for a MARKER that is empty; None when it is no more."""
    stat = _content(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    if not stat or stat[0] in b"ZX":
        return None
    environ = b"\0" + _content(f"/proc/{pid}/environ") if marker else b""
    return Process(
        pid=pid,
        parent=int(stat[1]),
        group=int(stat[2]),
        session=int(stat[3]),
        started=int(stat[19]),
        is_marked=b"\0" + marker + b"\0" in environ,
    )


def _content(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return _read_all(fd)
    except OSError:
        return b""
    finally:
        os.close(fd)


def _kill(process: Process) -> None:
    """Kill exactly the process that was seen, not a later one with its number."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:
        return
    try:
        now = _read_process(process.pid, b"")
        if now is not None and now.started == process.started:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        return
    finally:
        os.close(pidfd)
