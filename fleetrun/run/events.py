"""What can happen to a job, what can be done about it, and how it ended.

`policy.step` takes an event and returns actions; sinks and sources are notified of both.
"""

from typing import Annotated, NoReturn, TypeAlias

from fleetrun.model import ExitStatus, FieldVerdict, LaunchPlan
from fleetrun.namedtuples import NamedTuple

# Linux numbers them from 1, on every machine that Paddle runs on.
_SIGNAL_NAMES = """
HUP INT QUIT ILL TRAP ABRT BUS FPE KILL USR1 SEGV USR2 PIPE ALRM TERM STKFLT CHLD CONT STOP TSTP
TTIN TTOU URG XCPU XFSZ VTALRM PROF WINCH IO PWR SYS
"""
_SIGNALS = tuple(_SIGNAL_NAMES.split())
# The annotation of a text of several lines, of a message between launchers; any other has one.
Lines: TypeAlias = Annotated[str, "lines"]
# For the last lines of a rank, not for its log.
LONGEST_TEXT = 16 * 1024
_LAST_CODE = 255
# The exit code of a job that hung, as `timeout` has it.
HUNG = 124
# The exit code of a job whose strategy is not in effect, with --strategy_strict.
REFUTED = 5


def signal_name(signum: int) -> str:
    """Name a signal as people write it.

    >>> signal_name(15), signal_name(11), signal_name(40)
    ('SIGTERM', 'SIGSEGV', 'signal 40')
    """
    known = 1 <= signum <= len(_SIGNALS)
    return f"SIG{_SIGNALS[signum - 1]}" if known else f"signal {signum}"


class Gathered(NamedTuple):
    """A generation begins: the hosts are known, and `plan` is what runs on this one."""

    attempt: int
    plan: LaunchPlan
    at: float


class GatherFailed(NamedTuple):
    """There can be no plan for this generation: `why` is a sentence."""

    attempt: int
    why: str
    exit_code: int
    at: float

    def describe(self) -> str:
        """Return one line of text.

        >>> GatherFailed(1, "Port 6070 is taken.", 3, 9.0).describe()
        'the job could not be started again: Port 6070 is taken'
        """
        again = " again" if self.attempt else ""
        return f"the job could not be started{again}: {self.why.rstrip('.')}"


class Started(NamedTuple):
    """A process of the plan, counted from 0, runs; `at` is in monotonic seconds, always."""

    process: int
    label: str
    pid: int
    at: float
    attempt: int = 0
    # From a process with Paddle imported, and not started from nothing.
    is_forked: bool = False


class Exited(NamedTuple):
    """A process ended, or could not be started, and then `fault` says why."""

    process: int
    label: str
    status: ExitStatus
    at: float
    pid: int | None = None
    attempt: int = 0
    fault: str = ""
    # Others that had failed by then: they had raised an exception, or their ends were not seen yet.
    also_failed: frozenset[int] = frozenset()
    # When it failed, which is not when it ended: it may have raised an exception long before.
    failed_at: float | None = None
    # The code that this exception gives a process.
    raised: int | None = None
    # Whether its last lines are those of a process that lost its peer.
    is_victim: bool = False
    # What a decision about another attempt needs: why none can help, the last line of the log,
    # the step that was reached (None: unknown), and how long this attempt ran.
    no_retry: str = ""
    last_words: str = ""
    step: int | None = None
    lived_s: float = 0.0
    # Its peak memory, and whether it left a core dump.
    peak_bytes: int | None = None
    has_core: bool = False
    # Where fleet's topology has it: `dp 1, mp 0`.
    place: str = ""

    @property
    def name(self) -> str:
        """The label, and where the rank is in fleet's topology if that is known."""
        return f"{self.label} ({self.place})" if self.place else self.label

    def describe(self) -> str:
        """Return text such as `rank 1 exited with 7`."""
        if self.fault:
            return f"{self.name} could not be started: {self.fault}"
        if self.status.signum is not None:
            return f"{self.name} was killed by {signal_name(self.status.signum)}"
        return f"{self.name} exited with {self.status.exit_code}"


