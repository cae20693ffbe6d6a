"""Shows which fields of the strategy are in effect, by the evidence that ranks write.

With `--strategy_strict`, it rejects a strategy that is not in effect, which ends the job.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    # Only with other hosts.
    from fleetrun.session.driver import Session
    from fleetrun.session.exchange import PackedEvidence

# Pauses between two looks; a rank's first update takes seconds or minutes.
_FIRST_S, _SLOWER, _SLOWEST_S = 0.3, 1.2, 2.0
# A record of evidence has a few thousand bytes; one from another host may have more.
_LONGEST = 1 << 20


def find(plan: LaunchPlan) -> str | None:
    """Return the text of the plan's strategy; None if it has none."""
    for path, text in plan.files.items():
        if os.path.basename(path) == names.STRATEGY:
            return text
    return None


class _Trainer:
    """A rank, and its evidence as last read from PATH; ranks of other hosts have no PATH."""

    def __init__(self, name: str, path: str = "", restart: int = 0) -> None:
        self.name = name
        self.evidence: RankEvidence | None = None
        self.record: Mapping[str, object] | None = None
        self.has_ended = False
        self._path, self._restart = path, restart
        self._size = -1

    @property
    def is_settled(self) -> bool:
        """Whether no more evidence is expected before the end of the job."""
        return self.has_ended or (self.evidence is not None and self.evidence.is_complete)

    def look(self) -> bool:
        """Read the records if the file has grown; return whether it has."""
        size = reading.size(self._path)
        if size == self._size:
            return False
        self._size = size
        self.record = rankfile.last(self._path, rankfile.STRATEGY, self._restart)
        self.take(self.record)
        return True

    def take(self, record: Mapping[str, object] | None) -> None:
        """Take the evidence in RECORD; if it cannot be read, the older evidence stays."""
        self.evidence = strategyfiles.parse_evidence(record) or self.evidence

    def silence(self) -> str:
        """Return why it may have no evidence."""
        if self.evidence is None:
            return (
                "left no evidence: it never imported Paddle, or its Python ignores PYTHONPATH"
                " (-I, -E, -S)"
                if self.has_ended
                else "has left no evidence yet"
            )
        if self.evidence.unapplied:
            return f"has no strategy: {self.evidence.unapplied[0]}"
        if not self.has_ended:
            return "has made no optimizer update yet"
        return "imported Paddle and made no optimizer update, so nothing could be counted"


