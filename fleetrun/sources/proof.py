"""Shows once what of the strategy is in effect, from the evidence that the ranks write.

With `--strategy_strict` a job whose strategy is not in effect is declared refuted, which ends it.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from fleetrun.records import names, variables
from fleetrun.run.events import (
    REFUTED,
    Exited,
    Finished,
    Gathered,
    Judged,
    Refuted,
    SignalAll,
    Started,
)
from fleetrun.run.observers import Source

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fleetrun.model import LaunchPlan
    from fleetrun.records.strategyfiles import RankEvidence, StrategyDocument
    from fleetrun.run.events import Declared, Happening
    from fleetrun.run.loop import Waiting
    from fleetrun.sources.proof_hosts import ProofOfHosts

# A rank needs seconds for its first update, or minutes.
_FIRST_S = 0.3
_SLOWER = 1.2
_SLOWEST_S = 2.0
# How long to wait for the others after the first rank with evidence.
_TIMEOUT_S = 60.0
# Signals after which the ranks end.
_ENDING = frozenset((1, 2, 9, 15))


def find(plan: LaunchPlan) -> str | None:
    """Return the text of the plan's strategy; None if it has none."""
    for path, text in plan.files.items():
        if os.path.basename(path) == names.STRATEGY:
            return text
    return None


