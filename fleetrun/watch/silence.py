"""For how long the ranks of a host have shown no sign of life, from samples of them; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# Waiting ranks wake up occasionally; the kernel counts in steps of 10 ms, and one proves nothing.
_IDLE_SHARE, _TICK_S = 0.02, 0.015
# What a program that computes uses at least, also on a busy machine; one that only reports, less.
_BUSY_SHARE = 0.1
# Between two samples a log or a progress file writes less than this to disk, a checkpoint more.
_NOISE_BYTES = 65536
# Busy ranks hang if their stacks have been the same in so many looks.
_LOOKS = 4
# A kernel that waits, such as NCCL's, keeps a GPU at 0 or 100 percent all the time and reads hardly
# any of its memory; kernels that begin and end leave it between (percentages of NVML).
_MOST_WAITING_MEMORY, _LEAST_WAITING = 1, 98


class Sample(NamedTuple):
    """A sample of one rank and of all its processes.

    `beat`, `output` and `calls` change with each heartbeat, output and recorded collective; `beat`
    is 0 before the first one of this attempt. `written` and `fetched` are bytes of disks. Of
    `cpu_s`, `programs` have that of each compiler and the like: no Python, and started by one.
    `is_held` says that it is stopped, or waits for input at a terminal.
    """

    beat: int = 0
    output: int = 0
    calls: int = 0
    written: int = 0
    fetched: int = 0
    cpu_s: float = 0.0
    programs: Mapping[int, float] = {}
    is_held: bool = False


def works(kernels: int, memory: int) -> bool:
    """Whether a GPU does more than wait in a kernel; NVML's percentages of the last second.

    >>> works(100, 0), works(100, 40), works(37, 0)
    (False, True, True)
    """
    return memory > _MOST_WAITING_MEMORY or 0 < kernels < _LEAST_WAITING


class SilenceClock:
    """The time since the last sign of life of any rank; it counts as a hang after TIMEOUT_S.

    Signs are heartbeats, collectives, disk traffic, programs that compute, output until the first
    heartbeat, and processor time until the first heartbeat or collective: later, ranks may spin
    while they wait for each other, and a change of their stacks tells whether they work.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.period_s = max(0.05, min(timeout_s / 4, 5.0))
        self._samples: Mapping[int, Sample] = {}
        self._at: float | None = None
        self._since = 0.0
        self._is_busy = False
        self._stacks: list[object] = []

    def end(self, at: float) -> None:
        """Begin again: there was a sign of life, or none could be seen."""
        self._since, self._is_busy, self._stacks = at, False, []

    def ignore(self, at: float) -> None:
        """Ignore the time until AT, in which ranks are disturbed by a question."""
        self._at = at

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
        has_beats = any(sample.beat for sample in self._samples.values())
        has_begun = has_beats or any(sample.calls for sample in self._samples.values())
        is_busy = now.cpu_s - past.cpu_s > max(_TICK_S, seconds * _IDLE_SHARE)
        self._is_busy = self._is_busy or is_busy
        return (
            now.is_held
            or now.beat != past.beat
            or now.calls != past.calls
            or (now.output != past.output and not has_beats)
            or now.written - past.written > (_NOISE_BYTES if has_beats else 0)
            or now.fetched - past.fetched > _NOISE_BYTES
            # One that measures now and then is another one in each sample.
            or sum(cpu_s - past.programs.get(pid, cpu_s) for pid, cpu_s in now.programs.items())
            > max(_TICK_S, seconds * _BUSY_SHARE)
            or (is_busy and not has_begun)
        )

    def seconds(self, at: float) -> float:
        """Return for how long there has been no sign of life."""
        return at - self._since

    def is_hang(self, at: float) -> bool:
        """Whether the timeout has passed; `still` tells whether busy ranks work nevertheless."""
        return self.seconds(at) >= self._timeout_s

    def still(self, stacks: object, at: float) -> bool:
        """Whether ranks with these STACKS hang; they may have to be asked again."""
        self._stacks.append(stacks)
        if not self._is_busy:
            return True
        if stacks != self._stacks[0]:
            self.end(at)
        return len(self._stacks) >= _LOOKS
