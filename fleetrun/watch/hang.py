"""Decides from samples whether all ranks hang, and whether some lag behind the others; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# Waiting ranks wake up occasionally; a rank that computes uses far more processor time.
IDLE_SHARE = 0.02
# Above this share, a program without a Python stack computes; a sidecar that reports metrics stays
# below.
_BUSY_SHARE = 0.25
# Between two samples a log or a progress file writes less than this to disk, a checkpoint more.
_NOISE_BYTES = 65536
# Logs, metrics and stack dumps move less than this through the page cache; reading a data set, or
# writing a checkpoint to a file system in memory, moves more.
_MOVED_BYTES_PER_S = 65536
# A compiler keeps touching new memory (256 pages are 1 MiB); a waiting loop does not.
_FAULTS_PER_S = 256
# The kernel counts in steps of 10 ms, and a single step proves nothing.
_TICK_S = 0.015
# Stacks are sampled when this part of the timeout has passed without any sign but processor time,
# and again each time it has.
_SAMPLE = 1 / 8
# A kernel that waits, such as NCCL's, keeps a GPU at 0 or 100 percent all the time and reads hardly
# any of its memory; kernels that begin and end leave it between (percentages of NVML).
_MOST_WAITING_MEMORY, _LEAST_WAITING = 1, 98


class Sample(NamedTuple):
    """A cheap sample of one rank: its leader, its log and its heartbeat file.

    `beat` changes with each heartbeat, and is 0 before the first one of this attempt. `is_scripts`
    says that the script wrote it, and not our callback after an update.
    """

    state: str
    cpu_s: float
    output: int
    beat: int
    is_scripts: bool = True
    # A number that changes with each recorded collective.
    calls: int = 0


class DeepSample(NamedTuple):
    """A sample of one rank that needs a look at all processes."""

    # Processor time of each process of the rank, with that of children that have ended.
    cpu_s: Mapping[int, float]
    # Bytes sent to disks.
    written: int
    # Of its processes that wait for a disk, in uninterruptible sleep: how often each has slept. The
    # number stays if a file server is gone.
    disk_waits: Mapping[int, int] = {}
    # By process, the threads that run or wait for a processor: for how many seconds they have until
    # they ran last, and how often they have run.
    runnable: Mapping[int, Mapping[int, tuple[float, int]]] = {}
    # Whether a process of it waits for input at a terminal.
    is_at_prompt: bool = False
    # The part of children that have ended.
    reaped_s: float = 0.0
    # Bytes got from disks, bytes read and written by whatever way, and page faults.
    fetched: int = 0
    moved: int = 0
    faults: int = 0


class GpuLoad(NamedTuple):
    """What NVML reports about one GPU: percentages of the last second, and bytes in use."""

    kernels: int
    memory: int
    used: int


def works(load: GpuLoad) -> bool:
    """Whether a GPU does more than wait in a kernel.

    >>> works(GpuLoad(100, 0, 5)), works(GpuLoad(100, 40, 5)), works(GpuLoad(37, 0, 5))
    (False, True, True)
    """
    return load.memory > _MOST_WAITING_MEMORY or 0 < load.kernels < _LEAST_WAITING


class IdleClock:
    """Measures for how long no rank has shown activity.

    There are two clocks. Heartbeats, new collectives, bytes read or written, and waiting for a disk
    restart both, and so does output until the first heartbeat. Processor time restarts only the
    clock of silence, since ranks may spin while they wait for each other. A rank that gets no
    processor, though it could use one, restarts both: neither its silence nor its stack tells. The
    other clock runs as long as the Python stacks of all ranks, where they can be sampled, stay the
    same.

    Ranks that write heartbeats themselves are judged only by these and by heavy writing to a disk.
    """

    def __init__(self, timeout_s: float) -> None:
        self.period_s = max(0.05, min(timeout_s / 4, 5.0))
        self._timeout_s = timeout_s
        # Since when there has been no sign at all, and none but processor time.
        self._since = 0.0
        self._still_since = 0.0
        self._at: float | None = None
        self._signs: Mapping[int, Sample] = {}
        self._depths: Mapping[int, DeepSample] | None = None
        self._depths_at = 0.0
        self._has_compared = False
        # The stacks that were seen last, by process id.
        self._stacks: Mapping[int, object] | None = None
        self._stacks_at = 0.0
        self._loads: Mapping[str, GpuLoad] = {}

    def restart(self, at: float) -> None:
        """Begin again: the ranks are new, or were stopped."""
        self._at = None
        self.revive(at)

    @property
    def has_beats(self) -> bool:
        """Whether any rank has reported progress."""
        return any(sample.beat for sample in self._signs.values())

    @property
    def has_promises(self) -> bool:
        """Whether a script reports its own progress, and so has defined what counts."""
        return any(sample.beat and sample.is_scripts for sample in self._signs.values())

    def silent_s(self, at: float) -> float:
        """Return the seconds without activity."""
        return at - (self._since if self._is_silent(at) else self._still_since)

    def still_s(self, at: float) -> float:
        """Return the seconds without activity other than processor time."""
        return at - self._still_since

    def look(self, signs: Mapping[int, Sample], at: float) -> bool:
        """Take the cheap samples; return whether deep samples are needed."""
        before, before_at = self._signs, self._at
        self._signs, self._at = signs, at
        if before_at is None or at - before_at > 3 * self.period_s + 1.0:
            # The first sample, or the launcher itself was stopped meanwhile.
            self.revive(at)
            return False
        enough = _enough(at - before_at)
        is_busy = False
        for rank, now in signs.items():
            past = before.get(rank)
            if past is None or now.beat != past.beat:
                break
            if not self.has_beats and now.output != past.output:
                break
            if not self.has_promises and now.calls != past.calls:
                break
            # A user or a debugger has stopped it on purpose.
            if now.state in "Tt":
                break
            is_busy = is_busy or now.cpu_s - past.cpu_s > enough
        else:
            if not is_busy or self.has_promises:
                return True
            self._since, self._has_compared = at, False
            return at - self._still_since >= self._timeout_s * _SAMPLE
        self.revive(at)
        return False

    def look_closer(self, depths: Mapping[int, DeepSample], at: float) -> None:
        """Take the deep samples that `look` needed."""
        before, before_at = self._depths, self._depths_at
        self._depths, self._depths_at = depths, at
        self._has_compared = before is not None
        seconds = at - before_at
        noise = _NOISE_BYTES if self.has_beats else 0
        for rank, now in depths.items():
            past = None if before is None else before.get(rank)
            if (
                now.disk_waits.items() - (past.disk_waits.items() if past is not None else ())
                or now.is_at_prompt
                or (past is not None and now.written - past.written > noise)
            ):
                self._work(at)
            if past is None or self.has_promises:
                continue
            if _moves(past, now, seconds):
                self._work(at)
            # A process that has ended takes its count with it; a new one brings its own.
            used = {pid: now.cpu_s[pid] - past.cpu_s.get(pid, 0.0) for pid in now.cpu_s}
            if sum(used.values()) > _enough(seconds):
                self._since = at
            for pid, threads in now.runnable.items():
                if used[pid] <= _enough(seconds) and _is_starved(
                    past.runnable.get(pid, {}), threads, seconds
                ):
                    # Its stack cannot move, nor may it answer when it is asked for it.
                    self._work(at)
            if self._stacks is not None:
                unseen = sum(used[pid] for pid in used.keys() - self._stacks.keys())
                unseen += now.reaped_s - past.reaped_s
                if unseen > max(_TICK_S, seconds * _BUSY_SHARE):
                    self._work(at)

    def wants_stacks(self, at: float) -> bool:
        """Whether processors were busy for so long without another sign that stacks must tell."""
        if self.has_promises or self._since <= self._still_since:
            return False
        if self._stacks is None:
            return at - self._still_since >= self._timeout_s * _SAMPLE
        return at - self._stacks_at >= self._timeout_s * _SAMPLE

    def see_stacks(self, stacks: Mapping[int, object], at: float) -> None:
        """Take the stacks of all Python processes, by process id."""
        before, self._stacks, self._stacks_at = self._stacks, stacks, at
        if before is None:
            # From here on they are observed.
            self._still_since = at
        elif before != stacks:
            self._work(at)

    @property
    def is_still(self) -> bool:
        """Whether all stacks were the same for the timeout, although processors were busy."""
        return self._stacks is not None and self._stacks_at - self._still_since >= self._timeout_s

    def see_gpus(self, loads: Mapping[str, GpuLoad], at: float) -> bool:
        """Take the loads of the ranks' GPUs; return whether one of them works."""
        before, self._loads = self._loads, loads
        is_working = any(
            works(load) or abs(load.used - before.get(uuid, load).used) > _NOISE_BYTES
            for uuid, load in loads.items()
        )
        if is_working:
            self.revive(at)
        return is_working

    def _work(self, at: float) -> None:
        self._since = self._still_since = at
        self._stacks = None

    def revive(self, at: float) -> None:
        """Restart the count: there was activity, or it could not be observed."""
        self._work(at)
        self._depths, self._has_compared = None, False

    def _is_silent(self, at: float) -> bool:
        return self._has_compared and at - self._since >= self._timeout_s

    def is_hung(self, at: float) -> bool:
        """Whether the timeout has passed."""
        return self._is_silent(at) or self.is_still