class Ready(NamedTuple):
    """What a process awaits before its start is there, or the wait has timed out."""

    process: int
    at: float
    attempt: int = 0


class Examined(NamedTuple):
    """What error files and logs say about these exits: when each process failed, and why."""

    exits: tuple[Exited, ...]
    at: float


class Interrupted(NamedTuple):
    """The launcher got a signal."""

    signum: int
    at: float


class Hung(NamedTuple):
    """No process has shown any life for too long; `places` says which labels stand where."""

    seconds: float
    at: float
    places: tuple[tuple[tuple[str, ...], str], ...] = ()
    # The labels of processes that stand unlike the rest.
    odd: tuple[str, ...] = ()
    # The files that have all stacks.
    stacks: str = ""
    exit_code: int = HUNG
    # What did not come: `life`; `steps`, of which ranks had reported some; or other `stacks`,
    # although processors were busy.
    sign: str = "life"
    # Forked children that wait for locks which nobody can release: whose, which, and where.
    deadlocked: tuple[tuple[str, int, str], ...] = ()
    # Who does not reach which endpoint, each a sentence without its end.
    unreached: tuple[str, ...] = ()
    # What the ranks' collectives say: the labels of those at fault, and a sentence without its end.
    collectives: tuple[tuple[tuple[str, ...], str], ...] = ()

    def describe(self) -> str:
        """Return one line of text.

        >>> Hung(30.0, at=99.0, odd=("rank 1",)).describe()
        'the job hung for 30 s, rank 1 unlike the rest'
        >>> Hung(30.0, at=99.0, unreached=("rank 1 does not reach 10.0.0.1:6070",)).describe()
        'the job hung for 30 s, rank 1 does not reach 10.0.0.1:6070'
        >>> Hung(30.0, 9.0, collectives=((("rank 1",), "rank 1 never entered ..."),)).describe()
        'the job hung for 30 s: rank 1 never entered ...'
        """
        where = f", {' and '.join(self.odd)} unlike the rest" if self.odd else ""
        if self.collectives:
            where = f": {self.collectives[0][1]}"
        if self.unreached:
            where = f", {self.unreached[0]}"
        return f"the job hung for {self.seconds:.0f} s{where}"


class StacksWanted(NamedTuple):
    """The launcher was asked for the stacks of all processes."""

    at: float


class Noticed(NamedTuple):
    """An observation without consequences: `what` is its kind, `labels` the processes concerned.

    `what` is one of stopped, continued, straggler, stacks, went on, ended, task lost, fork server,
    checkpoint, desync.
    """

    what: str
    text: str
    at: float
    labels: tuple[str, ...] = ()


class Recovered(NamedTuple):
    """The ranks of ATTEMPT run again: the phases since the failure, with the seconds of each."""

    attempt: int
    failed_at: float
    # detected, stopped, agreed, started; and, where it is known, imported and first step.
    phases: tuple[tuple[str, float], ...]
    # None: unknown, as no script has told its steps.
    lost_steps: int | None
    at: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return sum(seconds for _, seconds in self.phases)

    def describe(self) -> str:
        """Return one line of text.

        >>> Recovered(1, 9.0, (("detected", 0.01), ("first step", 1.2)), 3, 12.0).describe()
        'Attempt 1 runs 1.21 s after the failure: detected 0.01, first step 1.20 s; 3 steps lost'
        """
        said = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.phases)
        steps = f"{self.lost_steps} step{'s' * (self.lost_steps != 1)}"
        lost = "" if self.lost_steps is None else f"; {steps} lost"
        return f"Attempt {self.attempt} runs {self.seconds:.2f} s after the failure: {said} s{lost}"


