"""From the slots of a mode to the ranks of a job, and their ports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fleetrun.errors import UsageError
from fleetrun.model import Device, RankSpec

LAST_PORT = 65535
# Launchers of several hosts meet at the first of these, counted from the first port: no rank gets
# them.
_SESSION_PORTS = range(96, 100)


def session_port(first: int) -> int:
    """Return the port at which launchers of several hosts meet, counted from FIRST.

    >>> session_port(6070)
    6166
    """
    if first + _SESSION_PORTS[-1] > LAST_PORT:
        raise UsageError(
            f"--start_port={first}: launchers of several hosts meet at START+{_SESSION_PORTS[0]}; "
            f"give {LAST_PORT - _SESSION_PORTS[-1]} at most."
        )
    return first + _SESSION_PORTS[0]


class ModeHosts(NamedTuple):
    """The hosts in the options of a mode, before the devices are known."""

    # The hosts that the options name, in order, and those options.
    hosts: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    # Whether processes may have other roles than trainer.
    has_roles: bool = False
    # Whether no option names the hosts, so that a cluster's variables may.
    is_open: bool = False


class Slot(NamedTuple):
    """A process that the job needs; the engine provides a host or port of None.

    `stage` counts as in Paddle: trainers are the first stage, heterogeneous trainers follow.
    """

    role: str
    stage: int = 0
    host: str | None = None
    port: int | None = None
    devices: tuple[Device, ...] = ()


class Slots(NamedTuple):
    """All slots of a job, in the order of Paddle's ports: the n-th has START + n by default.

    If they name no hosts, every host of the job has all of them.
    """

    slots: tuple[Slot, ...]
    # The first port without --start_port, for several hosts, which cannot ask each other.
    first_port: int
    # The endpoint at which ranks meet. shared: on several hosts, the first slot's endpoint,
    # otherwise a port of its own. own: always a port of its own. none: nowhere.
    master: str = "shared"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The named hosts, in the order of the job."""
        return tuple(dict.fromkeys(slot.host for slot in self.slots if slot.host is not None))

    def on(self, host: str) -> tuple[Slot, ...]:
        """Return the slots of HOST."""
        return tuple(slot for slot in self.slots if slot.host in {None, host})


def ports(
    slots: Slots, first: int | None, *, several: bool = False
) -> tuple[tuple[int | None, ...], ...]:
    """Return each named host's ports, slot by slot; None if any free one will do.

    All hosts count from the same FIRST port and skip the same ones; with SEVERAL hosts also those
    of the session. If no host is named there is one row, for every host of the job.
    """
    taken = {(slot.host, slot.port) for slot in slots.slots}
    rows: dict[str | None, list[int | None]] = {host: [] for host in slots.hosts or (None,)}
    for offset, slot in enumerate(slots.slots):
        port = slot.port
        if port is None and first is not None:
            port = first + offset
            while (slot.host, port) in taken or (several and port - first in _SESSION_PORTS):
                port += 1
            if not 1 <= port <= LAST_PORT:
                raise UsageError(
                    f"{len(slots.slots)} ports from {first} on do not fit below {LAST_PORT}; "
                    "give a lower --start_port."
                )
            taken.add((slot.host, port))
        rows[slot.host].append(port)
    return tuple(map(tuple, rows.values()))


class LocalProcess(NamedTuple):
    """One process of this host: its log, whether the job waits for it, and its identity.

    `identity` has the variables that identify the rank.
    """

    spec: RankSpec
    name: str
    log: str
    identity: Mapping[str, str]
    essential: bool = True


class Layout(NamedTuple):
    """All ranks of the job, and the processes of this host."""

    ranks: tuple[RankSpec, ...]
    processes: tuple[LocalProcess, ...]
    # Variables that describe the job, the same for all processes of this host.
    job: Mapping[str, str] = {}
    notes: tuple[str, ...] = ()
