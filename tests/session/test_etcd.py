"""A real etcd with the client of a launcher."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

import etcds
import ports
import pytest

from fleetrun.session.etcd import Client, EtcdError

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
def client() -> Callable[..., Client]:
    """Return a factory of clients of some members."""
    return lambda *members, name="job": Client(members, name, TIMEOUT_S)


def test_one_of_two_becomes_the_coordinator_and_only_it_writes(
    endpoint: tuple[str, int], client: Callable[..., Client]
) -> None:
    nobody = ("127.0.0.1", ports.free(1)[0])
    first, second = (client(*m, name="one/job") for m in ((nobody, endpoint), (endpoint,)))
    assert first.look() == ("", 0, "127.0.0.1")
    lease = first.campaign("first", 60, 0)
    assert lease is not None
    assert second.campaign("second", 60, 0) is None
    assert first.renew(lease)
    value, revision, _ = second.look()
    assert (value, client(endpoint, name="one").look()[0]) == ("first", "")

    # How the job ended stays, and the next job takes the place of that.
    assert first.bury(lease, "over", 60)
    assert not first.renew(lease)
    assert not first.bury(lease, "late", 60)
    assert second.look()[0] == "over"
    assert second.campaign("second", 60, revision) is None
    lease = second.campaign("second", 60, second.look()[1])
    assert lease is not None
    second.revoke(lease)
    assert second.look()[:2] == ("", 0)


def test_who_is_not_there_or_no_etcd_is_named(client: Callable[..., Client]) -> None:
    port = ports.free(1)[0]
    with pytest.raises(EtcdError, match=rf"^127.0.0.1:{port}: connection refused$"):
        client(("127.0.0.1", port)).look()
    with socket.create_server(("127.0.0.1", 0)) as server:
        caller = threading.Thread(target=_greet, args=(server,))
        caller.start()
        with pytest.raises(EtcdError, match=r"SSH-2\.0"):
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
