"""The bytes sent and received by the TCP connections of processes, from the kernel's inet_diag."""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# From linux/netlink.h, linux/sock_diag.h and linux/inet_diag.h.
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST_DUMP = 0x301
_ERROR, _DONE = 2, 3
_HEADER = struct.Struct("=IHHII")
# Family, protocol, extensions, padding, states; then an identity, of which nothing is asked.
_REQUEST = struct.Struct("=BBBxI48x")
# Where in `struct inet_diag_msg` the inode is, and where its attributes begin.
_INODE_AT, _ATTRIBUTES_AT = 68, 72
_INODE = struct.Struct("=I")
_ATTRIBUTE = struct.Struct("=HH")
# The attribute that is a `struct tcp_info`, and where in it tcpi_bytes_acked and
# tcpi_bytes_received are (Linux 4.1).
_INFO = 2
_BYTES_AT = 120
_BYTES = struct.Struct("=QQ")
# All states but LISTEN (10), TIME_WAIT (6) and those of connections that are being made.
_STATES = sum(1 << state for state in (1, 4, 5, 8, 9, 11))
_ANSWER_S = 2.0
# Of processes with very many open files the first are enough.
_MOST_FILES = 16384


def traffic() -> dict[int, int]:
    """Return the bytes sent and received by each TCP connection of this host, by its inode.

    Raises OSError without inet_diag: a seccomp filter, or not Linux's own kernel.
    """
    import socket  # only a rank that shows no life is asked for it

    found: dict[int, int] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as link:
        # The kernel answers at once; whatever stands in for it may not.
        link.settimeout(_ANSWER_S)
        for family in (socket.AF_INET, socket.AF_INET6):
            body = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _STATES)
            head = _HEADER.pack(
                _HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, family, 0
            )
            link.sendto(head + body, (0, 0))
            try:
                found.update(_answers(link.recv))
            except FileNotFoundError:
                # A kernel without IPv6 knows nothing of its connections.
                if family == socket.AF_INET:
                    raise
    return found


def _answers(receive: Callable[[int], bytes]) -> Iterator[tuple[int, int]]:
    while True:
        answer = receive(65536)
        if not answer:
            return
        while len(answer) >= _HEADER.size:
            length, kind, *_ = _HEADER.unpack_from(answer)
            message, answer = (
                answer[_HEADER.size : length],
                answer[max(_padded(length), _HEADER.size) :],
            )
            if kind == _DONE:
                return
            if kind == _ERROR:
                (number,) = struct.unpack_from("=i", message)
                raise OSError(-number, os.strerror(-number))
            yield from _connection(message)


def _connection(message: bytes) -> Iterator[tuple[int, int]]:
    (inode,) = _INODE.unpack_from(message, _INODE_AT)
    attributes = message[_ATTRIBUTES_AT:]
    while len(attributes) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(attributes)
        if kind == _INFO and length >= _ATTRIBUTE.size + _BYTES_AT + _BYTES.size:
            yield inode, sum(_BYTES.unpack_from(attributes, _ATTRIBUTE.size + _BYTES_AT))
        attributes = attributes[max(_padded(length), _ATTRIBUTE.size) :]


def _padded(length: int) -> int:
    return (length + 3) & ~3


def inodes(pids: Iterable[int]) -> set[int]:
    """Return the inodes of all sockets that processes PIDS have open."""
    found = set()
    left = _MOST_FILES
    for pid in pids:
        folder = f"/proc/{pid}/fd"
        try:
            names = os.listdir(folder)[:left]
        except OSError:
            # It has ended, or belongs to another user.
            continue
        left -= len(names)
        for name in names:
            try:
                target = os.readlink(f"{folder}/{name}")
            except OSError:
                continue
            if target.startswith("socket:["):
                found.add(int(target[8:-1]))
    return found
