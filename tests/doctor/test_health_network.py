"""Names, interfaces and RDMA ports for a check-up."""

from __future__ import annotations

import os
import select
from typing import TYPE_CHECKING

from fleetrun.doctor import network
from fleetrun.doctor.network import RdmaPort

if TYPE_CHECKING:
    from pathlib import Path


def test_this_host_is_read() -> None:
    here = network.read({"NCCL_SOCKET_IFNAME": "eth"}, resolve=lambda _: ("10.0.0.1",))
    assert here.hostname == os.uname().nodename
    assert here.asked_interface == "eth"
    (loopback,) = [interface for interface in here.interfaces if interface.is_loopback]
    assert "127.0.0.1" in loopback.addresses
    assert [lookup.addresses for lookup in here.lookups] == [("10.0.0.1",)]


def test_a_resolver_that_hangs_or_fails_holds_nobody_up() -> None:
    def resolve(name: str) -> tuple[str, ...]:
        if name == "hangs":
            select.select([], [], [])
        if name == "fails":
            raise OSError
        return ("10.0.0.1",)

    lookups = network.lookups(["fails", "hangs", "here"], resolve, timeout_s=0.5)
    assert [(lookup.name, lookup.addresses) for lookup in lookups[:2]] == [
        ("fails", ()),
        ("hangs", ()),
    ]
    assert lookups[1].seconds == 0.5


def test_every_rdma_port_has_its_state(tmp_path: Path) -> None:
    port = tmp_path / "sys" / "class" / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("1: DOWN\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    health = network.read({}, root=str(tmp_path), resolve=lambda _: ())
    assert health.rdma == (RdmaPort("mlx5_0", "1", "1: DOWN", "400 Gb/sec (4X NDR)"),)
