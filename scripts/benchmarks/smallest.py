"""The smallest launcher in Python that has a guard: what no launcher like fleetrun can be below.

    python smallest.py RANKS SCRIPT

It parses nothing, plans nothing and writes nothing. A forked guard starts each rank in a session of
its own, its output in a file, and reaps it when asked; the launcher waits for the ranks' ends.
"""

import _socket  # as fleetrun's guard does; `socket` takes longer
import os
import select
import sys


def _guard(orders: _socket.socket, ranks: int, script: str) -> None:
    os.setsid()
    for rank in range(ranks):
        log = os.open(f"workerlog.{rank}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-u", script],
            {**os.environ, "PADDLE_TRAINER_ID": str(rank)},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, log, 1),
                (os.POSIX_SPAWN_DUP2, log, 2),
            ],
            setsid=True,
        )
        os.close(log)
        orders.send(b"%8d" % pid)
    while orders.recv(1):
        os.wait()
        orders.send(b"%8d" % 0)


def main(ranks: int, script: str) -> None:
    """Start RANKS of SCRIPT, and end when they have ended."""
    launcher, guard = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
    if os.fork() == 0:
        launcher.close()
        _guard(guard, ranks, script)
        os._exit(0)
    guard.close()
    poll = select.epoll()
    for _ in range(ranks):
        poll.register(os.pidfd_open(int(launcher.recv(8))), select.EPOLLIN)
    while ranks:
        for fd, _ in poll.poll():
            os.close(fd)
            launcher.send(b"r")
            launcher.recv(8)
            ranks -= 1
    os._exit(0)


main(int(sys.argv[1]), sys.argv[2])
