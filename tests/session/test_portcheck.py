"""The ports that hosts hold for their ranks answer each other, and nobody else."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ports import free

from fleetrun.run.loop import nothing
from fleetrun.session.authentication import Key
from fleetrun.session.dialer import Target
from fleetrun.session.messages import Entry
from fleetrun.session.portcheck import PortCheck, chosen

if TYPE_CHECKING:
    from fleetrun.run.loop import Loop


def check(loop: Loop, ports: tuple[int, ...]) -> PortCheck:
    """Call PORTS of this host, and return the outcome."""
    made, done = PortCheck(Key("job")), list[bool]()
    made.begin([Target("127.0.0.1", port) for port in ports], loop, lambda: done.append(True))
    while not done:
        loop.turn()
    made.release()
    return made


def test_ports_that_are_held_answer_and_are_free_for_ranks_at_once(loop: Loop) -> None:
    ports = free(16)
    held = PortCheck(Key("job"))
    held.hold(ports, loop)
    assert not check(loop, ports).remark()
    held.release()
    with ExitStack() as stack:
        for port in ports:
            # This bind is without SO_REUSEADDR.
            stack.enter_context(socket.socket()).bind(("127.0.0.1", port))


def test_what_is_not_of_this_job_counts_as_not_reached(loop: Loop) -> None:
    ports = free(2)
    held = PortCheck(Key("other"))
    held.hold(ports[:1], loop)
    failed = check(loop, ports)
    held.release()
    why = failed.failures
    assert why[Target("127.0.0.1", ports[0])] == "its fleetrun has another --job_id"
    assert why[Target("127.0.0.1", ports[1])] == "connection refused"
    assert f"127.0.0.1:{ports[0]}: its fleetrun has another" in failed.remark()


def test_what_is_silent_is_given_up_after_a_second(loop: Loop) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        before = time.monotonic()
        failed = check(loop, (port,))
        assert time.monotonic() >= before + 1.0
    assert failed.failures == {
        Target("127.0.0.1", port): "no answer within 1 s (is a firewall in between?)"
    }


def test_a_check_that_is_given_up_says_nothing_more(loop: Loop) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        made = PortCheck(Key("job"))
        made.begin(
            [Target("127.0.0.1", server.getsockname()[1])], loop, partial(pytest.fail, "it has")
        )
        loop.turn()
        made.release()
        until = time.monotonic() + 1.2
        while time.monotonic() < until:
            loop.timer("until", until, nothing)
            loop.turn()


@given(st.lists(st.integers(1, 20), min_size=2, max_size=30), st.data())
def test_a_host_tries_the_first_one_and_its_neighbours(
    sizes: list[int], data: st.DataObject
) -> None:
    me = data.draw(st.integers(0, len(sizes) - 1))
    entries = [
        Entry(str(place), str(place), "", tuple(range(1, size + 1)), ((),) * size)
        for place, size in enumerate(sizes)
    ]
    tried = chosen(entries, me)
    hosts = {target.host for target in tried}
    assert len(hosts) == min(5, len(sizes) - 1) or (len(tried) == 16 and len(hosts) >= 3)
    assert len(tried) == len(set(tried)) == min(16, sum(sizes[int(host)] for host in hosts))
    near = {0, (me + 1) % len(sizes), (me - 1) % len(sizes)} - {me}
    assert {Target(str(place), 1) for place in near} <= set(tried)
    assert all(target.port <= sizes[int(target.host)] for target in tried)
    assert str(me) not in {target.host for target in tried}


def test_hosts_that_are_one_machine_have_nothing_to_try() -> None:
    entries = [Entry(name, "10.0.0.1", "", (port,), ((),)) for name, port in (("a", 1), ("b", 2))]
    assert chosen(entries, 0) == ()
    entries[1] = entries[1]._replace(host="10.0.0.2", master_port=9)
    assert [str(target) for target in chosen(entries, 0)] == ["10.0.0.2:9", "10.0.0.2:2"]
