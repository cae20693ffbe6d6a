"""The ports of slots."""

from __future__ import annotations

import pytest

from fleetrun.errors import UsageError
from fleetrun.model import TRAINER
from fleetrun.plan.layout import Slot, Slots, ports

TWO = Slots((Slot(TRAINER),) * 2, 6070)


def test_ports_end_at_the_last_one() -> None:
    assert ports(TWO, 65534) == ((65534, 65535),)
    for first in (0, 65535):
        with pytest.raises(UsageError, match="do not fit"):
            ports(TWO, first)


def test_without_a_first_port_the_engine_gives_them() -> None:
    assert ports(TWO, None) == ((None, None),)


@pytest.mark.parametrize("several", [True, False])
def test_on_several_hosts_the_ports_of_the_session_are_left_out(several: bool) -> None:
    slots = Slots(tuple(Slot(TRAINER) for _ in range(100)), first_port=6070)
    (row,) = ports(slots, 6070, several=several)
    expected = [*range(6070, 6166), *range(6170, 6174)] if several else [*range(6070, 6170)]
    assert list(row) == expected
