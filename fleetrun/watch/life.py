"""Decides from samples of the ranks whether a job shows signs of life; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fleetrun.run.proc import Io

# Waiting ranks wake up occasionally; a rank that computes uses far more processor time, and a
# program without a Python stack has to use more than the second share to count.
_IDLE_SHARE, _BUSY_SHARE = 0.02, 0.25
# The kernel counts in steps of 10 ms, and a single step proves nothing.
_TICK_S = 0.015
# Between two samples a log or a progress file writes less than this to disk, a checkpoint more.
_NOISE_BYTES = 65536
# Logs and stacks move less than this through the page cache each second; a data set moves more. A
# compiler keeps touching new memory (256 pages are 1 MiB); a waiting loop does not.
_MOVED_BYTES_PER_S, _FAULTS_PER_S = 65536, 256
# Stacks are taken when this part of the timeout has passed without any sign but processor time, and
# again each time it has.
_SAMPLE = 1 / 8
# A kernel that waits, such as NCCL's, keeps a GPU at 0 or 100 percent all the time and reads hardly
# any of its memory; kernels that begin and end leave it between (percentages of NVML).
_MOST_WAITING_MEMORY, _LEAST_WAITING = 1, 98


class Sample(NamedTuple):
    """A sample of one rank: of its heartbeat, its output, its collectives, and all its processes.

    `beat` changes with each heartbeat, and is 0 before the first one of this attempt; `is_scripts`
    says that the script wrote it, and not our callback after an update. `output` and `calls` change
    with each output and each recorded collective.
    """

    state: str
    beat: int = 0
    is_scripts: bool = True
    output: int = 0
    calls: int = 0
    # Processor time by process, with that of children that have ended, whose part is `reaped_s`.
    cpu_s: Mapping[int, float] = {}
    reaped_s: float = 0.0
    io: Io = Io(0, 0, 0)
    faults: int = 0
    # Whether a process of it waits for input at a terminal.
    is_at_prompt: bool = False


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
    """Measures for how long no rank has shown a sign of life.

    Heartbeats, collectives, and bytes read or written are signs, and so is output until the first
    heartbeat. Where a script reports its own progress, only this and writing count. Processor time
    may be that of ranks that spin while they wait for each other: it counts as long as the Python
    stacks of the ranks move, or a process without one uses it.
    """

    def __init__(self, timeout_s: float) -> None:
        self.period_s = max(0.05, min(timeout_s / 4, 5.0))
        self._timeout_s = timeout_s
        self._samples: Mapping[int, Sample] = {}
        self._at: float | None = None
        self._stacks: Mapping[int, object] | None = None
        self._stacks_at = 0.0
        self._loads: Mapping[str, GpuLoad] = {}
        # Since when there has been no sign at all, and none but processor time.
        self._since = self._still_since = 0.0

    def revive(self, at: float) -> None:
        """Restart the count: there was a sign, or none could be seen."""
        self._since = self._still_since = at
        self._stacks = None

    def ignore(self, at: float) -> None:
        """Ignore the time until AT, in which ranks are disturbed by a question."""
        self._at = at

    @property
    def has_beats(self) -> bool:
        """Whether any rank has reported progress."""
        return any(sample.beat for sample in self._samples.values())

    @property
    def has_promises(self) -> bool:
        """Whether a script reports its own progress, and so has defined what counts."""
        return any(sample.beat and sample.is_scripts for sample in self._samples.values())

    def see(self, samples: Mapping[int, Sample], at: float) -> None:
        """Take the samples of all ranks."""
        before, before_at = self._samples, self._at
        self._samples, self._at = samples, at
        if before_at is None or at - before_at > 3 * self.period_s + 1.0:
            # The first sample, or the launcher itself was stopped meanwhile.
            self.revive(at)
            return
        seconds = at - before_at
        pairs = [(before.get(rank), now) for rank, now in samples.items()]
        if any(past is None or self._lives(past, now, seconds) for past, now in pairs):
            self.revive(at)
        elif not self.has_promises:
            used = (sum(_used(past, now).values()) for past, now in pairs if past is not None)
            if max(used, default=0.0) > max(_TICK_S, seconds * _IDLE_SHARE):
                self._since = at

    def _lives(self, past: Sample, now: Sample, seconds: float) -> bool:
        """Whether a rank has shown more than processor time within SECONDS."""
        # A user or a debugger has stopped it on purpose.
        if now.beat != past.beat or now.state in "Tt" or now.is_at_prompt:
            return True
        if now.io.written - past.io.written > (_NOISE_BYTES if self.has_beats else 0):
            return True
        if self.has_promises:
            return False
        unseen = 0.0
        if self._stacks is not None:
            used = _used(past, now)
            unseen = sum(used[pid] for pid in used.keys() - self._stacks.keys())
            unseen += now.reaped_s - past.reaped_s
        return (
            now.calls != past.calls
            or (now.output != past.output and not self.has_beats)
            or now.io.fetched - past.io.fetched > _NOISE_BYTES
            or now.io.moved - past.io.moved > seconds * _MOVED_BYTES_PER_S
            or now.faults - past.faults > seconds * _FAULTS_PER_S
            or unseen > max(_TICK_S, seconds * _BUSY_SHARE)
        )

    def silent_s(self, at: float) -> float:
        """Return the seconds without a sign."""
        return at - (self._since if at - self._since >= self._timeout_s else self._still_since)

    def still_s(self, at: float) -> float:
        """Return the seconds without a sign other than processor time."""
        return at - self._still_since

    def wants_stacks(self, at: float) -> bool:
        """Whether processors were busy for so long without another sign that stacks must tell."""
        if self.has_promises or self._since <= self._still_since:
            return False
        since = self._still_since if self._stacks is None else self._stacks_at
        return at - since >= self._timeout_s * _SAMPLE

    def see_stacks(self, stacks: Mapping[int, object], at: float) -> None:
        """Take the stacks of all Python processes, by process id."""
        before, self._stacks, self._stacks_at = self._stacks, stacks, at
        if before is None:
            # From here on they are observed.
            self._still_since = at
        elif before != stacks:
            self.revive(at)

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

    def is_hung(self, at: float) -> bool:
        """Whether the timeout has passed."""
        return at - self._since >= self._timeout_s or self.is_still


def _used(past: Sample, now: Sample) -> dict[int, float]:
    """Return the processor time that each process has used; a new one brings its own."""
    return {pid: cpu_s - past.cpu_s.get(pid, 0.0) for pid, cpu_s in now.cpu_s.items()}
