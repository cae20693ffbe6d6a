"""A rank for scripts/chaos: numbered lines, children of every kind, and orders from a pipe.

Usage: chaos_worker.py FOLDER TRAITS... with one word of traits, joined by +, for each rank. The
folder's name is unique and stays in every command line, so that whoever is left can be found.
"""

# A worker imports little and starts fast.
# ruff: noqa: PTH118, S606

import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress

folder, *traits_of = sys.argv[1:]
rank = int(os.environ["PADDLE_TRAINER_ID"])
traits = traits_of[rank].split("+")
POLITE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> None:
    """Have children, say that we are ready, and do as we are told."""
    orders = os.open(place("orders"), os.O_RDWR)
    if "deaf" in traits:
        for signum in POLITE:
            signal.signal(signum, signal.SIG_IGN)
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    for signum in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, lambda number, _: note("signals", f"{os.getpid()} {number}\n"))
    children = [child() for name, child in CHILDREN.items() if name in traits]
    if "saver" in traits:
        for signum in POLITE:
            signal.signal(signum, save)
    lines = 5000 if "chatty" in traits else 20
    for number in range(lines):
        say(f"rank {rank} line {number}\n")
    note("ready", f"{' '.join(map(str, (os.getpid(), *children)))}\n")
    # A signal that comes just before a wait would not end it, but for this pipe.
    while orders not in select.select([orders, woken], [], [])[0]:
        os.read(woken, 100)
    word, _, value = os.read(orders, 100).decode().partition(" ")
    if word == "raise":
        raise ValueError(value)
    # Not through the interpreter's end, which would wait for a full disk.
    os._exit(int(value))


def place(name: str) -> str:
    """Return the path of this rank's own NAME."""
    return os.path.join(folder, f"{name}.{rank}")


def note(name: str, text: str) -> None:
    """Append TEXT in one piece."""
    fd = os.open(place(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, text.encode())
    os.close(fd)


def say(text: str) -> None:
    """Write a line to standard output, as training does that cares for no log."""
    with suppress(OSError):
        os.write(1, text.encode())


def save(*_: object) -> None:
    """Save a checkpoint when asked to stop."""
    note("saved", f"{time.monotonic()}\n")
    os._exit(0)


def born(live: Callable[[], None]) -> int:
    """Let a child LIVE, and return its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            live()
        finally:
            os._exit(1)
    return pid


def wait_for_ever() -> None:
    """Do nothing."""
    while True:
        time.sleep(3600)


def escape() -> None:
    """Live in a session of our own, as a daemon does."""
    os.setsid()
    wait_for_ever()


def forget() -> None:
    """Live in a session of our own and with an empty environment."""
    os.setsid()
    os.execve("/bin/sleep", [f"sleep-{folder}", "3600"], {})


def pass_on() -> None:
    """Be somebody else every few milliseconds."""
    os.setsid()
    while True:
        time.sleep(0.01)
        if os.fork():
            os._exit(0)


def twice(live: Callable[[], None]) -> int:
    """Let a grandchild LIVE whose parent is gone."""
    reader, writer = os.pipe()

    def part() -> None:
        os.write(writer, b"%d" % born(live))
        os._exit(0)

    os.waitpid(born(part), 0)
    pid = int(os.read(reader, 20))
    os.close(reader)
    os.close(writer)
    return pid


CHILDREN: dict[str, Callable[[], int]] = {
    "child": lambda: born(wait_for_ever),
    "daemon": lambda: twice(escape),
    "bare": lambda: born(forget),
    # Nothing but its parent's parent shows to whom this one belongs.
    "lost": lambda: twice(forget),
    "potato": lambda: born(pass_on),
}


if __name__ == "__main__":
    main()
