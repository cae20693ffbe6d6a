"""Read /proc: cheaply, and without errors for processes that have gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from fleetrun.rundir import secrets

# The system call numbers of read, and of select and pselect6, in which readline waits.
_READS = {"x86_64": (b"0",), "aarch64": (b"63",)}.get(os.uname().machine, ())
_SELECTS = {"x86_64": (b"23", b"270"), "aarch64": (b"72",)}.get(os.uname().machine, ())
_TICKS = os.sysconf("SC_CLK_TCK")


class Stat(NamedTuple):
    """A line of /proc/PID/stat; `state` is a letter, `cpu_s` includes reaped children."""

    pid: int
    state: str
    parent: int
    session: int
    cpu_s: float
    started: int
    group: int = 0
    threads: int = 0
    resident_pages: int = 0


def content(path: str) -> bytes:
    """Return the content of the file PATH; nothing if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.readall()
    except OSError:
        return b""


def counts(path: str) -> dict[str, int]:
    """Return the numbers in a file of lines `NAME NUMBER`."""
    pairs = (line.split() for line in content(path).decode().splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if pair[1:] and pair[1].isdigit()}


def cgroups(root: str = "/") -> Iterator[str]:
    """Yield the folders of our cgroups, in versions 1 and 2, innermost first, as far as visible."""
    base = os.path.join(root, "sys/fs/cgroup")
    own = content(os.path.join(root, "proc/self/cgroup")).decode(errors="replace")
    for line in own.splitlines():
        kinds, path = line.split(":", 2)[1:]
        tops = [os.path.join(base, kinds)] if kinds else [base, os.path.join(base, "unified")]
        for top in tops:
            inner = path.strip("/")
            # In a container the path may be that outside; then the top is ours.
            while inner:
                yield os.path.join(top, inner)
                inner = os.path.dirname(inner)
            yield top


def rows(pid: int | str, name: str) -> dict[str, str]:
    """Return the lines `KEY: VALUE` of /proc/PID/NAME; none of a process that we may not read."""
    lines = content(f"/proc/{pid}/{name}").decode(errors="replace").splitlines()
    pairs = (line.partition(":") for line in lines)
    return {key: value.strip() for key, colon, value in pairs if colon}


def open_files(pid: int) -> Iterator[tuple[str, str]]:
    """Yield the path in /proc of each descriptor of PID, and its target, as far as we may."""
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{fd}"
            # It may have been closed just now.
            with suppress(OSError):
                yield path, os.readlink(path)


def state_of(pid: int) -> str:
    """Describe the state of process PID, and where in the kernel it waits if readable."""
    status = stat(pid)
    if status is None:
        return "gone"
    # The file holds "0" for a process that does not wait, or without permission.
    wchan = content(f"/proc/{pid}/wchan").decode(errors="replace").strip("0\n")
    return f"state {status.state}" + (f", in the kernel's {wchan}" if wchan else "")


def fields(pid: int | str) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the third, the state, on; none if it is gone."""
    # The name in parentheses may contain anything, even parentheses.
    return content(f"/proc/{pid}/stat").rpartition(b")")[2].split()


def stat(pid: int | str) -> Stat | None:
    """Return the status of process PID; None if it has ended."""
    words = fields(pid)
    if not words or words[0] in b"ZX":
        return None
    return Stat(
        pid=int(pid),
        state=words[0].decode(),
        parent=int(words[1]),
        session=int(words[3]),
        cpu_s=sum(map(int, words[11:15])) / _TICKS,
        started=int(words[19]),
        group=int(words[2]),
        threads=int(words[17]),
        resident_pages=int(words[21]),
    )


def pids() -> list[int]:
    """Return the ids of all processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def all_processes() -> list[Stat]:
    """Return every living process of this host, highest ids first: usually the newest."""
    stats = map(stat, sorted(pids(), reverse=True))
    return [process for process in stats if process is not None]


def families(processes: Iterable[Stat], leaders: Iterable[int]) -> dict[int, list[Stat]]:
    """Return for each of LEADERS the members of its session and their descendants, oldest first.

    >>> family = families([Stat(7, "S", 1, 7, 0, 0), Stat(9, "S", 7, 9, 0, 0)], [7])
    >>> [process.pid for process in family[7]]
    [7, 9]
    """
    members: dict[int, list[Stat]] = {leader: [] for leader in leaders}
    leader_of: dict[int, int] = {}
    for process in sorted(processes, key=lambda process: (process.started, process.pid)):
        # The process that reads the terminal leads no session.
        for leader in (process.pid, process.session, leader_of.get(process.parent)):
            if leader in members:
                leader_of[process.pid] = leader
                members[leader].append(process)
                break
    return members


def send(process: Stat, signum: int) -> None:
    """Send SIGNUM to PROCESS, and to no later one with its id; raises OSError."""
    pidfd = os.pidfd_open(process.pid)
    try:
        current = stat(process.pid)
        if current is not None and current.started == process.started:
            signal.pidfd_send_signal(pidfd, signum)
    finally:
        os.close(pidfd)


def io(pid: int) -> tuple[int, int] | None:
    """Return how many bytes PID has written to and read from disks; None without permission."""
    counters = rows(pid, "io")
    return (int(counters["write_bytes"]), int(counters["read_bytes"])) if counters else None


def reads_terminal(pid: int) -> bool:
    """Whether the main thread of PID waits for input from a terminal; False without permission."""
    syscall, _, arguments_ = content(f"/proc/{pid}/syscall").partition(b" ")
    if syscall not in (*_READS, *_SELECTS):
        return False
    # The descriptor, or one more than the highest of those.
    fd = int(arguments_.split()[0], 16) - (syscall in _SELECTS)
    with suppress(OSError):
        path = os.readlink(f"/proc/{pid}/fd/{fd}")
        return path.startswith(("/dev/pts/", "/dev/tty", "/dev/console"))
    return False


def catches(pid: int, signum: int) -> bool:
    """Whether PID has a handler for SIGNUM; without one, a real-time signal ends it."""
    return bool(int(rows(pid, "status").get("SigCgt", "0"), 16) >> (signum - 1) & 1)


def command(pid: int) -> str:
    """Return PID's command line without secrets; empty if it has ended."""
    line = content(f"/proc/{pid}/cmdline").rstrip(b"\0").decode(errors="replace")
    return " ".join(secrets.conceal(line.split("\0"))) if line else ""


def is_python(pid: int) -> bool:
    """Whether PID is a Python interpreter."""
    with suppress(OSError):
        return "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    return False
