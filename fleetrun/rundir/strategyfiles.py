"""Reads `strategy.json`, the request, and the evidence that `inject/evidence.py` writes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from fleetrun.model import FieldVerdict
from fleetrun.rundir import reading

# The schema of the requested strategy.
DOCUMENT_SCHEMA = 1
SECTIONS = ("strategy", "build_strategy", "execution_strategy")
EFFECTIVE, NO_WORD = "effective", "no_word"
# In effect, but the job trains the same without it.
NO_DIFFERENCE = "no_difference"
IN_EFFECT = frozenset((EFFECTIVE, NO_DIFFERENCE))
STATUSES = IN_EFFECT | {"no_effect", "refused", "script"}
# Ranks report counts in the plural.
_ONE = re.compile(r"\b1 (allreduce|communicator|gradient|micro-step|operator|block|parameter)s\b")


class StrategyDocument(NamedTuple):
    """The content of `strategy.json`: its fields as text, in order, and what else is shown."""

    fields: tuple[tuple[str, str], ...]
    sources: tuple[str, ...] = ()
    mode: str = "defaults"
    is_strict: bool = False
    # The reason for the value of each field that was left to auto.
    reasons: tuple[tuple[str, str], ...] = ()
    environment: tuple[str, ...] = ()


class RankEvidence(NamedTuple):
    """The evidence of one rank."""

    is_complete: bool = False
    # Its version, and all as `Paddle 3.3.1, dygraph on gpu`.
    paddle: str = ""
    where: str = ""
    fields: tuple[FieldVerdict, ...] = ()
    notes: tuple[str, ...] = ()
    # Sentences about conflicts between script and strategy.
    disagreements: tuple[str, ...] = ()
    ranks_equal: bool | None = None
    # After which update they were compared.
    compared_after: int | None = None
    # Functions that count, compare or report in the rank, and failed.
    failures: tuple[str, ...] = ()
    # Changes to the training that could not be installed.
    unapplied: tuple[str, ...] = ()


def parse_document(text: str) -> StrategyDocument:
    """Return the request in TEXT, the content of `strategy.json`; empty if it is not one."""
    document = reading.parse(text.encode(errors="surrogateescape")) or {}
    sections = [document.get(section) or {} for section in SECTIONS]
    environment = document.get("environment") or {}
    return reading.record(
        StrategyDocument,
        document,
        fields=tuple((name, as_text(value)) for own in sections for name, value in own.items()),
        is_strict=document.get("strict") is True,
        reasons=tuple((document.get("reasons") or {}).items()),
        environment=tuple(f"{name}={value}" for name, value in environment.items()),
    )


def parse_evidence(record: Mapping[str, Any] | None) -> RankEvidence | None:
    """Return the evidence in a rank's RECORD; None if it has none."""
    if record is None:
        return None
    paddle, graph, device = (record.get(key) or "" for key in ("paddle", "graph", "device"))
    where = f"Paddle {paddle}" if paddle else "", " on ".join(filter(None, (graph, device)))
    conflicts = [
        tuple(as_text(entry.get(key)) for key in ("name", "script", "strategy", "used"))
        for entry in record.get("disagreements") or ()
    ]
    return reading.record(
        RankEvidence,
        record,
        is_complete=record.get("complete") is True,
        where=", ".join(filter(None, where)),
        fields=tuple(map(_field, record.get("fields") or ())),
        disagreements=tuple(
            f"The script sets {name} to {script}, the strategy to {strategy}: {used} is used."
            for name, script, strategy, used in conflicts
        ),
    )


def _field(entry: Mapping[str, Any]) -> FieldVerdict:
    whys = filter(None, (entry.get("evidence"), entry.get("reason")))
    return FieldVerdict(
        name=entry["name"],
        asked=as_text(entry.get("asked")),
        in_effect=as_text(entry.get("in_effect")),
        # An unknown word counts as none.
        status=status if (status := entry.get("status")) in STATUSES else NO_WORD,
        why=_ONE.sub(r"1 \1", ". ".join(why.rstrip(".") for why in whys)),
    )


def as_text(value: object) -> str:
    """Write a value as YAML would, in one line.

    >>> as_text(True), as_text(None), as_text({"k_steps": 4, "avg": True}), as_text([1, 2.0])
    ('true', '', 'k_steps=4 avg=true', '1,2')
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return " ".join(f"{key}={as_text(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ",".join(map(as_text, value))
    return " ".join(reading.text(value).split())
