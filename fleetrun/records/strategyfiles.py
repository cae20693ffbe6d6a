"""Reading `strategy.json`, what is asked for, and the record of what came of it in a rank.

Only a launch with a strategy loads it. `inject/evidence.py` writes the record.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from fleetrun.model import FieldVerdict
from fleetrun.records import rankfile, reading

if TYPE_CHECKING:
    from collections.abc import Mapping

# Of what is asked for.
DOCUMENT_SCHEMA = 1
SECTIONS = ("strategy", "build_strategy", "execution_strategy")
EFFECTIVE, NO_WORD = "effective", "no_word"
# In effect; the job trains in the same way without it.
NO_DIFFERENCE = "no_difference"
IN_EFFECT = frozenset((EFFECTIVE, NO_DIFFERENCE))
STATUSES = IN_EFFECT | {"no_effect", "refused", "script"}
# What ranks count is told in plurals.
_ONE = re.compile(r"\b1 (allreduce|communicator|gradient|micro-step|operator|block|parameter)s\b")


class StrategyDocument(NamedTuple):
    """What `strategy.json` asks for: its fields as text, in order, and what else is shown."""

    fields: tuple[tuple[str, str], ...]
    sources: tuple[str, ...] = ()
    mode: str = "defaults"
    is_strict: bool = False
    # Why a field that was left to auto has its value, by field.
    reasons: tuple[tuple[str, str], ...] = ()
    environment: tuple[str, ...] = ()


class GradientCounts(NamedTuple):
    """How a rank's gradients were sent; None: it did not say."""

    gradients: int | None = None
    allreduces_before: int | None = None
    allreduces: int | None = None
    bucket_bytes: tuple[int, ...] = ()
    communicators: int | None = None
    groups: tuple[tuple[int, ...], ...] = ()


class RankEvidence(NamedTuple):
    """All that one rank says."""

    is_complete: bool = False
    # As `Paddle 3.3.1, dygraph on gpu`.
    where: str = ""
    fields: tuple[FieldVerdict, ...] = ()
    notes: tuple[str, ...] = ()
    # Sentences about what script and strategy do not agree on.
    disagreements: tuple[str, ...] = ()
    ranks_equal: bool | None = None
    # After which update they were compared.
    compared_after: int | None = None
    counts: GradientCounts | None = None
    # What was to count, compare or report there, and has failed.
    failures: tuple[str, ...] = ()
    # As long as there was no update: the backwards, and the class that has the parameters.
    backwards: int = 0
    optimizer: str = ""

    @property
    def tells(self) -> bool:
        """Whether it says more than that Paddle was imported."""
        return bool(self.is_complete or self.fields or self.notes)


def parse_document(text: str) -> StrategyDocument:
    """Return what TEXT, that of `strategy.json`, asks for; nothing if it is none."""
    found = reading.parse(text.encode(errors="surrogateescape")) or {}
    return StrategyDocument(
        fields=tuple(
            (name, as_text(value))
            for section in SECTIONS
            for name, value in reading.mapping(found.get(section)).items()
        ),
        sources=reading.texts(found.get("sources")),
        mode=reading.text(found.get("mode", "defaults")),
        is_strict=found.get("strict") is True,
        reasons=tuple(
            (name, reading.text(why)) for name, why in reading.mapping(found.get("reasons")).items()
        ),
        environment=tuple(
            f"{name}={reading.text(value)}"
            for name, value in reading.mapping(found.get("environment")).items()
        ),
    )


def parse_evidence(found: Mapping[str, Any] | None) -> RankEvidence | None:
    """Return what the record FOUND of a rank says; None if it is none."""
    if found is None or found.get("schema") != rankfile.SCHEMA:
        return None
    try:
        return _evidence(found)
    except RecursionError:
        # Nested as deeply as could just be read.
        return None


def _evidence(found: Mapping[str, Any]) -> RankEvidence:
    return reading.record(
        RankEvidence,
        found,
        is_complete=found.get("complete") is True,
        where=_where(found),
        fields=tuple(
            _field(one) for one in reading.mappings(found.get("knobs")) if one.get("name")
        ),
        disagreements=tuple(
            f"The script sets {one.get('name')} to {as_text(one.get('script'))}, the strategy to "
            f"{as_text(one.get('strategy'))}: {as_text(one.get('used'))} is used."
            for one in reading.mappings(found.get("disagreements"))
        ),
        counts=_counts(reading.mapping(found.get("counts"))),
        backwards=reading.whole(found.get("backwards")) or 0,
        optimizer=reading.text(found.get("optimizer", "")),
    )


def _counts(reported: Mapping[str, Any]) -> GradientCounts | None:
    if reading.whole(reported.get("allreduces")) is None:
        return None
    groups = tuple(map(reading.wholes, reading.items(reported.get("groups"))))
    return reading.record(GradientCounts, reported, groups=groups)


def _field(one: Mapping[str, Any]) -> FieldVerdict:
    status = reading.text(one.get("status"))
    why = ". ".join(
        reading.text(one[key]).rstrip(".") for key in ("evidence", "reason") if one.get(key)
    )
    return FieldVerdict(
        name=reading.text(one["name"]),
        asked=as_text(one.get("asked")),
        in_effect=as_text(one.get("in_effect")),
        # A word that is not known is none.
        status=status if status in STATUSES else NO_WORD,
        why=_ONE.sub(r"1 \1", why),
    )


def _where(found: Mapping[str, Any]) -> str:
    paddle, graph, device = (reading.text(found.get(key)) for key in ("paddle", "graph", "device"))
    parts = (
        f"Paddle {paddle}" if paddle else "",
        " on ".join(one for one in (graph, device) if one),
    )
    return ", ".join(part for part in parts if part)


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
        return " ".join(f"{key}={as_text(one)}" for key, one in value.items())
    if isinstance(value, list | tuple):
        return ",".join(map(as_text, value))
    return " ".join(reading.text(value).split())
