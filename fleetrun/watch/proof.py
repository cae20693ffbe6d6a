"""Shows which fields of the strategy are in effect, by the evidence that ranks write.

With `--strategy_strict`, it rejects a strategy that is not in effect, which ends the job.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from fleetrun.model import LaunchPlan
from fleetrun.run.events import (
    STRATEGY_REJECTED,
    Declared,
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
from fleetrun.rundir.strategyfiles import RankEvidence, StrategyDocument
from fleetrun.watch import overview, overview_table

if TYPE_CHECKING:
    # Only with other hosts.
    from fleetrun.session.driver import Session
    from fleetrun.session.exchange import PackedEvidence

# Pauses between two looks; a rank's first update takes seconds or minutes.
_FIRST_S = 0.3
_SLOWER = 1.2
_SLOWEST_S = 2.0
# How long to wait for the others after the first rank with evidence.
_TIMEOUT_S = 60.0
# A record of evidence has a few thousand bytes; one from another host may have more.
_LONGEST = 1 << 20


def find(plan: LaunchPlan) -> str | None:
    """Return the text of the plan's strategy; None if it has none."""
    for path, text in plan.files.items():
        if os.path.basename(path) == names.STRATEGY:
            return text
    return None


class _Trainer:
    """A rank, and its evidence as last read from PATH; ranks of other hosts have no PATH.

    RESTART is the attempt whose records count.
    """

    def __init__(self, name: str, path: str = "", restart: int = 0) -> None:
        self.name = name
        self.evidence: RankEvidence | None = None
        self.seen: tuple[int, ...] = ()
        self.record: Mapping[str, object] | None = None
        self.has_ended = False
        self._path = path
        self._restart = restart

    @property
    def is_settled(self) -> bool:
        """Whether no more evidence is expected before the end of the job."""
        return self.has_ended or (self.evidence is not None and self.evidence.is_complete)

    def look(self) -> bool:
        """Read the records if the file has changed; return whether it has."""
        try:
            stat = os.stat(self._path)
        except OSError:
            # It is not there yet, or its folder is gone.
            return False
        seen = (stat.st_ino, stat.st_size)
        if seen == self.seen:
            return False
        self.seen = seen
        self.record = rankfile.last(self._path, rankfile.STRATEGY, self._restart)
        self.take(self.record)
        return True

    def take(self, record: Mapping[str, object] | None) -> None:
        """Take the evidence in RECORD; if it cannot be read, the older evidence stays."""
        self.evidence = strategyfiles.parse_evidence(record) or self.evidence