class Proof(Source):
    """Watches for the evidence of JOB's trainers, and declares what it says about the strategy."""

    name = "the proof of the strategy"
    exit_code = STRATEGY_REJECTED

    def __init__(
        self, job: ObservedJob, *, session: Session | None = None, first_s: float = _FIRST_S
    ) -> None:
        self._job, self._session, self._first_s = job, session, first_s
        self._asked = strategyfiles.parse_document(find(job.plan) or "{}")
        self.is_required = self._asked.is_strict
        required = ", which --strategy_strict requires" if self.is_required else ""
        self.without = f"without evidence of what its strategy does{required}"
        self._begin()

    def _begin(self) -> None:
        """Expect evidence from all ranks of a generation, in their order."""
        plan, session = self._job.plan, self._session
        # One host evaluates the ranks of all hosts, and shows the table.
        self._judges = session is None or session.serves
        self._is_ending = self._has_judged = self._is_split = False
        self._pace_s = self._first_s
        # The gist of the last table: a change of it is news.
        self._shown: object = None
        self._noted: list[str] = []
        if session is not None:
            # Otherwise the job may be over before what its ranks have written is judged.
            session.hold_done(is_held=self._judges and self.is_required)
        self._places = {
            process: plan.ranks.index(spec.rank)
            for process, spec in enumerate(plan.processes)
            if spec.rank is not None
        }
        # By their place among all ranks of the job, which messages of other hosts name.
        self._trainers: dict[int, _Trainer] = {}
        own = {place: plan.processes[process] for process, place in self._places.items()}
        for place, rank in enumerate(plan.ranks):
            if rank.is_trainer and place in own:
                path = rankfile.path_of(own[place])
                restart = rankfile.restart_of(own[place])
                self._trainers[place] = _Trainer(names.label(own[place]), path, restart)
            elif rank.is_trainer and self._judges and rank.node_rank != plan.node_rank:
                self._trainers[place] = _Trainer(names.spec_label(rank))

    def open(self, waiting: Waiting) -> None:
        """Begin to look."""
        super().open(waiting)
        if self._session is not None:
            from fleetrun.session.exchange import PackedEvidence

            self._session.hearers[PackedEvidence] = self._receive
        waiting.timer("evidence", time.monotonic() + self._first_s, self._look)

    def on_event(self, happening: Happening) -> None:
        """Track the ranks, and judge when no more evidence can come."""
        match happening:
            case Started():
                self._is_ending = False
            case Exited(process=process, status=status):
                place = self._places.get(process, -1)
                if place in self._trainers:
                    self._trainers[place].has_ended = True
                    # Send even without new evidence: the evaluating host must know of the end.
                    self._trainers[place].look()
                    self._send(place)
                    self._is_ending = self._is_ending or bool(status.exit_code)
                    self._look()
            case SignalAll() if happening.ends_ranks:
                self._is_ending = True
            case Gathered(attempt=attempt) if attempt:
                self._begin()
                self._waiting.timer("evidence", time.monotonic() + self._first_s, self._look)
            case Finished(outcome=outcome):
                self.close()
                self._read()
                trainers = self._trainers.values()
                has_evidence = any(rank.evidence and rank.evidence.tells for rank in trainers)
                # Ranks that failed or were stopped had no time for evidence.
                if has_evidence or (outcome.cause is None and self._trainers):
                    self._show()
            case _:
                pass

    def close(self) -> None:
        """Stop looking."""
        self._waiting.timer("evidence", None, self._look)

    # Looking ------------------------------------------------------------------------------------

    def _read(self) -> None:
        for place, trainer in self._trainers.items():
            if trainer.look():
                self._send(place)

    def _send(self, place: int) -> None:
        """Send a rank's last evidence to the host that judges, if that is another one."""
        if self._session is None or self._judges:
            return

        trainer = self._trainers[place]
        from fleetrun.session import codec
        from fleetrun.session.exchange import PackedEvidence

        packed = codec.pack(json.dumps(trainer.record).encode()) if trainer.record else ""
        generation = self._job.plan.generation
        self._session.to_coordinator(PackedEvidence(generation, place, trainer.has_ended, packed))

    def _receive(self, node_rank: int, message: PackedEvidence) -> None:
        """Take the evidence of another host's rank."""
        trainer = self._trainers.get(message.process)
        from fleetrun.session import codec, exchange

        if trainer is None or exchange.rank_of(message, node_rank, self._job.plan) is None:
            return
        trainer.take(reading.parse(codec.unpack(message.packed, _LONGEST)))
        trainer.has_ended = trainer.has_ended or message.has_ended
        self._look()

    def _look(self) -> None:
        """Judge once all evidence is there, and again when all ranks have ended."""
        if self._is_ending:
            return
        self._pace_s = min(self._pace_s * _SLOWER, _SLOWEST_S)
        self._waiting.timer("evidence", time.monotonic() + self._pace_s, self._look)
        self._read()
        self._reject_split()
        trainers = self._trainers.values()
        if all(rank.is_settled for rank in trainers):
            self.close()
            self._judge(is_last=all(rank.has_ended for rank in trainers))

    # Judging ------------------------------------------------------------------------------------

    def _evidence(self) -> dict[str, RankEvidence | None]:
        return {rank.name: rank.evidence for rank in self._trainers.values()}

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
        if self._judges and not self._is_split and 0 < len(unable) < len(seen):
            self._is_split = True
            clauses = tuple(f"{who}: {why}" for who, why in unable.items())
            self.declare(StrategyRejected(clauses, time.monotonic(), is_split=True))

    def _judge(self, *, is_last: bool) -> None:
        if self._has_judged and not is_last:
            return
        self._has_judged = True
        faults = self._faults(self._show())
        if faults and self._asked.is_strict and self._judges:
            self.declare(StrategyRejected(faults, time.monotonic()))
        elif self._session is not None:
            self._session.hold_done(is_held=False)

    def _faults(self, judged: StrategyReport) -> tuple[str, ...]:
        return strategy_table.faults(self._asked, judged, self._silence(), self._evidence())

    def _silence(self) -> dict[str, str]:
        return {rank.name: rank.silence() for rank in self._trainers.values()}

    def _show(self) -> StrategyReport:
        """Declare and show the verdicts, if they have changed."""
        evidence_of, silence = self._evidence(), self._silence()
        judged = strategy_table.judge(self._asked, evidence_of, time.monotonic())
        notes = strategy_table.notes(evidence_of)
        # Counts grow with every update; that is not news.
        gist = (
            tuple(verdict._replace(why="") for verdict in judged.verdicts),
            tuple((who, silence[who]) for who in judged.silent),
            judged.ranks_equal,
            tuple(evidence.disagreements if evidence else () for evidence in evidence_of.values()),
        )
        is_quiet = self._job.request.quiet
        if gist != self._shown:
            self._shown = gist
            self.declare(judged)
            is_fine = not self._faults(judged) and judged.ranks_equal is not False
            if self._judges and not (is_quiet and is_fine):
                width = error_columns()
                self._job.show(
                    strategy_table.table(self._asked, evidence_of, judged, silence, width)
                )
        elif self._judges and not is_quiet:
            for note in notes:
                if note not in self._noted:
                    self._job.log(f"Strategy: {note}")
        self._noted = notes
        return judged
