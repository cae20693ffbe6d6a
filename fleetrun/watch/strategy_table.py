"""What the ranks' evidence says about the strategy, compared with the request; pure.

Only a launch with a strategy loads it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

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
from fleetrun.text import sentence, wrapped

# Each status as a cell of the table, and in a sentence about a field.
_STATUSES = {
    EFFECTIVE: (EFFECTIVE, "is in effect"),
    NO_DIFFERENCE: ("no difference here", "makes no difference here"),
    "no_effect": ("NO EFFECT", "has no effect"),
    "refused": ("REFUSED", "is refused"),
    "script": ("script's own", "is not in effect, because the script sets it itself"),
    NO_WORD: ("no word", "is not mentioned by the evidence"),
}
_CONFIGS = "_configs"
# With less room than this, the evidence gets lines of its own.
_NARROWEST = 32
# Longer values are cut.
_LONGEST_VALUE = 24
_GAP = "  "
_WIDEST = 120

Evidence = Mapping[str, RankEvidence | None]


def judge(asked: StrategyDocument, evidence_of: Evidence, at: float) -> StrategyReport:
    """Return the verdict on each field from EVIDENCE_OF the ranks.

    Ranks with equal evidence share a verdict; the first one of each field is that of the first
    rank.
    """
    seen = {who: evidence for who, evidence in evidence_of.items() if evidence is not None}
    shared: dict[tuple[str, ...], FieldVerdict] = {}
    for who, evidence in seen.items():
        if not evidence.is_complete and not evidence.fields:
            continue
        for field in _fields(asked, evidence):
            # Counts may differ a little from rank to rank; what they show may not.
            key = (field.name, field.in_effect, field.status)
            first = shared.get(key, field)
            shared[key] = first._replace(who=(*first.who, who) if key in shared else (who,))
    order = list(dict.fromkeys(verdict.name for verdict in shared.values()))
    compared = [
        evidence.ranks_equal for evidence in seen.values() if evidence.ranks_equal is not None
    ]
    return StrategyReport(
        tuple(sorted(shared.values(), key=lambda verdict: order.index(verdict.name))),
        at,
        tuple(
            who
            for who, evidence in evidence_of.items()
            if evidence is None or not evidence.is_complete
        ),
        all(compared) if compared else None,
    )


def _fields(asked: StrategyDocument, evidence: RankEvidence) -> Iterable[FieldVerdict]:
    """Return a rank's verdict on each requested field, and on others that it mentions."""
    reported = {field.name: field for field in evidence.fields}
    for name, value in asked.fields:
        switch = reported.get(name.removesuffix(_CONFIGS)) if name.endswith(_CONFIGS) else None
        if name in reported:
            yield reported[name]._replace(asked=value)
        elif switch is not None:
            # The parts of a feature have its status and its reason.
            in_effect = value if switch.status in IN_EFFECT else ""
            yield FieldVerdict(name, value, in_effect, switch.status, f"with {switch.name}")
        else:
            yield FieldVerdict(name, value, "", NO_WORD)
    names = {name for name, _ in asked.fields}
    yield from (field for name, field in reported.items() if name not in names)