class Judged(NamedTuple):
    """What the ranks' evidence says about the strategy, with no consequences."""

    verdicts: tuple[FieldVerdict, ...]
    at: float
    # The labels of ranks that left no evidence, or made no update that could be counted.
    silent: tuple[str, ...] = ()
    # None: the ranks' parameters were not compared.
    ranks_equal: bool | None = None


class Refuted(NamedTuple):
    """The strategy is not in effect as asked, and that is not good enough; `faults` says where."""

    faults: tuple[str, ...]
    at: float
    exit_code: int = REFUTED

    def describe(self) -> str:
        """Return one line of text.

        >>> Refuted(("rank 0: nccl_comm_num is refused", "rank 1 left no evidence"), 9.0).describe()
        'the strategy is not in effect: rank 0: nccl_comm_num is refused, and 1 more'
        """
        more = len(self.faults) - 1
        rest = f", and {more} more" if more > 0 else ""
        return f"the strategy is not in effect: {self.faults[0]}{rest}"


class Failure(NamedTuple):
    """What went wrong on a host: `what` is a sentence without its end, `words` the last lines.

    All hosts tell each other of failures like this.
    """

    host: str
    what: str
    exit_code: int
    words: Lines = ""
    # Whether it looks like the loss of a peer.
    is_victim: bool = False
    # Why no other attempt can help; empty: one may.
    no_retry: str = ""
    # Whether it changes who takes part, and nothing failed.
    is_departure: bool = False

    def check(self) -> None:
        """Raise ValueError where no launcher can have said it."""
        if not 0 <= self.exit_code <= _LAST_CODE:
            raise ValueError(self.exit_code)
        for text in (self.host, self.what, self.words, self.no_retry):
            if len(text) > LONGEST_TEXT:
                raise ValueError(text[:80])

    def describe(self) -> str:
        """Return one line of text.

        >>> Failure("10.0.0.2", "server 1 exited with 7", 7).describe()
        'server 1 exited with 7 on 10.0.0.2'
        """
        return f"{self.what} on {self.host}"


class StopRequested(NamedTuple):
    """The attempt has failed on another host, as far as is known by `failure`: it stops here, too.

    When `is_fenced`, the others may start again without this host: its processes are killed.
    """

    failure: Failure
    at: float
    attempt: int = 0
    is_fenced: bool = False


class JobVerdict(NamedTuple):
    """How the attempt has ended on all hosts: of `failure`; None: well, or of what failed here.

    When `is_final`, there is no other attempt; `given_up` is why, if the rules allow one.
    """

    failure: Failure | None
    at: float
    attempt: int = 0
    is_final: bool = True
    given_up: str = ""
    # Whether what failed here was the first failure of all.
    is_here: bool = False


class SourceFailed(NamedTuple):
    """A source of events has failed; the failure of one that `is_required` ends the job.

    `without` completes the sentence "the job goes on ...", or "cannot go on ...".
    """

    source: str
    why: str
    without: str
    at: float
    is_required: bool = True
    exit_code: int = 1

    def describe(self) -> str:
        """Return one line of text.

        >>> SourceFailed("the strategy proof", "a bug", "without its proof", 9.0).describe()
        'the strategy proof failed (a bug)'
        """
        return f"{self.source} failed ({self.why})"

    def sentence(self) -> str:
        """Return a sentence with the consequence.

        >>> SourceFailed("the hang watch", "a bug", "without it", 9.0, False).sentence()
        'The hang watch failed (a bug); the job goes on without it.'
        """
        said = self.describe()
        consequence = ", and the job cannot go on" if self.is_required else "; the job goes on"
        return f"{said[:1].upper()}{said[1:]}{consequence} {self.without}."


# Failures that another attempt may follow, and everything that may end a job.
Retried: TypeAlias = Exited | Hung | Failure
Cause: TypeAlias = Retried | Interrupted | Refuted | SourceFailed | GatherFailed


