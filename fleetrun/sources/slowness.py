"""Reports which ranks are slower than the others, and why, while the job runs.

The process that writes metrics.jsonl measures. Each host sends what it measured of its ranks in the
last seconds to the coordinator's host, which compares the ranks of all hosts.
"""

from __future__ import annotations

import os
import time
from collections import deque

from fleetrun.plan.visible import sentence
from fleetrun.records import metricsfile, names, reading
from fleetrun.run.events import RunWarning
from fleetrun.session.exchange import HostConditions
from fleetrun.sources import conditions
from fleetrun.typehints import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fleetrun.records.metricsfile import MetricsRecord
    from fleetrun.run.loop import Waiting
    from fleetrun.run.observers import ObservedJob
    from fleetrun.session.driver import Session
    from fleetrun.sources.conditions import Slowness

# The number of measurements over which ranks are compared.
_SPANS = 6
# Ranks that report no steps are compared after this time, when their imports should be over.
_STEPLESS_S = 60.0
# What differs by chance on a busy host, and for how many comparisons in turn it must be found: the
# first and the last of three share no measurement.
_BY_CHANCE = frozenset(("queued", "threads", "paging", "data", "work"))
_IN_TURN = 3
# The same line is repeated no sooner than this; the pause doubles each time.
_AGAIN_S = 60.0
_MOST_LINES = 4


class SlowRanks:
    """Compares the ranks of a job by what their hosts measure."""

    def __init__(self, job: ObservedJob, session: Session | None) -> None:
        self._job = job
        self._session = session
        self._period_s = job.request.metrics_period_s
        self._begin()
        # By host: the last message, and when it arrived.
        self._received: dict[int, tuple[HostConditions, float]] = {}
        # By ranks and cause: when the line may be repeated, and the pause after that.
        self._reported: dict[tuple[tuple[int, ...], str], tuple[float, float]] = {}
        self._newest: tuple[Slowness, ...] = ()
        # By rank and cause: in how many comparisons in turn it was found.
        self._times: dict[tuple[int, str], int] = {}
        self._file = reading.GrowingFile(os.path.join(job.folder.path, names.METRICS))

    def open(self, waiting: Waiting, declare: Callable[[RunWarning], None]) -> None:
        """Look at each new measurement."""
        self._waiting, self._declare = waiting, declare
        if self._session is not None:
            self._session.hearers[HostConditions] = self._take
        self._wait()

    def restart(self) -> None:
        """Forget all measurements, as new ranks have started."""
        self._begin()
        self._received.clear()
        self._newest = ()
        self._times.clear()

    def why(self, processes: Iterable[int]) -> str:
        """Return what is known to slow down PROCESSES of this host; empty: nothing."""
        plan = self._job.plan
        ranks = [plan.processes[process].rank for process in processes]
        places = {plan.ranks.index(rank) for rank in ranks if rank is not None}
        return next((cause.text for cause in self._newest if places & set(cause.ranks)), "")

    def _begin(self) -> None:
        ranks = self._job.plan.ranks
        self._nodes = {spec.node_rank for spec in ranks if spec.is_trainer}
        self._node_of = {spec.endpoint.host: spec.node_rank for spec in ranks}.get
        self._records: deque[MetricsRecord] = deque(maxlen=_SPANS + 1)
        self._first_at: float | None = None

    def _wait(self) -> None:
        self._waiting.timer("slow", time.monotonic() + self._period_s, self._look)

    def _look(self) -> None:
        self._wait()
        for line in self._file.read().splitlines():
            record = metricsfile.parse(line)
            # A host that joined a later generation counts attempts of its own.
            if record is not None:
                self._first_at = self._first_at or record.monotonic
                if _trains(record, self._first_at):
                    self._records.append(record)
        if len(self._records) <= _SPANS:
            return
        measured = conditions.measured(tuple(self._records), self._job.plan, self._node_of)
        # Half of these measurements are part of the next comparison, too.
        for _ in range(_SPANS // 2):
            self._records.popleft()
        if measured is None:
            self._records.clear()
        elif self._session is None:
            self._take(self._job.plan.node_rank, measured)
        else:
            self._session.to_coordinator(measured)

    def _take(self, node_rank: int, message: HostConditions) -> None:
        """Store what a host has measured; compare once every host has reported."""
        plan, now = self._job.plan, time.monotonic()
        if message.generation != plan.generation or not _is_sound(message, node_rank, self._job):
            return
        self._received[node_rank] = message, now
        if len(self._received) < len(self._nodes):
            return
        oldest = now - 2 * _SPANS * self._period_s
        fresh = {node: sent for node, (sent, at) in self._received.items() if at >= oldest}
        if self._nodes - fresh.keys():
            return
        self._received.clear()
        causes = conditions.compare(fresh, plan)
        keys = [(rank, cause.cause) for cause in causes for rank in cause.ranks]
        self._times = {key: self._times.get(key, 0) + 1 for key in keys}
        self._newest = tuple(filter(self._is_lasting, causes))
        for cause in self._newest[:_MOST_LINES]:
            self._report(cause, now)

    def _is_lasting(self, finding: Slowness) -> bool:
        return finding.cause not in _BY_CHANCE or all(
            self._times[rank, finding.cause] >= _IN_TURN for rank in finding.ranks
        )

    def _report(self, finding: Slowness, now: float) -> None:
        key = finding.ranks, finding.cause
        due, pause = self._reported.get(key, (now, _AGAIN_S))
        if now < due:
            return
        self._reported[key] = now + pause, pause * 2
        text = f"{sentence(finding.text)}."
        self._job.log(text)
        labels = tuple(names.spec_label(self._job.plan.ranks[place]) for place in finding.ranks)
        self._declare(RunWarning("straggler", text, now, labels))


def _trains(record: MetricsRecord, first_at: float) -> bool:
    """Whether all ranks have begun to train, as far as can be seen."""
    has_steps = all(use.step is not None for use in record.ranks)
    return bool(record.ranks) and (has_steps or record.monotonic - first_at >= _STEPLESS_S)


def _is_sound(message: HostConditions, node_rank: int, job: ObservedJob) -> bool:
    """Whether MESSAGE is only about ranks of its own host, as every launcher's is."""
    ranks = job.plan.ranks
    places = [rank.process for rank in message.ranks]
    places += [place for gpu in message.gpus for place in gpu.processes]
    return all(0 <= n < len(ranks) and ranks[n].node_rank == node_rank for n in places) and all(
        0 <= link.node < len(job.plan.nodes) for link in message.links
    )
