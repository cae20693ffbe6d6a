"""TCP connections: their bytes, speed and loss by inet_diag, and those being made by /proc."""

from __future__ import annotations

import math
import struct
import sys
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

from fleetrun.probe import netlink
from fleetrun.run import proc
from fleetrun.run.tcpconnect import plain_address

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# From linux/netlink.h, linux/sock_diag.h and linux/inet_diag.h.
_SOCK_DIAG, _BY_FAMILY = 4, 20
# Family, protocol, extensions, padding, states; then an identity, of which nothing is asked.
_REQUEST = struct.Struct("=BBBxI48x")
# Offsets in `struct inet_diag_msg`: both ends' addresses, the inode, and the first attribute.
_OWN_AT, _ADDRESS_AT, _INODE_AT, _ATTRIBUTES_AT = 8, 24, 68, 72
_INODE = struct.Struct("=I")
# The attribute that is a `struct tcp_info`. In it (Linux 4.10) are tcpi_total_retrans, then both
# tcpi_bytes_acked and tcpi_bytes_received, tcpi_min_rtt (microseconds), tcpi_data_segs_out, and
# tcpi_busy_time (microseconds); since Linux 4.19 also tcpi_dsack_dups. A smoothed round trip has
# the receiver's delay in it, which grows with its own waits.
_INFO = 2
_RESENT_AT, _BYTES_AT, _RTT_AT, _SEGMENTS_AT, _BUSY_AT, _TWICE_AT = 100, 120, 148, 156, 168, 216
_BYTES = struct.Struct("=QQ")
_US = 1e6
# The kernel's word for no round trip yet.
_UNKNOWN = 0xFFFFFFFF
# All states but LISTEN (10), TIME_WAIT (6) and those of connections that are being made.
_STATES = sum(1 << state for state in (1, 4, 5, 8, 9, 11))
_SYN_SENT, _LISTEN = 2, 10
# For processes with very many open files, the first ones suffice.
_MOST_FILES = 16384


def traffic() -> dict[int, int]:
    """Return the bytes sent and received by each TCP connection of this host, by inode.

    Raises OSError without inet_diag: because of a seccomp filter, or a kernel other than Linux.
    """
    return {inode: link.acked + link.received for inode, link in _connections()}


class TcpLink(NamedTuple):
    """A TCP connection; bytes, segments and seconds count since it was made."""

    # The other host; empty: it does not leave this one.
    peer: str
    rtt_s: float
    received: int
    acked: int
    busy_s: float
    segments: int
    # Without those that the other end has received twice: it had answered late.
    resent: int


def links() -> dict[int, TcpLink]:
    """Return the established TCP connections of this host to others, by inode.

    Raises OSError without inet_diag, as `traffic` does.
    """
    return {inode: link for inode, link in _connections() if link.peer}


def connecting() -> dict[int, str]:
    """Return the endpoints of unanswered connection attempts, by inode: `10.0.0.1:6070`."""
    import socket

    endpoints: dict[int, str] = {}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for words in _rows(name, _SYN_SENT):
            digits, _, port = words[2].partition(b":")
            # Each four bytes are a number of this machine.
            parts = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
            packed = struct.pack(f"={len(parts)}I", *parts)
            address = socket.inet_ntop(family, packed)
            endpoints[int(words[9])] = _endpoint(address, int(port, 16))
    return endpoints


def listening(port: int) -> set[int]:
    """Return the inodes of the sockets that listen on PORT."""
    return {
        int(words[9])
        for name in ("tcp", "tcp6")
        for words in _rows(name, _LISTEN)
        if int(words[1].partition(b":")[2], 16) == port
    }


def _rows(name: str, state: int) -> Iterator[list[bytes]]:
    """Yield the words of each socket in STATE in /proc/net/NAME."""
    for words in map(bytes.split, proc.content(f"/proc/net/{name}").splitlines()[1:]):
        if int(words[3], 16) == state:
            yield words


def _link(family: int, message: bytes) -> Iterator[tuple[int, TcpLink]]:
    import socket

    size = 4 if family == socket.AF_INET else 16
    own, peer = (message[at : at + size] for at in (_OWN_AT, _ADDRESS_AT))
    (inode,) = _INODE.unpack_from(message, _INODE_AT)
    for kind, value in netlink.attributes(message[_ATTRIBUTES_AT:]):
        if kind == _INFO and len(value) >= _BUSY_AT + 8:

            def number(at: int, length: int = 4, value: bytes = value) -> int:
                return int.from_bytes(value[at : at + length], sys.byteorder)

            rtt_us = number(_RTT_AT)
            acked, received = _BYTES.unpack_from(value, _BYTES_AT)
            yield (
                inode,
                TcpLink(
                    peer="" if own == peer else plain_address((socket.inet_ntop(family, peer),)),
                    rtt_s=math.inf if rtt_us == _UNKNOWN else rtt_us / _US,
                    received=received,
                    acked=acked,
                    busy_s=number(_BUSY_AT, 8) / _US,
                    segments=number(_SEGMENTS_AT),
                    # Behind the end of what an older kernel tells are no bytes, which count 0.
                    resent=max(0, number(_RESENT_AT) - number(_TWICE_AT)),
                ),
            )


def _endpoint(address: str, port: int) -> str:
    """Return ADDRESS:PORT; IPv4 as such, even on a socket for both.

    >>> _endpoint("::ffff:10.0.0.1", 80), _endpoint("fd00::1", 80)
    ('10.0.0.1:80', '[fd00::1]:80')
    """
    address = plain_address((address,))
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _connections() -> Iterator[tuple[int, TcpLink]]:
    """Yield what the kernel says of each TCP socket in one of _STATES, by its inode."""
    import socket  # only a rank that shows no life is asked for it

    for family in (socket.AF_INET, socket.AF_INET6):
        body = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _STATES)
        try:
            for message in netlink.dump(_SOCK_DIAG, _BY_FAMILY, body):
                yield from _link(family, message)
        except FileNotFoundError:
            # A kernel without IPv6 knows nothing of its connections.
            if family == socket.AF_INET:
                raise


def inodes(pids: Iterable[int]) -> set[int]:
    """Return the inodes of all sockets that processes PIDS have open."""
    files = islice(chain.from_iterable(map(proc.open_files, pids)), _MOST_FILES)
    return {int(target[8:-1]) for _, target in files if target.startswith("socket:[")}