class Outcome(NamedTuple):
    """How a job ended: the first failure, and every exit in the order in which it was seen."""

    cause: Cause | None
    exits: tuple[Exited, ...] = ()
    attempts: int = 1
    # What ended the attempts before the last one.
    earlier: tuple[Retried, ...] = ()
    # Processes that even SIGKILL did not end.
    stuck: tuple[int, ...] = ()
    # Why there was no further attempt, although the rules allow one.
    given_up: str = ""

    @property
    def exit_code(self) -> int:
        """The culprit's own code, or 128 + the signal that killed it or interrupted us."""
        if self.cause is None:
            return 0
        if isinstance(self.cause, Interrupted):
            return 128 + self.cause.signum
        if isinstance(self.cause, Exited):
            return self.cause.status.exit_code
        return self.cause.exit_code

    def describe(self) -> str:
        """Return one line of text.

        >>> from fleetrun.model import ExitStatus
        >>> Outcome(Exited(1, "rank 1", ExitStatus(7), at=2.5)).describe()
        'rank 1 exited with 7'
        """
        if self.cause is None:
            return "all processes finished"
        if isinstance(self.cause, Interrupted):
            return f"interrupted by {signal_name(self.cause.signum)}"
        return self.cause.describe()


class Elapsed(NamedTuple):
    """The deadline that a policy, a coordinator or a member of a session had set has passed."""

    at: float


class Finished(NamedTuple):
    """The job is over: none of its processes runs any more."""

    outcome: Outcome
    at: float


class Spawn(NamedTuple):
    """Start the process of this index in the plan; answered at once by Started or Exited."""

    process: int
    attempt: int


class Await(NamedTuple):
    """Wait until what this process needs listens; the answer is Ready."""

    process: int
    attempt: int


class SignalAll(NamedTuple):
    """Send a signal to every process group that is alive, but those that are `spared`."""

    signum: int
    spared: frozenset[int] = frozenset()

    @property
    def ends_ranks(self) -> bool:
        """Whether ranks end by it, if they do not catch it: SIGHUP, SIGINT, SIGKILL or SIGTERM."""
        return self.signum in {1, 2, 9, 15}


class Gather(NamedTuple):
    """Gather the hosts and plan; answered by Gathered or GatherFailed, perhaps later."""

    attempt: int


class StopGathering(NamedTuple):
    """Gathering timed out; answered at once by GatherFailed."""

    attempt: int


class Examine(NamedTuple):
    """Find out when and why these processes failed; answered at once by Examined."""

    exits: tuple[Exited, ...]


class HostStopped(NamedTuple):
    """Tell the other hosts that all has stopped here; JobVerdict follows when it has everywhere.

    `cause` is what went wrong here, `no_retry` why no other attempt can help.
    """

    attempt: int
    cause: Cause
    no_retry: str


class Sweep(NamedTuple):
    """Kill all descendants that outlived their ranks."""


class Finish(NamedTuple):
    """Stop supervising; this is how it went."""

    outcome: Outcome


Event: TypeAlias = (
    Gathered
    | GatherFailed
    | Started
    | Ready
    | Exited
    | Examined
    | Interrupted
    | Elapsed
    | Hung
    | Refuted
    | StopRequested
    | JobVerdict
    | SourceFailed
)
# What sources may declare.
Declared: TypeAlias = (
    Hung | Noticed | Recovered | Judged | Refuted | StopRequested | JobVerdict | SourceFailed
)
Action: TypeAlias = (
    Gather | StopGathering | Spawn | Await | SignalAll | Examine | HostStopped | Sweep | Finish
)
# What sinks and sources are notified of.
Happening: TypeAlias = (
    Event | SignalAll | HostStopped | Finished | StacksWanted | Noticed | Recovered | Judged
)


def assert_never(value: NoReturn) -> NoReturn:
    """Close a `match` over all events or actions; Python 3.10 has no `typing.assert_never`."""
    message = f"this case should not exist: {value!r}"
    raise AssertionError(message)
