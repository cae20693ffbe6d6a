"""The kernel's diagnosis of TCP connections."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from fleetrun.probe import netlink
from fleetrun.sources import sockets

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(params=["127.0.0.1", "::1"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.create_server((request.param, 0), family=family) as server:
        link = socket.create_connection(server.getsockname()[:2])
        other, _ = server.accept()
    with link, other:
        yield link, other


def inode(link: socket.socket) -> int:
    return os.fstat(link.fileno()).st_ino


def test_bytes_count_on_both_sides(pair: tuple[socket.socket, socket.socket]) -> None:
    link, other = pair
    before = sockets.traffic()
    link.sendall(b"x" * 50_000)
    left = 50_000
    while left:
        left -= len(other.recv(left))
    after = sockets.traffic()
    # Received bytes are known at once; sent bytes once they are acknowledged.
    assert after[inode(other)] - before[inode(other)] == 50_000
    assert after[inode(link)] - before[inode(link)] >= 40_000


def test_the_sockets_of_a_process_are_found(pair: tuple[socket.socket, socket.socket]) -> None:
    assert {inode(end) for end in pair} <= sockets.inodes([os.getpid()])


def test_a_process_that_is_gone_has_none() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    assert sockets.inodes([pid]) == set()


def test_a_kernel_that_does_not_count_bytes_tells_of_none() -> None:
    # `struct tcp_info` of Linux 3.10 ends after 104 bytes.
    attribute = struct.pack("=HH", 4 + 104, 2) + bytes(104)
    message = bytes(68) + struct.pack("=I", 7) + attribute
    assert list(sockets._link(socket.AF_INET, message)) == []


@pytest.mark.parametrize(("size", "resent"), [(224, 3), (192, 10)])
def test_what_the_peer_received_twice_was_not_lost(size: int, resent: int) -> None:
    """If a host answers late, the kernel sends again; since Linux 4.19 it counts duplicates."""
    info = bytearray(size)
    struct.pack_into("=I", info, 100, 10)
    if size == 224:
        struct.pack_into("=I", info, 216, 7)
    attribute = struct.pack("=HH", 4 + size, 2) + bytes(info)
    message = bytes(68) + struct.pack("=I", 7) + attribute
    ((_, link),) = sockets._link(socket.AF_INET, message)
    assert link.resent == resent


def test_a_kernel_without_the_means_is_an_error() -> None:
    # The diagnosis of a family that no kernel has.
    with pytest.raises(FileNotFoundError):
        list(netlink.dump(4, 20, struct.pack("=BBBxI48x", 44, socket.IPPROTO_TCP, 0, 1)))


@pytest.fixture(params=[("127.0.0.1", "127.0.0.1:"), ("::ffff:127.0.0.1", "127.0.0.1:")])
def unanswered(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, str]]:
    """Return a socket that connects to a server with a full backlog, and the address."""
    address, shown = request.param
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        port = server.getsockname()[1]
        stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        link = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        link.settimeout(0)
        link.connect_ex((address, port))
        yield link, f"{shown}{port}"


def test_a_connection_that_nobody_answers_is_found(unanswered: tuple[socket.socket, str]) -> None:
    link, where = unanswered
    assert sockets.connecting()[inode(link)] == where


def test_connections_within_this_host_are_no_links(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    assert not {inode(end) for end in pair} & sockets.links().keys()
