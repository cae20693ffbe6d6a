"""What the kernel's inet_diag tells of TCP: bytes of connections, and those that are not made."""

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
# Where in `struct inet_diag_msg` the other end's port and address, and the inode are, and where its
# attributes begin.
_PORT_AT, _ADDRESS_AT, _INODE_AT, _ATTRIBUTES_AT = 6, 24, 68, 72
_INODE = struct.Struct("=I")
_ATTRIBUTE = struct.Struct("=HH")
# The attribute that is a `struct tcp_info`, and where in it tcpi_bytes_acked and
# tcpi_bytes_received are (Linux 4.1).
_INFO = 2
_BYTES_AT = 120
_BYTES = struct.Struct("=QQ")
# All states but LISTEN (10), TIME_WAIT (6) and those of connections that are being made.
_STATES = sum(1 << state for state in (1, 4, 5, 8, 9, 11))
_SYN_SENT = 2
_ANSWER_S = 2.0
# Of processes with very many open files the first are enough.
_MOST_FILES = 16384


def traffic() -> dict[int, int]:
    """Return the bytes sent and received by each TCP connection of this host, by its inode.

    Raises OSError without inet_diag: a seccomp filter, or not Linux's own kernel.
    """
    messages = _dump(_STATES, 1 << (_INFO - 1))
    return dict(pair for _, message in messages for pair in _connection(message))


def connecting() -> dict[int, str]:
    """Return where connections are being made to that nobody answers, by inode: `10.0.0.1:6070`.

    Raises OSError where neither inet_diag nor /proc tells.
    """
    import socket

    try:
        messages = _dump(1 << _SYN_SENT, 0)
    except OSError:
        return _connecting_by_files()
    found: dict[int, str] = {}
    for family, message in messages:
        (inode,) = _INODE.unpack_from(message, _INODE_AT)
        size = 4 if family == socket.AF_INET else 16
        address = socket.inet_ntop(family, message[_ADDRESS_AT : _ADDRESS_AT + size])
        found[inode] = _endpoint(address, int.from_bytes(message[_PORT_AT : _PORT_AT + 2], "big"))
    return found


def _connecting_by_files(root: str = "/") -> dict[int, str]:
    """Return the same from /proc, for where netlink is denied."""
    import socket

    found: dict[int, str] = {}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        try:
            with open(os.path.join(root, "proc/net", name), encoding="ascii") as file:
                lines = file.read().splitlines()[1:]
        except FileNotFoundError:
            continue
        for words in map(str.split, lines):
            if int(words[3], 16) == _SYN_SENT:
                digits, _, port = words[2].partition(":")
                # Each four bytes are a number of this machine.
                parts = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
                packed = struct.pack(f"={len(parts)}I", *parts)
                address = socket.inet_ntop(family, packed)
                found[int(words[9])] = _endpoint(address, int(port, 16))
    return found


def _endpoint(address: str, port: int) -> str:
    """Return ADDRESS:PORT; IPv4 as such, even on a socket for both.

    >>> _endpoint("::ffff:10.0.0.1", 80), _endpoint("fd00::1", 80)
    ('10.0.0.1:80', '[fd00::1]:80')
    """
    if address.startswith("::ffff:") and "." in address:
        address = address[7:]
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _dump(states: int, extensions: int) -> list[tuple[int, bytes]]:
    """Return the family and what the kernel says of each TCP socket that is in one of STATES."""
    import socket  # only a rank that shows no life is asked for it

    found: list[tuple[int, bytes]] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as link:
        # The kernel answers at once; whatever stands in for it may not.
        link.settimeout(_ANSWER_S)
        for family in (socket.AF_INET, socket.AF_INET6):
            body = _REQUEST.pack(family, socket.IPPROTO_TCP, extensions, states)
            head = _HEADER.pack(
                _HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, family, 0
            )
            link.sendto(head + body, (0, 0))
            try:
                found += [(family, message) for message in _answers(link.recv)]
            except FileNotFoundError:
                # A kernel without IPv6 knows nothing of its connections.
                if family == socket.AF_INET:
                    raise
    return found


def _answers(receive: Callable[[int], bytes]) -> Iterator[bytes]:
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
            yield message


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