class Proof(Source):
    """Watches for the evidence of JOB's trainers, and declares what it says about the strategy."""

    name = "the proof of the strategy"
    exit_code = STRATEGY_REJECTED

    def __init__(
        self,
        job: ObservedJob,
        *,
        session: Session | None = None,
        width: int | None = None,
        first_s: float = _FIRST_S,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        self._job = job
        self._session = session
        self._width = width
        self._first_s = first_s
        self._timeout_s = timeout_s
        self._is_ending = False
        strategy = job.plan.strategy
        self._need(is_strict=strategy is not None and strategy.is_strict)
        self._begin()

    def _begin(self) -> None:
        """Expect evidence from all ranks of a generation, in their order."""
        plan = self._job.plan
        # One host evaluates the ranks of all hosts, and shows the table.
        self._judges = self._session is None or self._session.serves
        self._asked: StrategyDocument | None = None
        self._pace_s = self._first_s
        self._patient_until: float | None = None
        # The gist of the last table: a change of it is news.
        self._shown: object = None
        self._noted: frozenset[str] = frozenset()
        self._has_judged = self._is_split = False
        self._places = {
            process: plan.ranks.index(spec.rank)
            for process, spec in enumerate(plan.processes)
            if spec.rank is not None
        }
        own_specs = {place: plan.processes[process] for process, place in self._places.items()}
        is_receiver = self._session is not None and self._judges
        if self._session is not None:
            # Otherwise the job may be over before what its ranks have written is judged.
            self._session.hold_done(is_held=is_receiver and self.is_required)
        # By their place among all ranks of the job, which messages of other hosts name.
        self._trainers: dict[int, _Trainer] = {}
        for place, rank in enumerate(plan.ranks):
            if rank.is_trainer and place in own_specs:
                name = names.rank_records(names.rank_name(rank))
                path = rankfile.path_of(own_specs[place]) or names.run_path(plan, name)
                restart = rankfile.restart_of(own_specs[place])
                self._trainers[place] = _Trainer(names.label(own_specs[place]), path, restart)
            elif rank.is_trainer and is_receiver and rank.node_rank != plan.node_rank:
                self._trainers[place] = _Trainer(names.spec_label(rank))

    # The supervisor's side ----------------------------------------------------------------------

    def open(self, waiting: Waiting, declare: Callable[[Declared], None]) -> None:
        """Begin to look."""
        super().open(waiting, declare)
        if self._session is not None:
            from fleetrun.session.exchange import PackedEvidence

            self._session.hearers[PackedEvidence] = self._receive
        self._look_later()

    def on_event(self, happening: Happening) -> None:
        """Track the ranks, and judge when no more evidence can come."""
        match happening:
            case Started():
                self._is_ending = False
            case Exited(process=process, status=status) if self._trainer(process) is not None:
                place = self._places[process]
                self._trainers[place].has_ended = True
                # Send even without new evidence: the evaluating host must know of the end.
                self._trainers[place].look()
                self._send(place)
                if status.exit_code:
                    self._is_ending = True
                elif not self._is_ending:
                    self._look()
            case SignalAll() if happening.ends_ranks:
                self._is_ending = True
            case Gathered(attempt=attempt) if attempt:
                self._begin()
                self._look_later()
            case Finished(outcome=outcome):
                self.close()
                self._read()
                trainers = self._trainers.values()
                has_evidence = any(rank.evidence and rank.evidence.tells for rank in trainers)
                # Ranks that failed or were stopped had no time for evidence.
                if has_evidence or (outcome.cause is None and self._trainers):
                    self._show(self._asked_for())
            case _:
                pass

    # Looking ------------------------------------------------------------------------------------

    def _look_later(self) -> None:
        self._waiting.timer("evidence", time.monotonic() + self._pace_s, self._look_again)

    def _look_again(self) -> None:
        self._pace_s = min(self._pace_s * _SLOWER, _SLOWEST_S)
        # Schedule first: a look that settles everything clears the timer.
        self._look_later()
        if not self._is_ending:
            self._look()

    def close(self) -> None:
        """Stop looking."""
        self._waiting.timer("evidence", None, self._look_again)

    def _trainer(self, process: int) -> _Trainer | None:
        return self._trainers.get(self._places.get(process, -1))

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
        if not self._is_ending:
            self._look()

    def _look(self) -> None:
        """Judge once all evidence is there, and again when all ranks have ended."""
        self._read()
        self._reject_split()
        trainers = self._trainers.values()
        now = time.monotonic()
        if any(rank.is_settled for rank in trainers) and self._patient_until is None:
            self._patient_until = now + self._timeout_s
        if all(rank.is_settled for rank in trainers):
            self.close()
            self._judge(is_last=all(rank.has_ended for rank in trainers))
        elif self._patient_until is not None and now >= self._patient_until and self._shown is None:
            self._show(self._asked_for())

    # Judging ------------------------------------------------------------------------------------

    def _reject_split(self) -> None:
        """Reject a strategy that some ranks apply and others cannot: they wait for each other."""
        if not self._judges or self._is_split:
            return
        evidence_of = {who: evidence for who, evidence in self._evidence().items() if evidence}
        unable = {who: it.unapplied[0] for who, it in evidence_of.items() if it.unapplied}
        paddles = {who: it.paddle for who, it in evidence_of.items() if it.paddle}
        for first, version in [*paddles.items()][:1]:
            unable |= {
                who: f"its Paddle is {other}, and that of {first} is {version}"
                for who, other in paddles.items()
                if other != version
            }
        self._is_split = bool(unable) and len(unable) < len(evidence_of)
        if self._is_split:
            faults = tuple(f"{who}: {why}" for who, why in unable.items())
            self._declare(StrategyRejected(faults, time.monotonic(), is_split=True))

    def _asked_for(self) -> StrategyDocument:
        if self._asked is None:
            self._asked = strategyfiles.parse_document(find(self._job.plan) or "{}")
            self._need(is_strict=self._asked.is_strict)
        return self._asked

    def _need(self, *, is_strict: bool) -> None:
        """Make this source required if --strategy_strict is given."""
        self.is_required = is_strict
        asked_for = ", which --strategy_strict requires" if is_strict else ""
        self.without = f"without evidence of what its strategy does{asked_for}"

    def _judge(self, *, is_last: bool) -> None:
        request = self._asked_for()
        if self._has_judged and not is_last:
            return
        self._has_judged = True
        faults = overview.faults(request, self._show(request), self._silence(), self._evidence())
        if faults and request.is_strict and self._judges:
            self._declare(StrategyRejected(faults, time.monotonic()))
        elif self._session is not None:
            self._session.hold_done(is_held=False)

    def _show(self, request: StrategyDocument) -> StrategyReport:
        """Declare and show the verdicts, if they have changed."""
        evidence_of = self._evidence()
        judged = overview.judge(request, evidence_of, time.monotonic())
        silence = self._silence()
        # Counts grow with every update; that is not news.
        gist = (
            tuple(verdict._replace(why="") for verdict in judged.verdicts),
            tuple((who, silence[who]) for who in judged.silent),
            judged.ranks_equal,
            tuple(evidence.disagreements if evidence else () for evidence in evidence_of.values()),
        )
        if gist != self._shown:
            self._shown = gist
            self._declare(judged)
            is_fine = (
                not overview.faults(request, judged, silence, evidence_of)
                and judged.ranks_equal is not False
            )
            if self._judges and not (self._job.request.quiet and is_fine):
                width = self._columns()
                self._job.show(overview_table.table(request, evidence_of, judged, silence, width))
        elif self._judges and not self._job.request.quiet:
            for note in overview_table.notes(evidence_of):
                if note not in self._noted:
                    self._job.log(f"Strategy: {note}")
        self._noted = frozenset(overview_table.notes(evidence_of))
        return judged

    def _evidence(self) -> dict[str, RankEvidence | None]:
        return {rank.name: rank.evidence for rank in self._trainers.values()}

    def _silence(self) -> dict[str, str]:
        """Return for each rank why it may have no evidence."""
        return {rank.name: _silence_of(rank) for rank in self._trainers.values()}

    def _columns(self) -> int:
        """Return the width of the terminal; 0 for a file."""
        if self._width is None:
            try:
                self._width = os.get_terminal_size(2).columns
            except OSError:
                self._width = 0
        return self._width


def _silence_of(trainer: _Trainer) -> str:
    evidence = trainer.evidence
    if evidence is None:
        if not trainer.has_ended:
            return "has left no evidence yet"
        return (
            "left no evidence: it never imported Paddle, or its Python ignores PYTHONPATH"
            " (-I, -E, -S)"
        )
    if evidence.unapplied:
        return f"has no strategy: {evidence.unapplied[0]}"
    if not trainer.has_ended:
        return "has made no optimizer update yet"
    if not evidence.backwards:
        return "imported Paddle and made no optimizer update, so nothing could be counted"
    times = "once" if evidence.backwards == 1 else f"{evidence.backwards} times"
    return (
        f"ran backward {times}, and no update by Paddle's optimizers, so nothing could be counted"
    )