def faults(
    asked: StrategyDocument,
    judged: StrategyReport,
    silence: Mapping[str, str],
    evidence_of: Evidence,
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
            clauses.append(f"{listed(labels)}: {_as_sentence(verdict)}")
    return (*clauses, *(f"{who} {silence[who]}" for who in judged.silent if who not in unproved))


def _as_sentence(verdict: FieldVerdict) -> str:
    """Return the status of a field as a sentence without its full stop."""
    # Not what was counted, which tells nothing where there is no effect.
    why = f": {verdict.why.rstrip('.')}" if verdict.why else ""
    return f"{verdict.name} {_STATUSES[verdict.status][1]}{why}"


def table(
    asked: StrategyDocument,
    evidence_of: Evidence,
    judged: StrategyReport,
    silence: Mapping[str, str],
    width: int,
) -> str:
    """Return the overview, within WIDTH columns where words allow, and never more than _WIDEST."""
    width = min(width or _WIDEST, _WIDEST)
    seen = [evidence for evidence in evidence_of.values() if evidence is not None]
    where = next((evidence.where for evidence in seen if evidence.where), "")
    origin = f"Strategy {', '.join(asked.sources)}" if asked.sources else "Strategy"
    if not judged.verdicts and not asked.sources:
        origin = "Comparison of the ranks"
    title = f"{origin} (mode {asked.mode}{'; ' + where if where else ''})"
    # What was left to auto is shown so; the reason has the word before its colon.
    words = {name: reason.partition(":")[0] for name, reason in asked.reasons}
    main: dict[str, FieldVerdict] = {}
    differences = []
    for verdict in judged.verdicts:
        if verdict.name in main:
            differences.append(_difference(verdict, main[verdict.name]))
        else:
            value = words.get(verdict.name, verdict.asked)
            main[verdict.name] = verdict._replace(asked=value)
    remarks = [
        *differences,
        *(f"{sentence(who)} {silence[who]}." for who in judged.silent),
        *_by_rank(
            {who: evidence.disagreements for who, evidence in evidence_of.items() if evidence}
        ),
    ]
    if judged.ranks_equal is not None:
        after = max((evidence.compared_after or 0 for evidence in seen), default=0)
        when = f" after update {after}" if after else ""
        equal = f"The parameters of all ranks are equal{when}."
        remarks.append(equal if judged.ranks_equal else "THE PARAMETERS OF THE RANKS DIFFER.")
    # Skip reasons that a row has given in more detail.
    explained = {verdict.name for verdict in main.values() if "auto: " in verdict.why}
    remarks += [f"{name}: {why}" for name, why in asked.reasons if name not in explained]
    remarks += [f"Environment: {variable}" for variable in asked.environment]
    remarks += _by_rank({who: it.notes for who, it in evidence_of.items() if it})
    room = width - len(_GAP)
    # The console puts its name before the first line.
    first, *more = wrapped(title, width - len("fleetrun: "))
    lines = [*more, *_rows(list(main.values()), room)]
    lines += [line for remark in remarks for line in wrapped(remark, room)]
    return "\n".join([first, *(_GAP + line for line in lines)])


def _rows(shown: Sequence[FieldVerdict], room: int) -> list[str]:
    """Set the fields in columns, with the evidence last, or below if there is no room beside."""
    if not shown:
        return []
    rows = [("field", "asked", "in effect", "status")]
    for row in shown:
        status, _ = _STATUSES.get(row.status, (row.status, ""))
        rows.append((row.name, _cut(row.asked), _cut(row.in_effect), status))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    whys, before = ["why"], set[str]()
    for row in shown:
        parts = [part for part in re.split(r"; |\. (?=auto: )", row.why) if part]
        new = [part for part in parts if part not in before]
        whys.append("; ".join([*(["as above"] if len(new) < len(parts) else []), *new]))
        before.update(new)
    for values, why in zip(rows, whys, strict=True):
        line = "".join(f"{cell:<{space}}{_GAP}" for cell, space in zip(values, widths, strict=True))
        beside = room - len(line)
        if beside >= _NARROWEST:
            first, *more = wrapped(why, beside) or [""]
            lines += [f"{line}{first}".rstrip(), *(" " * len(line) + part for part in more)]
        else:
            below = wrapped(why, room - 4) if lines else []
            lines += [line.rstrip(), *(f"    {part}" for part in below)]
    return lines


def _cut(value: str) -> str:
    return f"{value[: _LONGEST_VALUE - 1]}…" if len(value) > _LONGEST_VALUE else value or "-"


def _difference(verdict: FieldVerdict, main: FieldVerdict) -> str:
    """Describe how a field on some ranks differs from the first rank."""
    verb = "differs" if len(verdict.who) == 1 else "differ"
    who = f"{sentence(listed(verdict.who))} {verb} from {listed(main.who)}"
    if verdict.status == main.status == EFFECTIVE:
        here, usual = verdict.in_effect or "-", main.in_effect or "-"
        return f"{who}: {verdict.name} is {here} there, not {usual}."
    return f"{who}: {_as_sentence(verdict)}."


def _by_rank(sentences_of: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return each sentence once, with the ranks that report it unless all do."""
    labels_of: dict[str, list[str]] = {}
    for who, sentences in sentences_of.items():
        for words in sentences:
            labels_of.setdefault(words, []).append(who)
    return [
        words if len(labels) == len(sentences_of) else f"{sentence(listed(labels))}: {words}"
        for words, labels in labels_of.items()
    ]
