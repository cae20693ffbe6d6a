"""The ports of slots."""

from __future__ import annotations

import pytest

from fleetrun.errors import UsageError
from fleetrun.plan.layout import TRAINER, Slot, Slots, ports

TWO = Slots((Slot(TRAINER),) * 2, 6070)


def test_ports_end_at_the_last_one() -> None:
    assert ports(TWO, 65534) == ((65534, 65535),)
    for first in (0, 65535):
        with pytest.raises(UsageError, match="do not fit"):
            ports(TWO, first)


def test_without_a_first_port_the_engine_gives_them() -> None:
    assert ports(TWO, None) == ((None, None),)