def _moves(past: DeepSample, now: DeepSample, seconds: float) -> bool:
    """Whether a rank read from a disk, moved other bytes, or touched new memory."""
    return (
        now.fetched - past.fetched > _NOISE_BYTES
        or now.moved - past.moved > seconds * _MOVED_BYTES_PER_S
        or now.faults - past.faults > seconds * _FAULTS_PER_S
    )


def _is_starved(
    past: Mapping[int, tuple[float, int]], now: Mapping[int, tuple[float, int]], seconds: float
) -> bool:
    """Whether a thread has waited for a processor for much of the SECONDS from PAST to NOW."""
    for thread in now.keys() & past.keys():
        before, runs_before = past[thread]
        wanted_s, runs = now[thread]
        # The kernel adds the time in its queue when a thread gets a processor.
        if runs == runs_before or wanted_s - before > seconds * _BUSY_SHARE:
            return True
    return False


def _enough(seconds: float) -> float:
    """Return the processor time within SECONDS that counts as activity."""
    return max(_TICK_S, seconds * IDLE_SHARE)


class Lag(NamedTuple):
    """Stragglers: some ranks are idle while all others are busy, or the reverse."""

    ranks: tuple[int, ...]
    others: tuple[int, ...]
    is_idle: bool
    seconds: float


class Comparison:
    """Finds stragglers by the processor time of the ranks, sampled from time to time."""

    # Above the first share of a processor a rank is busy, even where ranks share processors; below
    # the second it is idle; in between it is neither.
    busy_share = 0.25
    idle_share = 0.05
    # A line about the same ranks is repeated no sooner than this; the pause doubles each time.
    again_s = 60.0

    def __init__(self, period_s: float = 5.0, window_s: float = 30.0) -> None:
        self._period_s = period_s
        # How long a lag must last to be reported; collectives and batches are shorter.
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
        most_odd = max(1, len(ranks) // 4)
        is_idle = len(idle) <= len(busy)
        odd, rest = (idle, busy) if is_idle else (busy, idle)
        if len(odd) > most_odd:
            return None
        key = (tuple(sorted(odd)), is_idle)
        due, pause = self._reported.get(key, (at, self.again_s))
        if at < due:
            return None
        self._reported[key] = (at + pause, pause * 2)
        began = max(since[r] for since in (self._busy_since, self._idle_since) for r in since)
        return Lag(key[0], tuple(sorted(rest)), is_idle, at - began)


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
