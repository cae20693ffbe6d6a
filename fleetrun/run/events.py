"""What can happen to a job, what can be done about it, and how it ended.

`policy.step` takes an event and returns actions; sinks and sources are notified of both. `at` is in
monotonic seconds, `process` an index of the plan.
"""

import signal
from typing import Annotated, NamedTuple, TypeAlias

from fleetrun.model import ExitStatus, FieldVerdict, LaunchPlan

# A text of a message between launchers that may have several lines.
Lines: TypeAlias = Annotated[str, "lines"]

# Enough for a rank's last lines; its log is not sent.
LONGEST_TEXT = 16 * 1024
# The exit code of a job that hung; `timeout` uses it, too.
HUNG = 124
# The exit code of a job whose strategy is not in effect, with --strategy_strict.
STRATEGY_REJECTED = 5


def signal_name(signum: int) -> str:
    """Name a signal as people write it; most real-time signals have no name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


class Gathered(NamedTuple):
    """A generation begins: its hosts are known, and `plan` is this host's part of it."""

    attempt: int
    plan: LaunchPlan
    at: float


class GatherFailed(NamedTuple):
    """There is no plan for this generation; `why` is a sentence."""

    attempt: int
    why: str
    exit_code: int
    at: float

    def describe(self) -> str:
        """Return one line of text."""
        again = " again" if self.attempt else ""
        return f"the job could not be started{again}: {self.why.rstrip('.')}"


class Started(NamedTuple):
    """A process runs."""

    process: int
    label: str
    pid: int
    at: float
    attempt: int = 0


class Exited(NamedTuple):
    """A process ended, or could not be started because of `fault`."""

    process: int
    label: str
    status: ExitStatus
    at: float
    pid: int | None = None
    attempt: int = 0
    fault: str = ""
    # Other processes that had failed by then: they had raised, or their exits are not handled yet.
    also_failed: frozenset[int] = frozenset()
    # When it raised its exception, possibly long before it ended.
    failed_at: float | None = None
    # The exit code that the exception leads to.
    raised: int | None = None
    # Whether its last lines look like the loss of a peer.
    is_victim: bool = False
    # For the decision about another attempt: why none can help, the log's last line, the last step
    # if known, and how long this attempt ran.
    no_retry: str = ""
    last_words: str = ""
    step: int | None = None
    lived_s: float = 0.0
    # Its peak memory, and whether it left a core dump.
    peak_bytes: int | None = None
    has_core: bool = False
    # Its coordinates in fleet's topology: `dp 1, mp 0`.
    place: str = ""
    # The exception that ended it, in one line: `ValueError: bad (train.py:5)`.
    error: str = ""

    @property
    def name(self) -> str:
        """The label with the rank's place in fleet's topology, if known."""
        return f"{self.label} ({self.place})" if self.place else self.label

    def describe(self) -> str:
        """Return text such as `rank 1 exited with 7`."""
        if self.fault:
            return f"{self.name} could not be started: {self.fault}"
        if self.status.signum is not None:
            return f"{self.name} was killed by {signal_name(self.status.signum)}"
        return f"{self.name} exited with {self.status.exit_code}"

    def reason(self) -> str:
        """Return text such as `rank 1 failed: ValueError: bad (train.py:5)`."""
        return f"{self.name} failed: {self.error}" if self.error else self.describe()


class Overdue(NamedTuple):
    """A process has raised, which led to the end `exited`, and has not ended for too long."""

    exited: Exited
    at: float


class RootCauses(NamedTuple):
    """These exits, completed from error files and logs: when each process failed, and why."""

    exits: tuple[Exited, ...]
    at: float


class Interrupted(NamedTuple):
    """The launcher got a signal."""

    signum: int
    at: float


class Hung(NamedTuple):
    """No process has made progress for too long; `places` says which labels stand where."""

    seconds: float
    at: float
    places: tuple[tuple[tuple[str, ...], str], ...] = ()
    # The labels of processes whose stacks differ from the others'.
    odd: tuple[str, ...] = ()
    # The files with all stacks.
    stacks: str = ""
    exit_code: int = HUNG
    # From the ranks' collectives: the labels at fault, and a sentence without a full stop.
    collectives: tuple[tuple[tuple[str, ...], str], ...] = ()

    def describe(self) -> str:
        """Return one line of text."""
        where = f", {' and '.join(self.odd)} unlike the rest" if self.odd else ""
        if self.collectives:
            where = f": {self.collectives[0][1]}"
        return f"the job hung for {self.seconds:.0f} s{where}"

    def reason(self) -> str:
        """Return why another attempt follows."""
        return self.describe()


class StacksRequested(NamedTuple):
    """The launcher was asked for the stacks of all processes."""

    at: float


class RunWarning(NamedTuple):
    """An observation about `labels`: stopped, continued, stacks, checkpoint or desync."""

    what: str
    text: str
    at: float
    labels: tuple[str, ...] = ()


class Recovered(NamedTuple):
    """Another attempt runs, `seconds` after the one before failed; `why` says of what."""

    attempt: int
    seconds: float
    at: float
    why: str = ""

    def describe(self) -> str:
        """Return one line of text."""
        return f"Attempt {self.attempt} runs: the restart took {self.seconds:.2f} s ({self.why})"


class StrategyReport(NamedTuple):
    """What the ranks' evidence says about the strategy; without consequences."""

    verdicts: tuple[FieldVerdict, ...]
    at: float
    # The labels of ranks that left no evidence, or made no update to count.
    silent: tuple[str, ...] = ()
    # None: the ranks' parameters were not compared.
    ranks_equal: bool | None = None


