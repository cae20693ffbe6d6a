"""The messages between the launchers of a session; each message describes a whole state.

A member sends Join first on each connection, then its unacknowledged messages. So a message lost
with a connection is sent again, and a duplicate changes nothing.
"""

# No `from __future__ import annotations`: the codec checks every field by its annotation.
import re
from typing import NamedTuple, TypeAlias

from fleetrun.model import Device
from fleetrun.run.events import LONGEST_TEXT, Failure
from fleetrun.session.config import RendezvousConfig

# Incremented when launchers of two versions could misunderstand each other.
PROTOCOL = 10
# The exit code of a job that was ended because a launcher was lost.
LOST = 1
_LAST_PORT = 65535
# The name of a host (253 characters at most in DNS), a launcher or a job, which becomes part of
# addresses, variables and file names.
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
            raise ValueError(f"{text[:80]!r}, which is not a name")


def _check_ports(ports: tuple[int, ...], groups: tuple[tuple[Device, ...], ...]) -> None:
    if not all(1 <= port <= _LAST_PORT for port in ports):
        raise ValueError(ports)
    if len(ports) < len(groups):
        raise ValueError(f"{len(groups)} groups of devices, and {len(ports)} ports")
    if not all(_KIND.fullmatch(device.kind) for group in groups for device in group):
        raise ValueError("an invalid kind of devices")


class JoinRequest(NamedTuple):
    """A host asks for a place, with a held port and a group of devices for each rank.

    `settings` must be the same on all hosts; differences in `remarks` are reported.
    """

    # Where other hosts' ranks reach it; empty: at the address that the coordinator sees.
    host: str
    hostname: str
    pid: int
    ports: tuple[int, ...]
    groups: tuple[tuple[Device, ...], ...]
    # Its rank among the hosts, if known.
    rank: int | None = None
    # The port where ranks rendezvous, if it is separate.
    master_port: int | None = None
    settings: tuple[tuple[str, str], ...] = ()
    remarks: tuple[tuple[str, str], ...] = ()
    # How often it has taken part before.
    attempt: int = 0
    # Its newest, the newest first, each with why it is not whole; of --resume_from.
    checkpoints: tuple[tuple[str, str], ...] = ()
    # Why it should stay out, as a sentence without a full stop; empty: it is healthy.
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
        """Return the host's name for people: as in the job's options, or `10.0.0.1 (node-1)`."""
        if self.host or not address:
            return self.host or self.hostname
        return f"{address} ({self.hostname})"


class Join(NamedTuple):
    """A launcher joins or rejoins; `launcher` is its own name, new for each process."""

    protocol: int
    launcher: str
    # The generation that it is in or wants to join.
    generation: int
    request: JoinRequest
    # The session of its roster; empty: it has had none yet.
    session: str = ""
    # Known to launchers of this host only; without a token it lets them rejoin.
    secret: str = ""
    # Why its host cannot take part, which is all it joins for.
    failure: Failure | None = None

    def check(self) -> None:
        """Raise ValueError where no launcher can have said it."""
        _check_names(self.launcher, self.session, self.secret)


class HostReady(NamedTuple):
    """The host has planned the generation and can start."""

    generation: int


class Done(NamedTuple):
    """All essential ranks of this host have succeeded."""

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
    """The launcher is alive."""

    number: int


class Redialing(NamedTuple):
    """The launcher reconnects; the end of this connection does not mean that it is lost."""

    generation: int


class LauncherKilled(NamedTuple):
    """The guard reports that its launcher was killed; HAS_RANKS: some of its ranks are left."""

    launcher: str
    secret: str
    has_ranks: bool

    def check(self) -> None:
        """Raise ValueError where no guard can have said it."""
        _check_names(self.launcher, self.secret)


class Leave(NamedTuple):
    """The launcher ends; `failure` is the reason if there is no verdict yet."""

    failure: Failure | None


class Refused(NamedTuple):
    """The launcher cannot take part; ENDS_JOB: nobody can, as no other host can replace it."""

    why: str
    ends_job: bool = False


class Missing(NamedTuple):
    """Who is waited for, with remarks: the answer to a Join before there is a roster."""

    who: str
    config: RendezvousConfig
    remarks: tuple[str, ...] = ()
    # The job runs without the launcher, which may get a place later.
    stands_by: bool = False
    # The option that limits the wait, and the seconds left.
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
    checkpoints: tuple[tuple[str, str], ...] = ()

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
    # Unique for each job, even if jobs of one name follow each other.
    session: str = ""


class Start(NamedTuple):
    """All hosts are ready: start the ranks of the generation."""

    generation: int


class Stop(NamedTuple):
    """The generation has failed: stop its ranks. The verdict comes when all have."""

    generation: int
    failure: Failure


class Verdict(NamedTuple):
    """How the generation has ended on all hosts; no failure: it has succeeded."""

    generation: int
    launcher: str
    failure: Failure | None
    is_final: bool
    # Why there is no other attempt although restarts are left.
    given_up: str = ""


class Acknowledged(NamedTuple):
    """The answer to the heartbeat of this number."""

    number: int


FromMember: TypeAlias = (
    Join | HostReady | Done | Failed | Stopped | Heartbeat | Redialing | LauncherKilled | Leave
)
FromCoordinator: TypeAlias = (
    Refused | Missing | RosterMessage | Start | Stop | Verdict | Acknowledged
)
