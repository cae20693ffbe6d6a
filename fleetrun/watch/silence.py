"""For how long the ranks of a host have shown no sign of life, from samples of them; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fleetrun.run.proc import Io

# Waiting ranks wake up occasionally; the kernel counts in steps of 10 ms, and one proves nothing.
_IDLE_SHARE, _TICK_S = 0.02, 0.015
# Between two samples a log or a progress file writes less than this to disk, a checkpoint more.
_NOISE_BYTES = 65536
# Logs and stacks move less than this through the page cache each second; a data set moves more. A
# compiler keeps touching new memory (256 pages are 1 MiB); a waiting loop does not.
_MOVED_BYTES_PER_S, _FAULTS_PER_S = 65536, 256
# Stacks of busy ranks are compared each time this part of the timeout has passed.
_STACKS = 1 / 8
# A kernel that waits, such as NCCL's, keeps a GPU at 0 or 100 percent all the time and reads hardly
# any of its memory; kernels that begin and end leave it between (percentages of NVML).
_MOST_WAITING_MEMORY, _LEAST_WAITING = 1, 98


class Sample(NamedTuple):
    """A sample of one rank and of all its processes.

    `beat`, `output` and `calls` change with each heartbeat, output and recorded collective; `beat`
    is 0 before the first one of this attempt. `is_scripts` says that the script wrote it, and not
    our callback after an update. `other_s` is the part of `cpu_s` that programs have used which are
    not Python. `is_held` says that it is stopped, or waits for input at a terminal.
    """

    beat: int = 0
    is_scripts: bool = True
    output: int = 0
    calls: int = 0
    io: Io = Io(0, 0, 0)
    faults: int = 0
    cpu_s: float = 0.0
    other_s: float = 0.0
    is_held: bool = False


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


class SilenceClock:
    """The time since the last sign of life of any rank; it counts as a hang after TIMEOUT_S.

    Signs are heartbeats, collectives, disk traffic, and output until the first heartbeat. Where a
    script reports its own progress, only this and writing count. Processor time counts until the
    first heartbeat or collective: later, ranks may spin while they wait for each other, and a
    change of their stacks tells whether they work.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.period_s = max(0.05, min(timeout_s / 4, 5.0))
        self._samples: Mapping[int, Sample] = {}
        self._at: float | None = None
        self._since = 0.0
        self._is_busy = False
        self._stacks: Mapping[int, object] | None = None
        self._stacks_at = 0.0
        self._loads: Mapping[str, GpuLoad] = {}

    def end(self, at: float) -> None:
        """Begin again: there was a sign of life, or none could be seen."""
        self._since = self._stacks_at = at
        self._is_busy, self._stacks = False, None

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
            # The first samples, or the launcher itself was stopped meanwhile.
            self.end(at)
            return
        for rank, now in samples.items():
            past = before.get(rank)
            if past is None or self._lives(past, now, at - before_at):
                self.end(at)
                return

    def _lives(self, past: Sample, now: Sample, seconds: float) -> bool:
        """Whether a rank has shown a sign of life within SECONDS."""
        if now.beat != past.beat or now.is_held:
            return True
        if now.io.written - past.io.written > (_NOISE_BYTES if self.has_beats else 0):
            return True
        if self.has_promises:
            return False
        enough_s = max(_TICK_S, seconds * _IDLE_SHARE)
        is_busy = now.cpu_s - past.cpu_s > enough_s
        self._is_busy = self._is_busy or is_busy
        has_begun = any(sample.beat or sample.calls for sample in self._samples.values())
        return (
            now.calls != past.calls
            or (now.output != past.output and not self.has_beats)
            or now.io.fetched - past.io.fetched > _NOISE_BYTES
            or now.io.moved - past.io.moved > seconds * _MOVED_BYTES_PER_S
            or now.faults - past.faults > seconds * _FAULTS_PER_S
            or now.other_s - past.other_s > enough_s
            or (is_busy and not has_begun)
        )

    def wants_stacks(self, at: float) -> bool:
        """Whether processors were busy for so long without another sign that stacks must tell."""
        return self._is_busy and at - self._stacks_at >= self.timeout_s * _STACKS

    def see_stacks(self, stacks: Mapping[int, object], at: float) -> None:
        """Take the stacks of all Python processes, by process id."""
        before, self._stacks, self._stacks_at = self._stacks, stacks, at
        if before is not None and before != stacks and self._is_busy:
            self.end(at)

    def see_gpus(self, loads: Mapping[str, GpuLoad], at: float) -> bool:
        """Take the loads of the ranks' GPUs; return whether one of them works."""
        before, self._loads = self._loads, loads
        is_working = any(
            works(load) or abs(load.used - before.get(uuid, load).used) > _NOISE_BYTES
            for uuid, load in loads.items()
        )
        if is_working:
            self.end(at)
        return is_working

    def seconds(self, at: float) -> float:
        """Return for how long there has been no sign of life."""
        return at - self._since

    def is_hang(self, at: float) -> bool:
        """Whether the timeout has passed."""
        return self.seconds(at) >= self.timeout_s
