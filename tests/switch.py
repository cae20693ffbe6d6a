"""A switch between hosts that can be bad on purpose: it delays, loses and cuts what it passes on.

Usage: switch.py ADDRESS/BITS@PID...  Each host is named by a process in its network namespace; it
gets an interface eth0 with that address. Orders come as lines on standard input: `delay MS`,
`loss PERCENT`, `slow INDEX` (only what that host sends is delayed), `cut INDEX`, `heal INDEX`. Each
is answered by a line, the first one is `ready`.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time
from contextlib import suppress

# From linux/sched.h, linux/if_tun.h and linux/if.h.
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_LONGEST_FRAME = 65536
# Of one host at a time, so that none waits for another's flood.
_MOST_FRAMES = 64


class Switch:
    """Passes frames on between PORTS, descriptors of the hosts' interfaces."""

    def __init__(self, ports: list[int], draw: random.Random) -> None:
        self._ports = ports
        self._draw = draw
        self._delay_s = 0.0
        self._loss = 0.0
        self._cut: set[int] = set()
        # If any, the only ones whose frames are delayed.
        self._slow: set[int] = set()
        # At which port an address was seen last.
        self._known: dict[bytes, int] = {}
        # What is under way: when it arrives, a number that keeps the order, where, and what.
        self._queue: list[tuple[float, int, int, bytes]] = []
        self._count = 0

    def obey(self, line: str) -> None:
        """Do what LINE says; ValueError where it is no order."""
        word, value = line.split()
        if word == "delay":
            self._delay_s = float(value) / 1000
        elif word == "loss":
            self._loss = float(value) / 100
        elif word == "slow":
            self._slow.add(self._ports[int(value)])
        elif word == "cut":
            self._cut.add(self._ports[int(value)])
        elif word == "heal":
            self._cut.discard(self._ports[int(value)])
        else:
            raise ValueError(line)

    def take(self, port: int) -> None:
        """Take what has come from PORT."""
        for _ in range(_MOST_FRAMES):
            try:
                frame = os.read(port, _LONGEST_FRAME)
            except OSError:
                return
            self._known[frame[6:12]] = port
            known = self._known.get(frame[:6])
            for target in self._ports if known is None else [known]:
                if target != port and not self._is_lost(port, target):
                    self._count += 1
                    is_slow = not self._slow or port in self._slow
                    at = time.monotonic() + self._delay_s * is_slow
                    heapq.heappush(self._queue, (at, self._count, target, frame))

    def _is_lost(self, port: int, target: int) -> bool:
        return bool({port, target} & self._cut) or self._draw.random() < self._loss

    def deliver(self) -> float | None:
        """Deliver what is due; return the milliseconds until more is."""
        while self._queue and self._queue[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(self._queue)
            # A host that is gone has no interface.
            with suppress(OSError):
                os.write(target, frame)
        return max(0.0, self._queue[0][0] - time.monotonic()) * 1000 if self._queue else None


def plug(pid: int, address: str) -> int:
    """Give the host of PID an interface with ADDRESS; return the switch's end of its cable."""
    libc = ctypes.CDLL(None, use_errno=True)
    home, there = (os.open(f"/proc/{process}/ns/net", os.O_RDONLY) for process in ("self", pid))
    if libc.setns(there, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    port = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(port, _TUNSETIFF, struct.pack("16sH", b"eth0", _IFF_TAP | _IFF_NO_PI))
    lines = f"link set lo up\naddr add {address} dev eth0\nlink set eth0 up\n"
    subprocess.run(["ip", "-batch", "-"], input=lines, text=True, check=True)
    if libc.setns(home, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(home)
    os.close(there)
    return port


def main() -> None:
    """Be a switch until standard input ends."""
    ports = []
    for word in sys.argv[1:]:
        address, _, pid = word.partition("@")
        ports.append(plug(int(pid), address))
    switch = Switch(ports, random.Random(0))
    poll = select.poll()
    for fd in (0, *ports):
        poll.register(fd, select.POLLIN)
    print("ready", flush=True)
    while True:
        for fd, _ in poll.poll(switch.deliver()):
            if fd:
                switch.take(fd)
                continue
            line = sys.stdin.readline()
            if not line:
                return
            switch.obey(line)
            print("done", flush=True)


if __name__ == "__main__":
    main()
