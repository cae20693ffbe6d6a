"""Shows the outcome of the strategy: a row per field, counts, and differences; pure.

Only a launch with a strategy loads it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby

from fleetrun.model import FieldVerdict
from fleetrun.run.events import StrategyReport
from fleetrun.rundir.names import listed
from fleetrun.rundir.strategyfiles import (
    EFFECTIVE,
    NO_DIFFERENCE,
    NO_WORD,
    GradientCounts,
    RankEvidence,
    StrategyDocument,
)
from fleetrun.text import format_size, sentence, wrapped
from fleetrun.watch.overview import as_sentence

_SHOWN = {
    NO_DIFFERENCE: "no difference here",
    "no_effect": "NO EFFECT",
    "refused": "REFUSED",
    "script": "script's own",
    NO_WORD: "no word",
}
# With less room than this, the evidence gets lines of its own.
_NARROWEST = 32
# Longer values are cut in the table; where room is scarce, at less.
_LONGEST_VALUE = 36
_SHORTEST_VALUE = 8
# At most this many groups are listed.
_GROUPS = 8
_GAP = "  "
_WIDEST = 120


def table(
    asked: StrategyDocument,
    evidence_of: Mapping[str, RankEvidence | None],
    judged: StrategyReport,
    silence: Mapping[str, str],
    width: int,
) -> str:
    """Return the overview, within WIDTH columns where words allow, and never more than _WIDEST."""
    width = min(width or _WIDEST, _WIDEST)
    witnesses = [evidence for evidence in evidence_of.values() if evidence is not None]
    where = next((evidence.where for evidence in witnesses if evidence.where), "")
    origin = f"Strategy {', '.join(asked.sources)}" if asked.sources else "Strategy"
    if not judged.verdicts and not asked.sources:
        origin = "Comparison of the ranks"
    title = f"{origin} (mode {asked.mode}{'; ' + where if where else ''})"
    main = {verdict.name: verdict for verdict in reversed(judged.verdicts)}
    # What was left to auto is shown so; the reason has the word before its colon.
    words = {name: reason.partition(":")[0] for name, reason in asked.reasons}
    shown = [
        verdict._replace(asked=words.get(verdict.name, verdict.asked))
        for verdict in judged.verdicts
        if main[verdict.name] is verdict
    ]
    remarks = _counted(
        next((evidence.counts for evidence in witnesses if evidence.counts), None), where
    )
    remarks += [
        _difference(verdict, main[verdict.name])
        for verdict in judged.verdicts
        if main[verdict.name] is not verdict
    ]
    remarks += [f"{sentence(who)} {silence[who]}." for who in judged.silent]
    remarks += _by_rank(evidence_of, [evidence.disagreements for evidence in witnesses])
    if judged.ranks_equal is not None:
        after = max((evidence.compared_after or 0 for evidence in witnesses), default=0)
        when = f" after update {after}" if after else ""
        remarks.append(
            f"The parameters of all ranks are equal{when}."
            if judged.ranks_equal
            else "THE PARAMETERS OF THE RANKS DIFFER."
        )
    # Skip reasons that a row has given in more detail.
    explained = {verdict.name for verdict in shown if "auto: " in verdict.why}
    remarks += [f"{name}: {why}" for name, why in asked.reasons if name not in explained]
    remarks += [f"Environment: {variable}" for variable in asked.environment]
    remarks += notes(evidence_of)
    room = width - len(_GAP) if width else 0
    # The console puts its name before the first line.
    first, *more = wrapped(title, width - len("fleetrun: ") if width else 0)
    lines = [*more, *_rows(shown, room)]
    lines += [line for remark in remarks for line in wrapped(remark, room)]
    return "\n".join([first, *(_GAP + line for line in lines)])


def _rows(shown: Sequence[FieldVerdict], room: int) -> list[str]:
    """Set the fields in columns, with the evidence last, or below if there is no room beside."""
    if not shown:
        return []
    values = [
        (
            verdict.name,
            verdict.asked or "-",
            verdict.in_effect or "-",
            _SHOWN.get(verdict.status, verdict.status),
        )
        for verdict in shown
    ]
    cells = [
        ("field", "asked", "in effect", "status"),
        *(_cut(row, _LONGEST_VALUE) for row in values),
    ]
    begin = sum(_widths(cells)) + len(_GAP) * 4
    whys = ["why", *_once([verdict.why for verdict in shown])]
    if not room or room - begin >= _NARROWEST:
        return _beside(cells, whys, room - begin if room else 0)
    names, statuses = (max(len(row[n]) for row in cells) for n in (0, 3))
    longest = max((room - names - statuses - len(_GAP) * 3) // 2, _SHORTEST_VALUE)
    return _below([_cut(row, longest) for row in cells], whys, room)


def _once(whys: Sequence[str]) -> list[str]:
    """Return WHYS, the later ones without the parts that stood before.

    >>> _once(["6 allreduces; largest 1 MB", "6 allreduces; largest 1 MB", "6 allreduces; 1 MB"])
    ['6 allreduces; largest 1 MB', 'as above', 'as above; 1 MB']
    """
    before: set[str] = set()
    shorter = []
    for why in whys:
        parts = re.split(r"; |\. (?=auto: |plan: )", why)
        new = [part for part in parts if part not in before]
        above = ["as above"] if len(new) < len(parts) else []
        shorter.append("; ".join([*above, *new]))
        before.update(part for part in parts if part)
    return shorter


def _beside(cells: Sequence[tuple[str, ...]], whys: Sequence[str], room: int) -> list[str]:
    lines = []
    for row, why in zip(_aligned(cells), whys, strict=True):
        first, *more = wrapped(why, room) or [""]
        lines += [f"{row}{first}".rstrip(), *(f"{'':{len(row)}}{line}" for line in more)]
    return lines


def _below(cells: Sequence[tuple[str, ...]], whys: Sequence[str], room: int) -> list[str]:
    lines = []
    for place, (row, why) in enumerate(zip(_aligned(cells), whys, strict=True)):
        lines.append(row.rstrip())
        if place:
            lines += [f"    {line}" for line in wrapped(why, room - 4)]
    return lines


def _aligned(cells: Sequence[tuple[str, ...]]) -> list[str]:
    widths = _widths(cells)
    return [
        "".join(f"{cell:<{space}}{_GAP}" for cell, space in zip(row, widths, strict=True))
        for row in cells
    ]


def _widths(cells: Sequence[tuple[str, ...]]) -> list[int]:
    return [max(len(row[n]) for row in cells) for n in range(len(cells[0]))]


def _cut(row: tuple[str, ...], longest: int) -> tuple[str, ...]:
    """Cut the values of ROW, between the name and the status."""
    name, *values, status = row
    short = [value if len(value) <= longest else f"{value[: longest - 1]}…" for value in values]
    return (name, *short, status)


def _counted(counts: GradientCounts | None, where: str) -> list[str]:
    """Return lines about how the gradients were sent.

    >>> from fleetrun.rundir.strategyfiles import GradientCounts
    >>> counts = GradientCounts(161, 161, 6, (16777216, 16777216, 8388608), 2, ((0, 1), (2, 3)))
    >>> for line in _counted(counts, "Paddle 2.6.2, static on cpu"):
    ...     print(line)
    Allreduces: 161 → 6, of 161 gradients.
    Bytes per bucket: 2 x 16 MiB, 8 MiB.
    Communicators: 2. Groups: 0-1, 2-3.
    """
    if counts is None:
        return []
    before = "" if counts.allreduces_before is None else f"{counts.allreduces_before} → "
    # Without a strategy, a dynamic graph has Paddle's own buckets.
    versus = " (without the strategy → with it)" if before and "dygraph" in where else ""
    gradients = "" if counts.gradients is None else f", of {counts.gradients} gradients"
    lines = [f"Allreduces: {before}{counts.allreduces}{versus}{gradients}."]
    if counts.bucket_bytes:
        sizes = [format_size(size) for size in counts.bucket_bytes]
        runs = [(size, len(list(run))) for size, run in groupby(sizes)]
        runs_text = ", ".join(
            size if number == 1 else f"{number} x {size}" for size, number in runs
        )
        lines.append(f"Bytes per bucket: {runs_text}.")
    last = [] if counts.communicators is None else [f"Communicators: {counts.communicators}."]
    if counts.groups:
        groups = [_ranks(group) for group in counts.groups[:_GROUPS]]
        groups += ["…"] if len(counts.groups) > _GROUPS else []
        last.append(f"Groups: {', '.join(groups)}.")
    return [*lines, *([" ".join(last)] if last else [])]


def _ranks(group: Sequence[int]) -> str:
    text = listed([f"rank {number}" for number in group])
    return text.partition(" ")[2].replace(", ", "+")


def _difference(verdict: FieldVerdict, main: FieldVerdict) -> str:
    """Describe how a field on some ranks differs from the first rank."""
    verb = "differs" if len(verdict.who) == 1 else "differ"
    who = f"{sentence(listed(verdict.who))} {verb} from {listed(main.who)}"
    if verdict.status == main.status == EFFECTIVE:
        here, usual = verdict.in_effect or "-", main.in_effect or "-"
        return f"{who}: {verdict.name} is {here} there, not {usual}."
    return f"{who}: {as_sentence(verdict)}."


def notes(evidence_of: Mapping[str, RankEvidence | None]) -> list[str]:
    """Return what the ranks have noted, each sentence once."""
    return _by_rank(
        evidence_of, [evidence.notes for evidence in evidence_of.values() if evidence is not None]
    )


def _by_rank(
    evidence_of: Mapping[str, RankEvidence | None], notes_of: Sequence[tuple[str, ...]]
) -> list[str]:
    """Return each sentence once, with the ranks that report it unless all do."""
    witnesses = [label for label, evidence in evidence_of.items() if evidence is not None]
    labels_of: dict[str, list[str]] = {}
    for label, sentences in zip(witnesses, notes_of, strict=True):
        for words in sentences:
            labels_of.setdefault(words, []).append(label)
    return [
        note if len(labels) == len(witnesses) else f"{sentence(listed(labels))}: {note}"
        for note, labels in labels_of.items()
    ]
