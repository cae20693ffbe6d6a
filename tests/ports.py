"""Ports for tests that have to name them beforehand."""

from __future__ import annotations

import os

from fleetrun.engines.ports import Ports
from fleetrun.plan.layout import LAST_PORT

# Reserved among all launchers of this machine until this process ends, and outside the kernel's
# range of ephemeral ports: a port found by bind and close is free for anybody again.
_HELD = Ports(os.getpid())


def free(count: int) -> tuple[int, ...]:
    """Return COUNT ports that no other test and no launch will take."""
    ports = _HELD.free(count)
    # Launchers of several hosts meet at the first port and 96 to 99.
    while max(ports) > LAST_PORT - 100:
        ports = _HELD.free(count)
    return ports
