"""What the ranks' evidence says about the strategy, compared with the request.

Pure. Only a launch with a strategy loads it; `overview_table` shows the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fleetrun.model import FieldVerdict
from fleetrun.run.events import StrategyReport
from fleetrun.rundir.names import listed
from fleetrun.rundir.strategyfiles import (
    EFFECTIVE,
    IN_EFFECT,
    NO_DIFFERENCE,
    NO_WORD,
    RankEvidence,
    StrategyDocument,
)

# The words for each status in a sentence about a field.
_STATUS_TEXT = {
    EFFECTIVE: "is in effect",
    NO_DIFFERENCE: "makes no difference here",
    "no_effect": "has no effect",
    "refused": "is refused",
    "script": "is not in effect, because the script sets it itself",
    NO_WORD: "is not mentioned by the evidence",
}
_CONFIGS = "_configs"


def judge(
    asked: StrategyDocument, evidence_of: Mapping[str, RankEvidence | None], at: float
) -> StrategyReport:
    """Return the verdict on each field from EVIDENCE_OF the ranks.

    Ranks with equal evidence share a verdict; the first one of each field is that of the first
    rank.
    """
    silent = tuple(
        rank
        for rank, evidence in evidence_of.items()
        if evidence is None or not evidence.is_complete
    )
    labels_of: dict[tuple[str, ...], list[str]] = {}
    first: dict[tuple[str, ...], FieldVerdict] = {}
    for rank, evidence in evidence_of.items():
        if evidence is None or (rank in silent and not evidence.fields):
            continue
        for knob in _rows(asked, evidence):
            # Counts may differ a little from rank to rank; what they show may not.
            key = (knob.name, knob.in_effect, knob.status)
            labels_of.setdefault(key, []).append(rank)
            first.setdefault(key, knob)
    verdicts = [first[key]._replace(who=tuple(rank)) for key, rank in labels_of.items()]
    order = {
        name: place
        for place, name in enumerate(dict.fromkeys(evidence.name for evidence in verdicts))
    }
    verdicts.sort(key=lambda evidence: order[evidence.name])
    compared = [
        evidence.ranks_equal
        for evidence in evidence_of.values()
        if evidence and evidence.ranks_equal is not None
    ]
    return StrategyReport(tuple(verdicts), at, silent, all(compared) if compared else None)


def _rows(asked: StrategyDocument, evidence: RankEvidence) -> Iterable[FieldVerdict]:
    """Return a rank's verdict on each requested field, and on others that it mentions."""
    reported = {knob.name: knob for knob in evidence.fields}
    for name, value in asked.fields:
        switch = reported.get(name.removesuffix(_CONFIGS)) if name.endswith(_CONFIGS) else None
        if name in reported:
            yield reported[name]._replace(asked=value)
        elif switch is not None:
            # The parts of a feature have its status and its reason.
            how = f"with {switch.name}"
            in_effect = value if switch.status in IN_EFFECT else ""
            yield FieldVerdict(name, value, in_effect, switch.status, how)
        else:
            yield FieldVerdict(name, value, "", NO_WORD)
    names = {name for name, _ in asked.fields}
    yield from (knob for knob in reported.values() if knob.name not in names)


def faults(
    asked: StrategyDocument,
    judged: StrategyReport,
    silence: Mapping[str, str],
    evidence_of: Mapping[str, RankEvidence | None],
) -> tuple[str, ...]:
    """Return what --strategy_strict does not accept, one clause each.

    What a rank does not know because its proof has failed is not a fault.
    """
    names = {name for name, _ in asked.fields}
    if not names:
        return ()
    unproved = {who for who, evidence in evidence_of.items() if evidence and evidence.failures}
    clauses = []
    for verdict in judged.verdicts:
        labels = [who for who in verdict.who if verdict.status != NO_WORD or who not in unproved]
        if verdict.name in names and verdict.status not in IN_EFFECT and labels:
            clauses.append(f"{listed(labels)}: {as_sentence(verdict)}")
    return (*clauses, *(f"{who} {silence[who]}" for who in judged.silent if who not in unproved))


def as_sentence(verdict: FieldVerdict) -> str:
    """Return the status of a field as a sentence without its full stop.

    >>> as_sentence(FieldVerdict("dgc", "true", "", "refused", "Paddle has none."))
    'dgc is refused: Paddle has none'
    """
    # Not what was counted, which tells nothing where there is no effect.
    why = f": {verdict.why.rstrip('.')}" if verdict.why else ""
    return f"{verdict.name} {_STATUS_TEXT[verdict.status]}{why}"
