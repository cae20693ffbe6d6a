"""The ports of slots."""

from __future__ import annotations

import pytest

from fleetrun.model import TRAINER
from fleetrun.plan.layout import Slot, Slots, ports


@pytest.mark.parametrize("several", [True, False])
def test_on_several_hosts_the_ports_of_the_session_are_left_out(several: bool) -> None:
    slots = Slots(tuple(Slot(TRAINER) for _ in range(100)), first_port=6070)
    (row,) = ports(slots, 6070, several=several)
    expected = [*range(6070, 6166), *range(6170, 6174)] if several else [*range(6070, 6170)]
    assert list(row) == expected
