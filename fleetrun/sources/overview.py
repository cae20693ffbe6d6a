"""What the ranks' evidence says about the strategy: read, and compared with what was asked.

Pure. Only a launch with a strategy loads it; `overview_table` shows it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from fleetrun.postmortem.report import listed
from fleetrun.run.events import Judged, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SECTIONS = ("strategy", "build_strategy", "execution_strategy")
EFFECTIVE, NO_WORD = "effective", "no_word"
_STATUSES = frozenset((EFFECTIVE, "no_effect", "refused", "script"))
# How each status is said in a sentence about a knob.
_SAID = {
    EFFECTIVE: "is in effect",
    "no_effect": "has no effect",
    "refused": "is refused",
    "script": "is not in effect, because the script sets it itself",
    NO_WORD: "is not mentioned by the evidence",
}
_CONFIGS = "_configs"
# What ranks count is told in plurals.
_ONE = re.compile(r"\b1 (allreduce|communicator|gradient|micro-step|operator|block|parameter)s\b")


class Asked(NamedTuple):
    """What `strategy.json` asks for: its fields as text, in order, and what else is shown."""

    fields: tuple[tuple[str, str], ...]
    sources: tuple[str, ...] = ()
    mode: str = "defaults"
    is_strict: bool = False
    # Why a field that was left to auto has its value, by field.
    reasons: tuple[tuple[str, str], ...] = ()
    environment: tuple[str, ...] = ()


class Knob(NamedTuple):
    """One field, as one rank saw it."""

    name: str
    asked: str
    in_effect: str
    status: str
    why: str


class Counts(NamedTuple):
    """How a rank's gradients were sent; None: it did not say."""

    gradients: int | None = None
    allreduces_before: int | None = None
    allreduces: int | None = None
    bucket_bytes: tuple[int, ...] = ()
    communicators: int | None = None
    groups: tuple[tuple[int, ...], ...] = ()


class Testimony(NamedTuple):
    """One rank's evidence."""

    is_complete: bool = False
    # As `Paddle 3.3.1, dygraph on gpu`.
    where: str = ""
    knobs: tuple[Knob, ...] = ()
    notes: tuple[str, ...] = ()
    # Sentences about what script and strategy do not agree on.
    disagreements: tuple[str, ...] = ()
    ranks_equal: bool | None = None
    # After which update they were compared.
    compared_after: int | None = None
    counts: Counts | None = None


# Read -------------------------------------------------------------------------------------------


def wanted(document: Mapping[str, Any]) -> Asked:
    """Return what the parsed `strategy.json` asks for."""
    fields = tuple(
        (name, said(value))
        for section in SECTIONS
        for name, value in _mapping(document.get(section)).items()
    )
    return Asked(
        fields=fields,
        sources=tuple(map(str, document.get("sources") or ())),
        mode=str(document.get("mode", "defaults")),
        is_strict=document.get("strict") is True,
        reasons=tuple((n, str(why)) for n, why in _mapping(document.get("reasons")).items()),
        environment=tuple(
            f"{name}={value}" for name, value in _mapping(document.get("environment")).items()
        ),
    )


def testimony(document: object) -> Testimony | None:
    """Return what a rank's parsed evidence says; None if it is none, whatever it is."""
    # Other processes write it, some of them while they die: nothing in it is taken for granted.
    if not isinstance(document, dict) or document.get("schema") != 1:
        return None
    return Testimony(
        is_complete=document.get("complete") is True,
        where=_where(document),
        knobs=tuple(_knob(one) for one in _dicts(document.get("knobs")) if one.get("name")),
        notes=tuple(str(one) for one in _list(document.get("notes"))),
        disagreements=tuple(
            f"The script sets {one.get('name')} to {said(one.get('script'))}, the strategy to "
            f"{said(one.get('strategy'))}: {said(one.get('used'))} is used."
            for one in _dicts(document.get("disagreements"))
        ),
        ranks_equal=_bool(document.get("ranks_equal")),
        compared_after=_number(document.get("compared_after")),
        counts=_counts(_mapping(document.get("counts"))),
    )


def _counts(told: Mapping[str, Any]) -> Counts | None:
    if _number(told.get("allreduces")) is None:
        return None
    return Counts(
        gradients=_number(told.get("gradients")),
        allreduces_before=_number(told.get("allreduces_before")),
        allreduces=_number(told.get("allreduces")),
        bucket_bytes=_numbers(told.get("bucket_bytes")),
        communicators=_number(told.get("communicators")),
        groups=tuple(map(_numbers, _list(told.get("groups")))),
    )