class StrategyRejected(NamedTuple):
    """The strategy, which must be in effect, is not; `faults` says where."""

    faults: tuple[str, ...]
    at: float
    exit_code: int = STRATEGY_REJECTED
    # Whether some ranks apply it and others cannot, so they would wait for each other.
    is_split: bool = False

    def describe(self) -> str:
        """Return one line of text."""
        more = len(self.faults) - 1
        rest = f", and {more} more" if more > 0 else ""
        return f"the strategy is not in effect: {self.faults[0]}{rest}"


class Failure(NamedTuple):
    """What went wrong on a host, as hosts tell each other.

    `what` is a sentence without its full stop, `words` are the last lines.
    """

    host: str
    what: str
    exit_code: int
    words: Lines = ""
    # Whether it looks like the loss of a peer.
    is_victim: bool = False
    # Why no other attempt can help; empty: one may.
    no_retry: str = ""
    # Whether nothing failed and only the set of hosts changes.
    is_departure: bool = False
    # Whether the whole job hung, of which `host` only compares the ranks.
    is_hang: bool = False
    # `what` with the exception that ended the rank, if that is known.
    why: str = ""

    def check(self) -> None:
        """Raise ValueError if no launcher can have sent this."""
        if not 0 <= self.exit_code <= 255:
            raise ValueError(self.exit_code)
        for text in (self.host, self.what, self.words, self.no_retry, self.why):
            if len(text) > LONGEST_TEXT:
                raise ValueError(text[:80])

    def describe(self) -> str:
        """Return one line of text."""
        return self.what if self.is_hang else f"{self.what} on {self.host}"

    def reason(self) -> str:
        """Return why another attempt follows."""
        return f"{self.why} on {self.host}" if self.why else self.describe()


class StopRequested(NamedTuple):
    """The attempt failed on another host, so it stops here; `failure` is what is known so far."""

    failure: Failure
    at: float
    attempt: int = 0


class JobVerdict(NamedTuple):
    """How the attempt ended on all hosts; `failure` is None if it succeeded or failed here first.

    If `is_final`, no attempt follows; `given_up` says why, if the rules would allow one.
    """

    failure: Failure | None
    at: float
    attempt: int = 0
    is_final: bool = True
    given_up: str = ""
    # Whether the first failure of all was on this host.
    is_here: bool = False


class SourceFailed(NamedTuple):
    """A source of events has failed, which ends the job if the source `is_required`."""

    source: str
    why: str
    at: float
    is_required: bool = True
    exit_code: int = 1

    def describe(self) -> str:
        """Return one line of text."""
        return f"{self.source} failed ({self.why})"


# The failures after which another attempt may follow, and everything that may end a job.
Retried: TypeAlias = Exited | Hung | Failure
Cause: TypeAlias = Retried | Interrupted | StrategyRejected | SourceFailed | GatherFailed


class Outcome(NamedTuple):
    """How a job ended: its first failure, and each exit in the order observed."""

    cause: Cause | None
    exits: tuple[Exited, ...] = ()
    attempts: int = 1
    # What ended each attempt but the last.
    earlier: tuple[Retried, ...] = ()
    # Processes that even SIGKILL did not end.
    stuck: tuple[int, ...] = ()
    # Why no further attempt was made, although the rules allow one.
    given_up: str = ""

    @property
    def exit_code(self) -> int:
        """The culprit's exit code, or 128 + the signal that killed it or interrupted us."""
        if self.cause is None:
            return 0
        if isinstance(self.cause, Interrupted):
            return 128 + self.cause.signum
        if isinstance(self.cause, Exited):
            return self.cause.status.exit_code
        return self.cause.exit_code

    def describe(self) -> str:
        """Return one line of text."""
        if self.cause is None:
            return "all processes finished"
        if isinstance(self.cause, Interrupted):
            return f"interrupted by {signal_name(self.cause.signum)}"
        return self.cause.describe()


class TimerExpired(NamedTuple):
    """The deadline set by a policy has passed."""

    at: float


class Finished(NamedTuple):
    """The job is over; none of its processes runs."""

    outcome: Outcome
    at: float


class Gather(NamedTuple):
    """Gather the hosts and plan; answered, now or later, by Gathered or GatherFailed."""

    attempt: int


class Spawn(NamedTuple):
    """Start a process; answered at once by Started or Exited."""

    process: int
    attempt: int


class SignalAll(NamedTuple):
    """Send a signal to every living process group."""

    signum: int

    @property
    def ends_ranks(self) -> bool:
        """Whether the signal ends ranks that do not catch it: SIGHUP, SIGINT, SIGKILL, SIGTERM."""
        return self.signum in {1, 2, 9, 15}


class Examine(NamedTuple):
    """Determine when and why these processes failed; answered at once by RootCauses."""

    exits: tuple[Exited, ...]


class HostStopped(NamedTuple):
    """Tell the other hosts that this one has stopped; JobVerdict follows when all have."""

    attempt: int
    cause: Cause
    # Why no other attempt can help.
    no_retry: str


class Sweep(NamedTuple):
    """Kill all descendants that outlived their ranks."""


_OfHosts: TypeAlias = Gathered | GatherFailed | StopRequested | JobVerdict
_OfRanks: TypeAlias = Started | Exited | Overdue | RootCauses | Hung | StrategyRejected
Event: TypeAlias = _OfHosts | _OfRanks | Interrupted | TimerExpired | SourceFailed
# What sources may declare.
Declared: TypeAlias = Event | RunWarning | StrategyReport
Action: TypeAlias = Gather | Spawn | SignalAll | Examine | HostStopped | Sweep
# What sinks and sources are notified of.
Happening: TypeAlias = Declared | SignalAll | HostStopped | Finished | StacksRequested | Recovered
