"""The messages between the launchers of a session.

One connection is one membership: it begins with a Join, and its end without a Leave is the loss of
the host. So nothing is ever sent again, and no message needs to survive its connection.
"""

# No `from __future__ import annotations`: the codec checks every field by its annotation.
import re
from typing import Annotated, NamedTuple, TypeAlias

from fleetrun.errors import RendezvousError
from fleetrun.model import DEFAULTS, Device
from fleetrun.run.events import Failure

# The exit codes of a job that was ended because a launcher was lost, and of one that cannot begin.
LOST, UNMET = 1, RendezvousError.exit_code
# A host that is cut off has killed its ranks this long before the others stop waiting for it.
_FENCE_S = 2.0
# What a host reports about a generation: it has planned it and can start; all its essential ranks
# have succeeded; it has failed here, and the ranks are being stopped; none of them runs any more.
STAGES = (READY, DONE, FAILED, STOPPED) = ("ready", "done", "failed", "stopped")
# The names of hosts (253 characters at most in DNS), launchers, jobs and runs become part of
# addresses, variables and file names.
_NAME, _KIND = re.compile(r"(?![-.])[\w.:-]{0,255}"), re.compile(r"\w{1,40}", re.ASCII)


def is_name(text: str) -> bool:
    """Whether TEXT can be the name of a host, a launcher or a run, or is empty.

    >>> is_name("node-1.cluster"), is_name("fd00::1"), is_name("10.0.0.1,10.0.0.7"), is_name("../x")
    (True, True, False, False)
    """
    return _NAME.fullmatch(text) is not None


Name: TypeAlias = Annotated[str, is_name]
Port: TypeAlias = Annotated[int, range(1, 1 << 16).__contains__]
Count: TypeAlias = Annotated[int, range(1 << 63).__contains__]


class RendezvousConfig(NamedTuple):
    """How many hosts the job has, how often it restarts, and how long it waits.

    Each launcher has its own until it learns the coordinator's, which then applies.
    """

    least: int
    most: int
    max_restarts: int = 0
    rdzv_timeout_s: float = DEFAULTS["rdzv_timeout_s"]
    heartbeat_timeout_s: float = DEFAULTS["heartbeat_timeout_s"]
    elastic_timeout_s: float = DEFAULTS["elastic_timeout_s"]
    # Hosts beyond `most` that stand by.
    spares: int = 0
    # How long ranks may take to end when asked to, and after what silence they hang; 0: never.
    grace_s: float = DEFAULTS["grace_s"]
    hang_timeout_s: float = 0.0
    # Whether a store outside of the job knows its roster, so that its coordinator can be replaced.
    has_store: bool = False

    def check(self) -> None:
        """Raise ValueError if no launcher can have sent it."""
        if not 1 <= self.least <= self.most or min(self) < 0:
            raise ValueError(self)

    @property
    def may_change(self) -> bool:
        """Whether the job can go on without a lost host, or replace it."""
        return self.least < self.most or self.spares > 0

    @property
    def heartbeat_s(self) -> float:
        """How often a member sends a heartbeat."""
        return self.heartbeat_timeout_s / 5

    @property
    def look_s(self) -> float:
        """How often the coordinator looks for silent hosts."""
        return self.heartbeat_timeout_s / 10

    @property
    def margin_s(self) -> float:
        """How long before the heartbeat timeout a host that is cut off kills its ranks."""
        return min(_FENCE_S, self.heartbeat_timeout_s / 5)

    @property
    def fence_s(self) -> float:
        """How long after its last acknowledged heartbeat a host kills its ranks."""
        return self.heartbeat_timeout_s - self.margin_s


class JoinRequest(NamedTuple):
    """A host asks for a place, with a held port and a group of devices for each rank.

    `settings` must be the same on all hosts. In a roster they are empty, and `host` is never.
    """

    # Where other hosts' ranks reach it; empty: at the address that the coordinator sees.
    host: Name
    hostname: Name
    pid: int
    ports: tuple[Port, ...]
    groups: tuple[tuple[Device, ...], ...]
    # Its rank among the hosts, if known.
    rank: Count | None = None
    # The port where ranks rendezvous, if it is separate.
    master_port: Port | None = None
    settings: tuple[tuple[str, str], ...] = ()
    # How often it has taken part before.
    attempt: Count = 0
    # Its newest, the newest first, each with why it is not whole; of --resume_from.
    checkpoints: tuple[tuple[str, str], ...] = ()
    # The launcher's own name, new for each process; and that of its run, if others share its logs.
    launcher: Name = ""
    run: Name = ""

    def check(self) -> None:
        """Raise ValueError if no launcher can have sent it."""
        kinds = {device.kind for group in self.groups for device in group}
        if len(self.ports) != len(self.groups) or not all(map(_KIND.fullmatch, kinds)):
            raise ValueError(self)

    def named(self, address: str = "") -> str:
        """Return the host's name for people: as in the job's options, or `10.0.0.1 (node-1)`."""
        if self.host or not address:
            return self.host or self.hostname
        return f"{address} ({self.hostname})"


class LastRun(NamedTuple):
    """The last generation that a launcher has started, for a coordinator that follows another."""

    session: Name
    generation: Count
    # With the one that follows, if it was a failure that has ended it.
    restarts: Count
    # How many hosts it had.
    hosts: Count


class Join(NamedTuple):
    """A launcher asks for a place in the next generation; with a failure, it only reports that."""

    request: JoinRequest
    failure: Failure | None = None
    last: LastRun | None = None


class Report(NamedTuple):
    """What has become of a generation on this host, with what went wrong here, if anything."""

    generation: int
    stage: Annotated[str, STAGES.__contains__]
    failure: Failure | None = None


class Heartbeat(NamedTuple):
    """The launcher is alive. Its Join counts as number 0."""

    number: Count


class Leave(NamedTuple):
    """The launcher ends; `failure` is the reason if there is no verdict yet."""

    failure: Failure | None


class Missing(NamedTuple):
    """Who is waited for, with remarks: the answer to a Join before there is a roster."""

    who: str
    config: RendezvousConfig
    remarks: tuple[str, ...] = ()
    # The job runs without the launcher, which may get a place later.
    stands_by: bool = False


class RosterMessage(NamedTuple):
    """The hosts of a generation, in the order of their ranks."""

    generation: int
    # How often the job was started again because it had failed.
    restarts: int
    entries: tuple[JoinRequest, ...]
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
    """The answer to a heartbeat: ranks may run for LEFT_S seconds from when that was sent."""

    number: Count
    left_s: Annotated[float, (0.0).__le__]


class RankStack(NamedTuple):
    """Where the main thread of a rank stands: functions, files and lines, the innermost first."""

    process: int
    frames: tuple[tuple[str, str, int], ...]


class SilentHost(NamedTuple):
    """The ranks of a host have shown no life for SECONDS; 0: they do.

    The first such message has their stacks.
    """

    generation: int
    seconds: Annotated[float, (0.0).__le__]
    has_ranks: bool
    stacks: tuple[RankStack, ...] = ()


class PackedCollectives(NamedTuple):
    """A rank's record of its collectives: its file, packed by zlib and base64."""

    generation: int
    process: int
    packed: str


FromMember: TypeAlias = Join | Report | Heartbeat | Leave
FromCoordinator: TypeAlias = Missing | RosterMessage | Start | Stop | Verdict | Acknowledged
# Beside the protocol: the coordinator does not depend on these.
Aside: TypeAlias = SilentHost | PackedCollectives
