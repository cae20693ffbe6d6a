"""The messages between the launchers of a session; each message describes a whole state.

A member sends Join first on each connection, then its unacknowledged messages. So a message that
was lost with a connection is sent again, and one that arrives twice changes nothing.
"""

# No `from __future__ import annotations`: the codec checks every field by its annotation.
import re
from typing import NamedTuple, TypeAlias

from fleetrun.model import Device
from fleetrun.run.events import LONGEST_TEXT, Failure
from fleetrun.session.config import RendezvousConfig

# Goes up when launchers of two versions could misunderstand each other.
PROTOCOL = 9
# The exit code of a job that was ended because a launcher was lost.
LOST = 1
_LAST_PORT = 65535
# Of a host (a name of DNS has 253 characters at most), a launcher, a job: it becomes a part of
# addresses, of variables of ranks and of file names.
_NAME = re.compile(r"(?!-)[\w.:-]{0,255}", re.ASCII)
_KIND = re.compile(r"\w{1,40}", re.ASCII)


def is_name(text: str) -> bool:
    """Whether TEXT can be the name of a host or a launcher, or is empty.

    >>> is_name("node-1.cluster"), is_name("fd00::1"), is_name("10.0.0.1,10.0.0.7"), is_name("../x")
    (True, True, False, False)
    """
    return _NAME.fullmatch(text) is not None


def _check_names(*texts: str) -> None:
    for text in texts:
        if not is_name(text):
            raise ValueError(f"{text[:80]!r}, which is no name")


def _check_ports(ports: tuple[int, ...], groups: tuple[tuple[Device, ...], ...]) -> None:
    if not all(1 <= port <= _LAST_PORT for port in ports):
        raise ValueError(ports)
    if len(ports) < len(groups):
        raise ValueError(f"{len(groups)} groups of devices, and {len(ports)} ports")
    if not all(_KIND.fullmatch(device.kind) for group in groups for device in group):
        raise ValueError("a kind of devices that is none")


class JoinRequest(NamedTuple):
    """What a host brings into a generation: a held port and a group of devices for each rank.

    `settings` must be the same on all hosts; `remarks` are worth a line where they differ.
    """

    # By which the ranks of other hosts reach it; empty: the address that the coordinator sees.
    host: str
    hostname: str
    pid: int
    ports: tuple[int, ...]
    groups: tuple[tuple[Device, ...], ...]
    # Its place among the hosts, where somebody knows it.
    rank: int | None = None
    # Where ranks meet, if that is a port of its own.
    master_port: int | None = None
    settings: tuple[tuple[str, str], ...] = ()
    remarks: tuple[tuple[str, str], ...] = ()
    # How often it has taken part before.
    attempt: int = 0
    # Why it had better stay out, as a sentence without its end; empty: it is well.
    trouble: str = ""

    def check(self) -> None:
        """Raise ValueError where no launcher can have said it."""
        ports = (*self.ports, *(() if self.master_port is None else (self.master_port,)))
        _check_ports(ports, self.groups)
        if len(self.ports) != len(self.groups) or min(self.rank or 0, self.attempt) < 0:
            raise ValueError(self.rank)
        _check_names(self.host, self.hostname)
        if len(self.trouble) > LONGEST_TEXT:
            raise ValueError(self.trouble[:80])

    def named(self, address: str = "") -> str:
        """Name the host for people: as the job's options do, or `10.0.0.1 (node-1)`."""
        if self.host or not address:
            return self.host or self.hostname
        return f"{address} ({self.hostname})"


class Join(NamedTuple):
    """A launcher takes part, or comes back: `launcher` is its own name, new for each process."""

    protocol: int
    launcher: str
    # The one that it is in, or wants to take part in.
    generation: int
    request: JoinRequest
    # That of the roster in which it has a place; empty: it has none yet.
    session: str = ""
    # What only launchers of this host know: without a token, by it they come back.
    secret: str = ""
    # Why its host cannot take part: it has come to say so.
    failure: Failure | None = None

    def check(self) -> None:
        """Raise ValueError where no launcher can have said it."""
        _check_names(self.launcher, self.session, self.secret)


class HostReady(NamedTuple):
    """It has planned the generation, and could start."""

    generation: int


class Done(NamedTuple):
    """All ranks of this host that the job waits for have ended well."""

    generation: int


class Failed(NamedTuple):
    """The generation has failed here; its ranks are being stopped."""

    generation: int
    failure: Failure


class Stopped(NamedTuple):
    """No rank of the generation runs here any more; `failure` is what went wrong here, if any."""

    generation: int
    failure: Failure | None


class Heartbeat(NamedTuple):
    """The launcher is there."""

    number: int


class Redialing(NamedTuple):
    """The launcher gives this connection up, and makes another: its end here is no loss."""

    generation: int


class LauncherKilled(NamedTuple):
    """The guard of a launcher that was killed says so; without HAS_RANKS, none of its is left."""

    launcher: str
    secret: str
    has_ranks: bool

    def check(self) -> None:
        """Raise ValueError where no guard can have said it."""
        _check_names(self.launcher, self.secret)


class Leave(NamedTuple):
    """The launcher ends; before the verdict, `failure` is why."""

    failure: Failure | None


class Refused(NamedTuple):
    """The launcher cannot take part; maybe nobody can any more, as no other host can replace it."""

    why: str
    ends_job: bool = False


class Missing(NamedTuple):
    """The hosts that are waited for, and remarks; the answer to a Join, unless that is a roster."""

    who: str
    config: RendezvousConfig
    remarks: tuple[str, ...] = ()
    # The job runs without the launcher, which may get a place later.
    stands_by: bool = False
    # The option that limits the wait, and how much of it is left.
    limit: str = ""
    left_s: float = 0.0


class Entry(NamedTuple):
    """A host of the roster."""

    launcher: str
    host: str
    hostname: str
    ports: tuple[int, ...]
    groups: tuple[tuple[Device, ...], ...]
    master_port: int | None = None
    attempt: int = 0

    def check(self) -> None:
        """Raise ValueError where no coordinator can have said it."""
        ports = (*self.ports, *(() if self.master_port is None else (self.master_port,)))
        _check_ports(ports, self.groups)
        _check_names(self.launcher, self.host, self.hostname)


class RosterMessage(NamedTuple):
    """The hosts of a generation, in the order of their ranks."""

    generation: int
    # How often the job was started again because it had failed.
    restarts: int
    entries: tuple[Entry, ...]
    config: RendezvousConfig
    remarks: tuple[str, ...] = ()
    # Another name for each job, even where jobs follow each other under one name at one place.
    session: str = ""


class Start(NamedTuple):
    """All hosts are ready: start the ranks of the generation."""

    generation: int


class Stop(NamedTuple):
    """The generation has failed: stop its ranks. The verdict comes when all have."""

    generation: int
    failure: Failure


class Verdict(NamedTuple):
    """How the generation has ended, on all hosts alike; no failure: well."""

    generation: int
    launcher: str
    failure: Failure | None
    is_final: bool
    # Why there is no other attempt although the rules allow one.
    given_up: str = ""


class Acknowledged(NamedTuple):
    """The heartbeat of this number has arrived."""

    number: int


FromMember: TypeAlias = (
    Join | HostReady | Done | Failed | Stopped | Heartbeat | Redialing | LauncherKilled | Leave
)
FromCoordinator: TypeAlias = (
    Refused | Missing | RosterMessage | Start | Stop | Verdict | Acknowledged
)