class _Trainer:
    """A rank: its records, its evidence as last read, and its end; one of another host has no PATH.

    RESTART is the attempt that its records are of.
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
        """Whether nothing more is to be expected before the end of the job."""
        return self.has_ended or (self.evidence is not None and self.evidence.is_complete)

    def look(self) -> bool:
        """Read the records, if there are new ones; return whether there were."""
        from fleetrun.records import rankfile  # only with a strategy

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
        """Take what its RECORD says; where that cannot be read, the older evidence stays."""
        from fleetrun.records import strategyfiles  # only with a strategy

        self.evidence = strategyfiles.parse_evidence(record) or self.evidence


class Proof(Source):
    """Watches for the evidence of PLAN's trainers and declares what it says of the strategy."""

    name = "the proof of the strategy"
    exit_code = REFUTED

    def __init__(
        self,
        plan: LaunchPlan,
        *,
        say: Callable[[str], None],
        show: Callable[[str], None],
        is_quiet: bool = False,
        hosts: ProofOfHosts | None = None,
        width: int | None = None,
        first_s: float = _FIRST_S,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        self._plan = plan
        self._say = say
        self._show_lines = show
        self._is_quiet = is_quiet
        self._hosts = hosts
        # Of several hosts one judges the ranks of all, and shows it.
        self._judges = hosts is None or hosts.judges
        self._width = width
        self._first_s = self._pace_s = first_s
        self._timeout_s = timeout_s
        self._waiting: Waiting | None = None
        self._asked: StrategyDocument | None = None
        self._is_ending = False
        self._need(is_strict=plan.strategy is not None and plan.strategy.is_strict)
        self._begin()

    def _begin(self) -> None:
        """Expect evidence from all ranks."""
        self._pace_s = self._first_s
        self._patient_until: float | None = None
        # What was shown, as far as it matters.
        self._shown: object = None
        self._noted: frozenset[str] = frozenset()
        self._has_judged = False
        self._trainers: dict[int, _Trainer] = {}
        self._places: dict[int, int] = {}
        if self._hosts is not None:
            self._hosts.begin(self._plan)
        for process, spec in enumerate(self._plan.processes):
            if spec.rank is not None and spec.rank.role == "TRAINER":
                name = names.rank_records(names.rank_name(spec.rank))
                path = spec.env.get(variables.RECORDS) or names.run_path(self._plan, name)
                restart = spec.env.get("PADDLE_RESTART_COUNT", "")
                self._trainers[process] = _Trainer(names.label(spec), path, int(restart or 0))
                if self._hosts is not None:
                    self._places[process] = self._plan.ranks.index(spec.rank)
        self._add_others()

    def _add_others(self) -> None:
        """Expect evidence of the ranks of other hosts, in the order of ranks."""
        if self._hosts is None or not self._judges:
            return
        own = {place: process for process, place in self._places.items()}
        local, self._trainers = self._trainers, {}
        for place, spec in enumerate(self._plan.ranks):
            if place in own:
                self._trainers[own[place]] = local[own[place]]
            elif spec.role == "TRAINER" and spec.node_rank != self._plan.node_rank:
                self._trainers[_remote(place)] = _Trainer(names.spec_label(spec))

    # The supervisor's side ----------------------------------------------------------------------

    def open(self, waiting: Waiting, declare: Callable[[Declared], None]) -> None:
        """Begin to look."""
        self._waiting = waiting
        self._declare = declare
        if self._hosts is not None and self._judges:
            self._hosts.open(self._take)
        self._look_later()

    def on_event(self, happening: Happening) -> None:
        """Track the ranks, and judge when no more evidence can come."""
        match happening:
            case Started():
                self._is_ending = False
            case Exited(process=process, status=status) if process in self._trainers:
                self._trainers[process].has_ended = True
                # Whatever the host that judges has heard before.
                self._report(process)
                if status.exit_code:
                    self._is_ending = True
                elif not self._is_ending:
                    self._look()
            case SignalAll(signum=signum) if signum in _ENDING:
                self._is_ending = True
            case Gathered(attempt=attempt, plan=plan) if attempt:
                self._plan, self._asked = plan, None
                self._begin()
                self._look_later()
            case Finished(outcome=outcome):
                self._stop()
                self._read()
                has_word = any(
                    one.evidence is not None and one.evidence.tells
                    for one in self._trainers.values()
                )
                # Ranks that failed or were stopped had no time for evidence.
                if has_word or (outcome.cause is None and self._trainers):
                    self._show(self._asked_for())
            case _:
                pass

    def close(self) -> None:
        """Stop."""
        self._stop()

    # Looking ------------------------------------------------------------------------------------

    def _look_later(self) -> None:
        if self._waiting is not None:
            at = time.monotonic() + self._pace_s
            self._waiting.alarm("evidence", at, self._look_again)

    def _look_again(self) -> None:
        self._pace_s = min(self._pace_s * _SLOWER, _SLOWEST_S)
        # Before it looks: a look that settles everything takes the alarm away again.
        self._look_later()
        if not self._is_ending:
            self._look()

    def _stop(self) -> None:
        if self._waiting is not None:
            self._waiting.alarm("evidence", None, self._look_again)

    def _read(self) -> None:
        for process, trainer in self._trainers.items():
            if trainer.look() and self._hosts is not None and not self._judges:
                self._report(process)

    def _report(self, process: int) -> None:
        """Tell the host that judges what a rank has said last."""
        if self._hosts is not None and not self._judges:
            trainer = self._trainers[process]
            trainer.look()
            self._hosts.report(self._places[process], trainer.record, has_ended=trainer.has_ended)

    def _take(self, place: int, record: Mapping[str, object] | None, has_ended: bool) -> None:  # noqa: FBT001 - as a message has it
        """Take what another host tells of its rank."""
        trainer = self._trainers.get(_remote(place))
        if trainer is not None:
            trainer.take(record)
            trainer.has_ended = trainer.has_ended or has_ended
            if not self._is_ending:
                self._look()

    def _look(self) -> None:
        """Judge when all evidence is there, and again when the ranks have ended."""
        self._read()
        trainers = self._trainers.values()
        now = time.monotonic()
        if any(one.is_settled for one in trainers) and self._patient_until is None:
            self._patient_until = now + self._timeout_s
        if all(one.is_settled for one in trainers):
            self._stop()
            self._judge(is_last=all(one.has_ended for one in trainers))
        elif self._patient_until is not None and now >= self._patient_until and self._shown is None:
            self._show(self._asked_for())

    # Judging ------------------------------------------------------------------------------------

    def _asked_for(self) -> StrategyDocument:
        if self._asked is None:
            from fleetrun.records import strategyfiles  # only with a strategy

            self._asked = strategyfiles.parse_document(find(self._plan) or "{}")
            self._need(is_strict=self._asked.is_strict)
        return self._asked

    def _need(self, *, is_strict: bool) -> None:
        """Decide whether this source is required, which --strategy_strict makes it."""
        self.is_required = is_strict
        asked_for = ", which --strategy_strict asks for" if is_strict else ""
        self.without = f"without proof of what its strategy does{asked_for}"

    def _judge(self, *, is_last: bool) -> None:
        from fleetrun.sources import overview  # only with a strategy

        asked = self._asked_for()
        if self._has_judged and not is_last:
            return
        self._has_judged = True
        found = overview.faults(asked, self._show(asked), self._silence(), self._evidence())
        if found and asked.is_strict and self._judges:
            self._declare(Refuted(found, time.monotonic()))

    def _show(self, asked: StrategyDocument) -> Judged:
        """Declare and show the verdicts, if they have changed."""
        from fleetrun.sources import overview, overview_table  # only with a strategy

        evidence_of = self._evidence()
        judged = overview.judge(asked, evidence_of, time.monotonic())
        silence = self._silence()
        # Numbers grow with every update; only another answer is news.
        gist = (
            tuple(one._replace(why="") for one in judged.verdicts),
            tuple((who, silence[who]) for who in judged.silent),
            judged.ranks_equal,
            tuple(one.disagreements if one else () for one in evidence_of.values()),
        )
        if gist != self._shown:
            self._shown = gist
            self._declare(judged)
            is_fine = (
                not overview.faults(asked, judged, silence, evidence_of)
                and judged.ranks_equal is not False
            )
            if self._judges and not (self._is_quiet and is_fine):
                width = self._columns()
                self._show_lines(overview_table.table(asked, evidence_of, judged, silence, width))
        elif self._judges and not self._is_quiet:
            for note in overview_table.notes(evidence_of):
                if note not in self._noted:
                    self._say(f"Strategy: {note}")
        self._noted = frozenset(overview_table.notes(evidence_of))
        return judged

    def _evidence(self) -> dict[str, RankEvidence | None]:
        return {one.name: one.evidence for one in self._trainers.values()}

    def _silence(self) -> dict[str, str]:
        """Return for each rank without evidence what that means."""
        return {one.name: _silence_of(one) for one in self._trainers.values()}

    def _columns(self) -> int:
        """Return the width to keep to; a file has none."""
        if self._width is None:
            try:
                self._width = os.get_terminal_size(2).columns
            except OSError:
                self._width = 0
        return self._width


def _remote(place: int) -> int:
    """Return what stands for a rank of another host among processes of this one."""
    return -1 - place


def _silence_of(trainer: _Trainer) -> str:
    evidence = trainer.evidence
    if evidence is None:
        if not trainer.has_ended:
            return "has left no evidence yet"
        return (
            "left no evidence: it never imported Paddle, or its Python ignores PYTHONPATH"
            " (-I, -E, -S)"
        )
    if not trainer.has_ended:
        return "has made no optimizer update yet"
    if not evidence.backwards:
        return "imported Paddle and made no optimizer update, so nothing could be counted"
    times = "once" if evidence.backwards == 1 else f"{evidence.backwards} times"
    who = f" of its {evidence.optimizer}" if evidence.optimizer else ""
    return f"ran backward {times}, and no update{who} was seen, so nothing could be counted"
