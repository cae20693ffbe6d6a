"""A real etcd with the client of a launcher."""

from __future__ import annotations

import socket
import threading
from functools import partial
from typing import TYPE_CHECKING

import etcds
import ports
import pytest

from fleetrun.run.loop import Loop
from fleetrun.session.driver import RendezvousEndpoint, Session
from fleetrun.session.election import Election
from fleetrun.session.etcd import JobKey
from fleetrun.session.messages import JoinRequest, RendezvousConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    reason = etcds.missing()
    if reason is not None:
        pytest.skip(reason)
    with etcds.one_member(tmp_path_factory.mktemp("etcd")) as where:
        host, _, port = where.rpartition(":")
        yield host, int(port)


@pytest.fixture
def client() -> Callable[..., JobKey]:
    """Return a factory of clients of some members."""
    return lambda *members, name="job": JobKey(members, name, TIMEOUT_S, Loop())


def test_one_of_two_becomes_the_coordinator_and_only_it_writes(
    endpoint: tuple[str, int], client: Callable[..., JobKey]
) -> None:
    nobody = ("127.0.0.1", ports.free(1)[0])
    first, second = (client(*m, name="one/job") for m in ((nobody, endpoint), (endpoint,)))
    assert first.look() == ("", 0, "127.0.0.1")
    held = first.campaign("first", 60, 0)
    assert held is not None
    lease, made = held
    assert second.campaign("second", 60, 0) is None
    assert first.renew(lease)
    value, revision, _ = second.look()
    assert (value, client(endpoint, name="one").look()[0]) == ("first", "")

    assert revision == made

    # How the job ended stays, and the next job takes the place of that.
    assert first.campaign("over", 60, made)
    first.revoke(lease)
    assert not first.renew(lease)
    value, revision, _ = second.look()
    assert value == "over"
    assert second.campaign("second", 60, made) is None
    held = second.campaign("second", 60, revision)
    assert held is not None
    lease, _ = held
    second.revoke(lease)
    assert second.look()[:2] == ("", 0)


def test_who_is_not_there_or_no_etcd_is_named(client: Callable[..., JobKey]) -> None:
    port = ports.free(1)[0]
    with pytest.raises(OSError, match=rf"^127.0.0.1:{port}: connection refused$"):
        client(("127.0.0.1", port)).look()
    with socket.create_server(("127.0.0.1", 0)) as server:
        caller = threading.Thread(target=_greet, args=(server,))
        caller.start()
        with pytest.raises(OSError, match=r"SSH-2\.0"):
            client(server.getsockname()).look()
        caller.join()


def _greet(server: socket.socket) -> None:
    """Greet one caller as sshd does."""
    link, _ = server.accept()
    with link:
        link.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
        # Unread bytes would reset the connection.
        while link.recv(65536):
            pass


def test_who_reaches_etcd_by_a_loopback_address_is_called_at_another_one(
    endpoint: tuple[str, int], client: Callable[..., JobKey]
) -> None:
    elect = partial(Election, members=[endpoint], own_address="127.0.0.2")
    where = RendezvousEndpoint(RendezvousConfig(1, 1, has_store=True), "", ports.free(1)[0], "near")
    session = Session(where, "first", host="node-1", log=print, elect=elect)
    loop = Loop()
    session.open(loop)
    session.join(JoinRequest("", "node-1", 1, (), (), None))
    while not session.serves:
        loop.turn()
    assert '"127.0.0.2"' in client(endpoint, name="near").look()[0]
    session.quit(None)
    session.close()
    loop.close()