def _knob(one: Mapping[str, Any]) -> Knob:
    status = str(one.get("status"))
    why = ". ".join(str(one[key]).rstrip(".") for key in ("evidence", "reason") if one.get(key))
    return Knob(
        name=str(one["name"]),
        asked=said(one.get("asked")),
        in_effect=said(one.get("in_effect")),
        # A word that is not known is none.
        status=status if status in _STATUSES else NO_WORD,
        why=_ONE.sub(r"1 \1", why),
    )


def _where(document: Mapping[str, Any]) -> str:
    paddle, graph, device = (document.get(key) for key in ("paddle", "graph", "device"))
    graph_where = " on ".join(str(one) for one in (graph, device) if one)
    parts = [f"Paddle {paddle}" if paddle else "", graph_where]
    return ", ".join(part for part in parts if part)


def said(value: object) -> str:
    """Write a value as YAML would, in one line.

    >>> said(True), said(None), said({"k_steps": 4, "avg": True}), said([1, 2.0])
    ('true', '', 'k_steps=4 avg=true', '1,2')
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return " ".join(f"{key}={said(one)}" for key, one in value.items())
    if isinstance(value, list | tuple):
        return ",".join(map(said, value))
    return " ".join(str(value).split())


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _dicts(value: object) -> list[dict[str, Any]]:
    return [one for one in _list(value) if isinstance(one, dict)]


def _bool(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _numbers(value: object) -> tuple[int, ...]:
    found = [_number(one) for one in _list(value)]
    return tuple(one for one in found if one is not None)


# Compare ----------------------------------------------------------------------------------------


def judge(asked: Asked, heard: Mapping[str, Testimony | None], at: float) -> Judged:
    """Return what became of each field in the ranks whose labels HEARD has, rank by rank.

    Ranks that say the same share a verdict; the first one of each field is that of the first rank.
    """
    silent = tuple(who for who, one in heard.items() if one is None or not one.is_complete)
    found: dict[tuple[str, ...], list[str]] = {}
    first: dict[tuple[str, ...], Knob] = {}
    for who, one in heard.items():
        if one is None or (who in silent and not one.knobs):
            continue
        for knob in _rows(asked, one):
            # What was counted may differ a little from rank to rank; what it shows may not.
            key = (knob.name, knob.in_effect, knob.status)
            found.setdefault(key, []).append(who)
            first.setdefault(key, knob)
    verdicts = [
        Verdict(tuple(who), one.name, one.asked, one.in_effect, one.status, one.why)
        for key, who in found.items()
        for one in (first[key],)
    ]
    order = {name: place for place, name in enumerate(dict.fromkeys(one.name for one in verdicts))}
    verdicts.sort(key=lambda one: order[one.name])
    compared = [one.ranks_equal for one in heard.values() if one and one.ranks_equal is not None]
    return Judged(tuple(verdicts), at, silent, all(compared) if compared else None)


def _rows(asked: Asked, one: Testimony) -> Iterable[Knob]:
    """Return what a rank says of each field that was asked for, and of others it tells of."""
    told = {knob.name: knob for knob in one.knobs}
    for name, value in asked.fields:
        switch = told.get(name.removesuffix(_CONFIGS)) if name.endswith(_CONFIGS) else None
        if name in told:
            yield told[name]._replace(asked=value)
        elif switch is not None:
            # The parts of a feature share its fate, and its word.
            how = f"with {switch.name}"
            in_effect = value if switch.status == EFFECTIVE else ""
            yield Knob(name, value, in_effect, switch.status, how)
        else:
            yield Knob(name, value, "", NO_WORD, "")
    names = {name for name, _ in asked.fields}
    yield from (knob for knob in told.values() if knob.name not in names)


def faults(asked: Asked, judged: Judged, silence: Mapping[str, str]) -> tuple[str, ...]:
    """Return what --strategy_strict does not let pass, one clause each."""
    names = {name for name, _ in asked.fields}
    if not names:
        return ()
    return (
        *(
            f"{listed(one.labels)}: {in_words(one)}"
            for one in judged.verdicts
            if one.name in names and one.status != EFFECTIVE
        ),
        *(f"{who} {silence[who]}" for who in judged.silent),
    )


def in_words(one: Verdict) -> str:
    """Say what became of a field.

    >>> in_words(Verdict(("rank 0",), "dgc", "true", "", "refused", "Paddle 3.3 has none."))
    'dgc is refused: Paddle 3.3 has none'
    """
    # Not what was counted, which tells nothing where there is no effect.
    why = f": {one.why.rstrip('.')}" if one.why else ""
    return f"{one.name} {_SAID[one.status]}{why}"
