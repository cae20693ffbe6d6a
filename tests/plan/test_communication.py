"""The variables that tell NCCL and gloo about the network."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from plans import a_request, a_roster, some_facts

from fleetrun.model import Address
from fleetrun.plan import communication
from fleetrun.plan.devices import Share

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fleetrun.model import Facts, Request

TWO_HOSTS = ("10.0.0.1", "10.0.0.2")


def told(
    facts: Facts,
    hosts: tuple[str, ...] = TWO_HOSTS,
    request: Request | None = None,
    kind: str = "gpu",
) -> dict[str, str]:
    """Return the network variables of the first host's ranks."""
    roster = a_roster(hosts)
    share = Share(kind, roster.members[0].groups, "nccl" if kind == "gpu" else "gloo")
    return communication.variables(request or a_request(), facts, share, roster)


def a_host(*interfaces: str, dead: Iterable[str] = (), **fields: object) -> Facts:
    """Make the facts of a host with INTERFACES, the first of which leads to the peers."""
    own = tuple(Address(name, f"10.0.{place}.1") for place, name in enumerate(interfaces))
    facts = some_facts(8, addresses=(Address("lo", "127.0.0.1"), *own), dead_ends=frozenset(dead))
    return facts._replace(peer_interface=interfaces[0] if interfaces else None)._replace(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("interfaces", "dead", "expected"),
    [
        # NCCL uses all of them; naming the way to the peers would leave the faster ones unused.
        (("eth0",), (), None),
        (("eth0", "eth1", "eth2"), (), None),
        (("eth0", "docker0"), ("docker0",), None),
        (("eth0", "eth1"), ("eth1",), "^=lo,eth1"),
        (("eth0", "docker0", "br-1", "eth1"), ("docker0", "br-1"), "^=lo,docker0,br-1"),
        # The kernel routes to the peers over this.
        (("virbr0",), ("virbr0",), None),
        (("docker0",), ("docker0",), "docker0"),
        (("docker0", "docker01"), ("docker0", "docker01"), "=docker0"),
        (("docker0", "eth1"), ("docker0", "eth1"), "docker0"),
    ],
)
def test_nccl_chooses_unless_its_choice_would_fail(
    interfaces: tuple[str, ...], dead: tuple[str, ...], expected: str | None
) -> None:
    env = told(a_host(*interfaces, dead=dead))
    assert env.get("NCCL_SOCKET_IFNAME") == expected
    assert env["GLOO_SOCKET_IFNAME"] == interfaces[0]


def test_the_network_of_the_address_that_the_user_names_is_used() -> None:
    request = a_request(host="10.0.1.1")
    assert told(a_host("eth0", "eth1"), request=request)["NCCL_SOCKET_IFNAME"] == "eth1"
    # For NCCL, eth1 would be a prefix of eth10.
    assert told(a_host("eth0", "eth1", "eth10"), request=request)["NCCL_SOCKET_IFNAME"] == "=eth1"
    assert "NCCL_SOCKET_IFNAME" not in told(a_host("eth0"), request=a_request(host="node1"))


def test_one_host_talks_to_itself() -> None:
    env = told(a_host("eth0", "eth1", dead=("eth1",)), TWO_HOSTS[:1])
    assert env["GLOO_SOCKET_IFNAME"] == "lo"
    assert "NCCL_SOCKET_IFNAME" not in env
    assert told(some_facts(), TWO_HOSTS[:1], kind="cpu") == {"GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.parametrize(
    ("hcas", "rdma", "hosts", "expected"),
    [
        ((), (), TWO_HOSTS, {"NCCL_IB_DISABLE": "1"}),
        ((), ("mlx5_0",), TWO_HOSTS, {}),
        (("mlx5_0",), ("mlx5_0",), TWO_HOSTS[:1], {}),
        (("mlx5_0",), ("mlx5_0",), TWO_HOSTS, {"NCCL_IB_HCA": "mlx5_0"}),
        (("mlx5_0", "mlx5_1"), ("mlx5_0", "mlx5_1"), TWO_HOSTS, {"NCCL_IB_HCA": "mlx5_0,mlx5_1"}),
        (("mlx5_1",), ("mlx5_1", "mlx5_10"), TWO_HOSTS, {"NCCL_IB_HCA": "=mlx5_1"}),
    ],
)
def test_infiniband_is_used_or_switched_off(
    hcas: tuple[str, ...], rdma: tuple[str, ...], hosts: tuple[str, ...], expected: dict[str, str]
) -> None:
    env = told(some_facts(8, hcas=hcas, rdma=rdma), hosts)
    assert {name: value for name, value in env.items() if name.startswith("NCCL_IB")} == expected
