"""Shows which fields of the strategy are in effect, by the evidence that ranks write.

With `--strategy_strict`, it rejects a strategy that is not in effect, which ends the job. Each
host examines its own ranks; other hosts than that of the first rank show what is wrong, no more.
"""

from __future__ import annotations

import os
import time

from fleetrun.model import LaunchPlan
from fleetrun.printing import error_columns
from fleetrun.run.events import (
    STRATEGY_REJECTED,
    Exited,
    Finished,
    Gathered,
    Happening,
    SignalAll,
    Started,
    StrategyRejected,
    StrategyReport,
)
from fleetrun.run.loop import Waiting
from fleetrun.run.observers import ObservedJob, Source
from fleetrun.rundir import names, rankfile, reading, strategyfiles
from fleetrun.rundir.strategyfiles import RankEvidence
from fleetrun.watch import strategy_table

# How often to look for evidence.
_PERIOD_S = 0.5


def find(plan: LaunchPlan) -> str | None:
    """Return the text of the plan's strategy; None if it has none."""
    texts = (text for path, text in plan.files.items() if os.path.basename(path) == names.STRATEGY)
    return next(texts, None)


class _Trainer:
    """A rank, and its evidence as last read from PATH."""

    def __init__(self, path: str, restart: int) -> None:
        self.evidence: RankEvidence | None = None
        self.has_ended = False
        self._path, self._restart = path, restart
        self._size = -1

    @property
    def is_settled(self) -> bool:
        """Whether no more evidence is expected before the end of the job."""
        return self.has_ended or (self.evidence is not None and self.evidence.is_complete)

    def look(self) -> None:
        """Read the records if the file has grown; if they cannot be read, older evidence stays."""
        size = reading.size(self._path)
        if size != self._size:
            self._size = size
            record = rankfile.last(self._path, rankfile.STRATEGY, self._restart)
            self.evidence = strategyfiles.parse_evidence(record) or self.evidence

    def silence(self) -> str:
        """Return why it may have no evidence."""
        if self.evidence is None and self.has_ended:
            why = "it never imported Paddle, or its Python ignores PYTHONPATH (-I, -E, -S)"
            return f"left no evidence: {why}"
        if self.evidence is None:
            return "has left no evidence yet"
        if self.evidence.unapplied:
            return f"has no strategy: {self.evidence.unapplied[0]}"
        if self.has_ended:
            return "made no update by Paddle's optimizers, so nothing could be counted"
        return "has made no optimizer update yet"


class Proof(Source):
    """Watches for the evidence of JOB's trainers, and declares what it says about the strategy."""

    name = "the proof of the strategy"
    exit_code = STRATEGY_REJECTED

    def __init__(self, job: ObservedJob, period_s: float = _PERIOD_S) -> None:
        self._job, self._period_s = job, period_s
        self._asked = strategyfiles.parse_document(find(job.plan) or "{}")
        self.is_required = self._asked.is_strict
        self._begin()

    def _begin(self) -> None:
        """Expect evidence from the trainers of a generation."""
        plan = self._job.plan
        first = next((rank for rank in plan.ranks if rank.is_trainer), None)
        self._is_first = first is not None and first.node_rank == plan.node_rank
        self._is_ending = self._has_judged = self._is_split = False
        # The gist of the last table: a change of it is news.
        self._shown: object = None
        self._names = {n: names.label_of(plan.processes[n].name) for n in plan.trainers.values()}
        self._trainers = {
            process: _Trainer(rankfile.path_of(spec), rankfile.restart_of(spec))
            for process, spec in enumerate(plan.processes)
            if process in self._names
        }

    def open(self, waiting: Waiting) -> None:
        """Begin to look."""
        super().open(waiting)
        self._look_later()

    def on_event(self, happening: Happening) -> None:
        """Track the ranks, and judge when no more evidence can come."""
        match happening:
            case Started():
                self._is_ending = False
            case Exited(process=process, status=status) if process in self._trainers:
                self._trainers[process].has_ended = True
                self._is_ending = self._is_ending or bool(status.exit_code)
                self._look()
            case SignalAll() if happening.ends_ranks:
                self._is_ending = True
            case Gathered(attempt=attempt) if attempt:
                self._begin()
                self._look_later()
            case Finished(outcome=outcome):
                self.close()
                evidence_of = self._evidence()
                has_evidence = any(
                    it is not None and (it.is_complete or it.fields or it.notes)
                    for it in evidence_of.values()
                )
                # Ranks that failed or were stopped had no time for evidence.
                if has_evidence or (outcome.cause is None and self._trainers):
                    self._show()

    def close(self) -> None:
        """Stop looking."""
        self._waiting.timer("evidence", None, self._look)

    def _look_later(self) -> None:
        if self._trainers:
            self._waiting.timer("evidence", time.monotonic() + self._period_s, self._look)

    def _look(self) -> None:
        """Judge once all evidence is there, and again when all ranks have ended."""
        if self._is_ending:
            return
        self._look_later()
        self._reject_split()
        trainers = self._trainers.values()
        if all(rank.is_settled for rank in trainers):
            self.close()
            if not self._has_judged or all(rank.has_ended for rank in trainers):
                self._has_judged = True
                faults = self._faults(self._show())
                if faults and self._asked.is_strict:
                    self.declare(StrategyRejected(faults, time.monotonic()))

    def _evidence(self) -> dict[str, RankEvidence | None]:
        for trainer in self._trainers.values():
            trainer.look()
        return {self._names[n]: rank.evidence for n, rank in self._trainers.items()}

    def _reject_split(self) -> None:
        """Reject a strategy that some ranks apply and others cannot: they wait for each other."""
        seen = {who: evidence for who, evidence in self._evidence().items() if evidence}
        unable = {who: it.unapplied[0] for who, it in seen.items() if it.unapplied}
        paddles = {who: it.paddle for who, it in seen.items() if it.paddle}
        for first, version in [*paddles.items()][:1]:
            unable |= {
                who: f"its Paddle is {other}, and that of {first} is {version}"
                for who, other in paddles.items()
                if other != version
            }
        if not self._is_split and 0 < len(unable) < len(seen):
            self._is_split = True
            clauses = tuple(f"{who}: {why}" for who, why in unable.items())
            self.declare(StrategyRejected(clauses, time.monotonic(), is_split=True))

    def _silence(self) -> dict[str, str]:
        return {self._names[n]: rank.silence() for n, rank in self._trainers.items()}

    def _faults(self, judged: StrategyReport) -> tuple[str, ...]:
        return strategy_table.faults(self._asked, judged, self._silence(), self._evidence())

    def _show(self) -> StrategyReport:
        """Declare and show the verdicts, if they have changed."""
        evidence_of, silence = self._evidence(), self._silence()
        judged = strategy_table.judge(self._asked, evidence_of, time.monotonic())
        # Counts grow with every update; that is not news.
        gist = (
            [verdict._replace(why="") for verdict in judged.verdicts],
            [(who, silence[who]) for who in judged.silent],
            judged.ranks_equal,
            [(it.disagreements, it.notes) for it in evidence_of.values() if it is not None],
        )
        if gist != self._shown:
            self._shown = gist
            self.declare(judged)
            is_fine = not self._faults(judged) and judged.ranks_equal is not False
            is_quiet = self._job.request.quiet or not self._is_first
            if not (is_quiet and is_fine):
                shown = self._asked, evidence_of, judged, silence, error_columns()
                self._job.show(strategy_table.table(*shown))
        return judged
