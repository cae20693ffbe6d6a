"""Decides from samples whether all ranks hang, and whether some lag behind the others; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

# Waiting ranks wake up now and then; a rank that computes uses far more processor time than this.
IDLE_SHARE = 0.02
# Between two looks a log or a progress file takes less of a disk than this, a checkpoint more.
_NOISE_BYTES = 65536
# Between two looks keepalives, leases and metrics send and receive less than the first; however
# rarely we look, less than the second in each second. A download is faster than that.
_CHATTER_BYTES = 16384
_CHATTER_BYTES_PER_S = 4096
# The kernel counts in steps of 10 ms, and one step may be anybody's.
_TICK_S = 0.015


NO_TRAFFIC: Mapping[int, int] = {}


class Sample(NamedTuple):
    """A cheap sample of one rank: its leader, its log and its heartbeat file.

    `beat` changes with each heartbeat, and is 0 before the first one of this attempt.
    """

    state: str
    cpu_s: float
    output: int
    beat: int


class DeepSample(NamedTuple):
    """A sample of one rank that needs a look at all processes."""

    # Processor time of each process of the rank.
    cpu_s: Mapping[int, float]
    # Bytes sent to disks.
    written: int
    # Whether a process of it waits for a disk, in uninterruptible sleep.
    is_in_disk_wait: bool
    # Whether a process of it waits for input at a terminal.
    is_at_prompt: bool = False
    # Bytes that each of its TCP connections has sent and received; empty: unknown.
    traffic: Mapping[int, int] = NO_TRAFFIC


class IdleClock:
    """Measures for how long no rank has shown activity.

    A heartbeat, many bytes written to a disk, or a wait for a disk always count. Output, few bytes
    to a disk, many bytes over TCP, and processor time count only until the first heartbeat. Ranks
    with heartbeats are judged by these alone, as they may spin while they wait for each other, or
    have a thread that logs.
    """

    def __init__(self, timeout_s: float) -> None:
        self.period_s = max(0.05, min(timeout_s / 4, 5.0))
        self._timeout_s = timeout_s
        self._since = 0.0
        self._at: float | None = None
        self._signs: Mapping[int, Sample] = {}
        self._depths: Mapping[int, DeepSample] | None = None
        self._depths_at = 0.0
        self._has_compared = False

    def restart(self, at: float) -> None:
        """Begin again: the ranks are new, or were stopped."""
        self._at = None
        self.revive(at)

    @property
    def has_beats(self) -> bool:
        """Whether any rank has reported progress."""
        return any(one.beat for one in self._signs.values())

    def silent_s(self, at: float) -> float:
        """Return the seconds without activity."""
        return at - self._since

    def look(self, signs: Mapping[int, Sample], at: float) -> bool:
        """Take the cheap samples; return whether deep samples are needed."""
        before, before_at = self._signs, self._at
        self._signs, self._at = signs, at
        if before_at is None or at - before_at > 3 * self.period_s + 1.0:
            # The first look, or the launcher itself was stopped meanwhile.
            self.revive(at)
            return False
        enough = _enough(at - before_at)
        for rank, now in signs.items():
            past = before.get(rank)
            if past is None or now.beat != past.beat:
                break
            if not self.has_beats and now.output != past.output:
                break
            # A user or a debugger has stopped it on purpose.
            if now.state in "Tt" or (not self.has_beats and now.cpu_s - past.cpu_s > enough):
                break
        else:
            return True
        self.revive(at)
        return False

    def look_closer(self, depths: Mapping[int, DeepSample], at: float) -> None:
        """Take the deep samples that `look` needed."""
        before, before_at = self._depths, self._depths_at
        self._depths, self._depths_at = depths, at
        self._has_compared = before is not None
        minds_all = not self.has_beats
        noise = _NOISE_BYTES if self.has_beats else 0
        for rank, now in depths.items():
            past = None if before is None else before.get(rank)
            if (
                now.is_in_disk_wait
                or now.is_at_prompt
                or (past is not None and now.written - past.written > noise)
            ):
                self._since = at
            if minds_all and past is not None:
                # A process that has ended takes its count with it; a new one brings its own.
                used = sum(now.cpu_s[pid] - past.cpu_s.get(pid, 0.0) for pid in now.cpu_s)
                moved = sum(now.traffic[one] - past.traffic.get(one, 0) for one in now.traffic)
                if used > _enough(at - before_at) or moved > _chatter(at - before_at):
                    self._since = at

    def revive(self, at: float) -> None:
        """Restart the count: there was activity, or it could not be observed."""
        self._since, self._depths, self._has_compared = at, None, False

    def is_hung(self, at: float) -> bool:
        """Whether the timeout has passed."""
        return self._has_compared and self.silent_s(at) >= self._timeout_s


def _enough(seconds: float) -> float:
    """Return the processor time within SECONDS that counts as activity."""
    return max(_TICK_S, seconds * IDLE_SHARE)


def _chatter(seconds: float) -> float:
    """Return how many bytes over TCP within SECONDS do not count as activity yet."""
    return max(_CHATTER_BYTES, seconds * _CHATTER_BYTES_PER_S)


class Lag(NamedTuple):
    """Stragglers: some ranks are idle while all others are busy, or the reverse."""

    ranks: tuple[int, ...]
    others: tuple[int, ...]
    is_idle: bool
    seconds: float


class Comparison:
    """Finds stragglers by the processor time of the ranks, sampled from time to time."""

    # More than this of a processor is busy, even where ranks have to share them; less than the
    # other is idle; between them is neither.
    busy_share = 0.25
    idle_share = 0.05
    # A line about the same ranks is not repeated sooner; each time it waits twice as long.
    again_s = 60.0

    def __init__(self, period_s: float = 5.0, window_s: float = 30.0) -> None:
        self._period_s = period_s
        # How long it takes to be worth a line; a collective or a batch is shorter.
        self._window_s = window_s
        self._cpu_s: Mapping[int, float] = {}
        self._at: float | None = None
        self._busy_since: dict[int, float] = {}
        self._idle_since: dict[int, float] = {}
        # When a line about these ranks may come again, and how long after that the next one.
        self._reported: dict[tuple[tuple[int, ...], bool], tuple[float, float]] = {}

    def restart(self) -> None:
        """Begin again: the ranks are new, or were stopped."""
        self._at = None
        self._busy_since.clear()
        self._idle_since.clear()

    def see(self, cpu_s: Mapping[int, float], at: float) -> Lag | None:
        """Take the processor time of each rank; return the stragglers if that is new."""
        before, before_at = self._cpu_s, self._at
        self._cpu_s, self._at = cpu_s, at
        if (
            before_at is None
            or before.keys() != cpu_s.keys()
            or at - before_at > 3 * self._period_s
        ):
            self.restart()
            self._at = at
            return None
        for rank, used in cpu_s.items():
            share = (used - before[rank]) / max(at - before_at, 1e-3)
            _mark(self._busy_since, rank, before_at, holds=share > self.busy_share)
            _mark(self._idle_since, rank, before_at, holds=share < self.idle_share)
        return self._lag(frozenset(cpu_s), at)

    def _lag(self, ranks: frozenset[int], at: float) -> Lag | None:
        busy = frozenset(r for r, since in self._busy_since.items() if at - since >= self._window_s)
        idle = frozenset(r for r, since in self._idle_since.items() if at - since >= self._window_s)
        if not busy or not idle or busy | idle != ranks:
            return None
        few = max(1, len(ranks) // 4)
        is_idle = len(idle) <= len(busy)
        odd, others = (idle, busy) if is_idle else (busy, idle)
        if len(odd) > few:
            return None
        key = (tuple(sorted(odd)), is_idle)
        due, pause = self._reported.get(key, (at, self.again_s))
        if at < due:
            return None
        self._reported[key] = (at + pause, pause * 2)
        began = max(since[r] for since in (self._busy_since, self._idle_since) for r in since)
        return Lag(key[0], tuple(sorted(others)), is_idle, at - began)


def _mark(since: dict[int, float], rank: int, at: float, *, holds: bool) -> None:
    if holds:
        since.setdefault(rank, at)
    else:
        since.pop(rank, None)


def stopped(states: Mapping[int, str]) -> tuple[int, ...]:
    """Return the ranks that are stopped (SIGSTOP, or a debugger).

    >>> stopped({0: "S", 1: "T", 2: "t"})
    (1, 2)
    """
    return tuple(sorted(rank for rank, state in states.items() if state in "Tt"))
