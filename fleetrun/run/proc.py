"""Reading other processes: what /proc says of them, cheaply and without ever failing."""

# pathlib costs start-up time.
# ruff: noqa: PTH110, PTH115, PTH119, PTH208

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

# The numbers of read, and of select and pselect6, which readline waits in.
_READS = {"x86_64": (b"0",), "aarch64": (b"63",)}.get(os.uname().machine, ())
_SELECTS = {"x86_64": (b"23", b"270"), "aarch64": (b"72",)}.get(os.uname().machine, ())
_TICKS = os.sysconf("SC_CLK_TCK")


class Stat(NamedTuple):
    """One line of /proc/PID/stat: `state` is its letter, `cpu_s` all time it has had a processor.

    That of children that have ended, and were waited for, is part of it.
    """

    pid: int
    state: str
    parent: int
    session: int
    cpu_s: float
    started: int
    group: int = 0


def content(path: str) -> bytes:
    """Return what is in the file PATH; nothing if it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        whole = part = os.read(fd, 65536)
        while len(part) == 65536:  # noqa: PLR2004 - the same as above
            part = os.read(fd, 65536)
            whole += part
    except OSError:
        return b""
    else:
        return whole
    finally:
        os.close(fd)


def trouble() -> str:
    """Say why /proc does not show us the processes that we start; nothing if it does.

    One of another PID namespace has other numbers for ours, and ours for others.
    """
    status = content("/proc/self/status")
    numbers = [line.split()[1:] for line in status.splitlines() if line.startswith(b"NSpid:")]
    # Kernels before 4.1 do not tell.
    if status and (not numbers or len(numbers[0]) == 1) and _is_self(b"%d" % os.getpid()):
        return ""
    if status or os.path.exists("/proc/version"):
        return "/proc shows the processes of another PID namespace, and would mislead fleetrun"
    return "no /proc is mounted, without which fleetrun cannot see its processes"


def _is_self(number: bytes) -> bool:
    try:
        return os.readlink(b"/proc/self") == number
    except OSError:
        return False


def standing(pid: int) -> str:
    """Say in what state process PID is, and where in the kernel it waits if that can be read."""
    one = stat(pid)
    if one is None:
        return "gone"
    # The file holds "0" for one that waits nowhere, or to those who may not know.
    wchan = content(f"/proc/{pid}/wchan").decode(errors="replace").strip("0\n")
    return f"state {one.state}" + (f", in the kernel's {wchan}" if wchan else "")


def fields(pid: int | str) -> list[bytes]:
    """Return the words of /proc/PID/stat behind the name, of a zombie too; nothing if it is gone.

    The first is the state, which `proc(5)` counts as the third.
    """
    # The name in brackets may hold anything, a bracket too.
    return content(f"/proc/{pid}/stat").rpartition(b")")[2].split()


def stat(pid: int | str) -> Stat | None:
    """Return how process PID is; None when it is no more."""
    return parsed(pid, fields(pid))


def parsed(pid: int | str, words: list[bytes]) -> Stat | None:
    """Return how process PID is by its WORDS, as `fields` has them; None when it is no more."""
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
    )


def pids() -> list[int]:
    """Return the numbers of all processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def everybody() -> list[Stat]:
    """Return every living process of this host."""
    seen = (stat(pid) for pid in pids())
    return [one for one in seen if one is not None]


def families(processes: Iterable[Stat], leaders: Iterable[int]) -> dict[int, list[Stat]]:
    """Return, for each of LEADERS, the members of its session and what descends from them.

    >>> family = families([Stat(7, "S", 1, 7, 0, 0), Stat(9, "S", 7, 9, 0, 0)], [7])
    >>> [one.pid for one in family[7]]
    [7, 9]
    """
    by_pid = {one.pid: one for one in processes}
    found: dict[int, list[Stat]] = {leader: [] for leader in leaders}
    home: dict[int, int | None] = {}

    def home_of(one: Stat) -> int | None:
        trail: list[int] = []
        here: Stat | None = one
        while here is not None and here.pid not in home:
            # A race may have made a ring of parents.
            # Who reads the terminal leads no session of its own.
            leader = here.pid if here.pid in found else here.session
            home[here.pid] = leader if leader in found else None
            trail.append(here.pid)
            if home[here.pid] is None:
                here = by_pid.get(here.parent)
            else:
                break
        end = None if here is None else home[here.pid]
        home.update(dict.fromkeys(trail, end))
        return end

    for one in by_pid.values():
        its_home = home_of(one)
        if its_home is not None:
            found[its_home].append(one)
    return found


def written(pid: int) -> int:
    """Return how many bytes PID has sent to disks; 0 when we may not know."""
    for line in content(f"/proc/{pid}/io").splitlines():
        if line.startswith(b"write_bytes:"):
            return int(line.split()[1])
    return 0


def reads_terminal(pid: int) -> bool:
    """Whether the main thread of PID waits for what is typed at a terminal, if we may know."""
    called, _, rest = content(f"/proc/{pid}/syscall").partition(b" ")
    if called not in (*_READS, *_SELECTS):
        return False
    # The descriptor, or one more than the highest of those.
    fd = int(rest.split()[0], 16) - (called in _SELECTS)
    try:
        path = os.readlink(f"/proc/{pid}/fd/{fd}")
    except OSError:
        return False
    return path.startswith(("/dev/pts/", "/dev/tty", "/dev/console"))


def catches(pid: int, signum: int) -> bool:
    """Whether PID has a handler for SIGNUM; a real-time signal ends those that have none."""
    for line in content(f"/proc/{pid}/status").splitlines():
        if line.startswith(b"SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False


def words(pid: int) -> tuple[str, ...]:
    """Return the words of PID's command line; none of a process that has ended."""
    line = content(f"/proc/{pid}/cmdline").rstrip(b"\0").decode(errors="replace")
    return tuple(line.split("\0")) if line else ()


def command(pid: int) -> str:
    """Return PID's command line without secrets."""
    from fleetrun.plan import arguments  # noqa: PLC0415 - rare

    words = content(f"/proc/{pid}/cmdline").rstrip(b"\0").decode(errors="replace").split("\0")
    return " ".join(arguments.conceal(words)[0])


def is_python(pid: int) -> bool:
    """Whether PID is a Python interpreter."""
    try:
        return "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return False


def descriptor(pid: int, name: str) -> str | None:
    """Return the path of PID's open file whose name has NAME in it."""
    folder = f"/proc/{pid}/fd"
    try:
        for fd in os.listdir(folder):
            if name in os.readlink(f"{folder}/{fd}"):
                return f"{folder}/{fd}"
    except OSError:
        # It ended, or closed a file just now.
        return None
    return None
