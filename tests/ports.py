"""Ports for tests that have to name them beforehand."""

from __future__ import annotations

import os

from fleetrun.engines.ports import HeldPorts

# Reserved among all fleetruns of this machine until this process ends, and outside the range from
# which the kernel gives ports to others: what is found by bind and close is anybody's again.
_HELD = HeldPorts(os.getpid())


def free(count: int) -> tuple[int, ...]:
    """Return COUNT ports that no other test and no launch will take."""
    return _HELD.free(count)
