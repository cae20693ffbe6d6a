"""Describes a strategy field as text; pure."""

from __future__ import annotations

from collections.abc import Sequence

from fleetrun.model import FieldValue
from fleetrun.strategy import fields
from fleetrun.strategy.fields import Field

Place = tuple[str, str, str]

EVIDENCE = (
    "On CPUs it was measured with both Paddles (tests/train/test_verdicts.py measures it again).",
    fields.GPUS,
    fields.LEGACY_IR,
    "In a job, the table after the first update and log/latest/rank.N.jsonl show its effect.",
)


def page(field: Field) -> str:
    """Return the meaning of FIELD, where it takes effect, the evidence, and how to set it."""
    lines = [f"{field.section}:", *(f"  {line}" for line in listed(field, ""))]
    if field.aliases:
        lines.append(f"      Also written {', '.join(field.aliases)}.")
    places = [(p, g, d) for g in fields.GRAPHS for p in fields.PADDLES for d in fields.DEVICES]
    lines += ["", "Effect by graph, Paddle version and device", *comes_to(field, places)]
    if field.kind == "bool":
        lines.append("  If it is false:")
        lines += [f"  {line}" for line in comes_to(field, places, is_off=True)]
    lines += ["", "Evidence", *(f"  {line}" for line in EVIDENCE)]
    name = ".".join([field.name, *(key.name for key in field.keys[:1])])
    lines += ["", f"Set it: in a strategy file, or by fleetrun --set {name}=VALUE train.py"]
    return "\n".join(lines) + "\n"


def listed(field: Field, indent: str) -> list[str]:
    """Return FIELD and each of its parts with type, unit, range, default and meaning."""
    lines = [f"{indent}{field.name}: {kind(field)}", f"{indent}    {describe(field)}"]
    for key in field.keys:
        lines += listed(key, indent + "    ")
    return lines


def describe(field: Field) -> str:
    """Return FIELD's meaning, its auto, its refused value, and the Paddle that has it."""
    parts = [field.doc]
    if field.auto:
        parts.append(f"auto: {field.auto}.")
    if field.refused is not None:
        parts.append(f"{str(field.refused[0]).lower()} is refused: {field.refused[1]}.")
    if field.only:
        parts.append(f"Paddle {field.only} only.")
    return " ".join(parts)


def kind(field: Field) -> str:
    """Return FIELD's type, range and default in a few words."""
    if field.kind == "configs":
        return "with these parts"
    allowed = fields.wanted(field).removeprefix("give ")
    return allowed + ("" if field.default in ("", ()) else f" [default: {written(field.default)}]")


def comes_to(field: Field, places: Sequence[Place], *, is_off: bool = False) -> list[str]:
    """Return lines about the outcomes of FIELD in PLACES (Paddle, graph, device), grouped."""
    return [
        line
        for (status, reason), where in outcomes(field, places, is_off=is_off).items()
        for line in (f"  {status}: {reason}", f"    {where}")
    ]


def outcomes(
    field: Field, places: Sequence[Place], *, is_off: bool = False
) -> dict[tuple[str, str], str]:
    """Map each status and reason of FIELD to those of PLACES (Paddle, graph, device) with it."""
    places_of: dict[tuple[str, str], list[str]] = {}
    for paddle, graph, device in places:
        outcome = fields.outcome(field, is_off=is_off, paddle=paddle, graph=graph, device=device)
        places_of.setdefault((outcome.status, outcome.reason), []).append(
            f"{graph} {paddle} {device}"
        )
    if len(places_of) == 1 and len(places) > 1:
        return dict.fromkeys(places_of, "everywhere")
    return {outcome: ", ".join(where) for outcome, where in places_of.items()}


def written(value: FieldValue) -> str:
    """Write VALUE as YAML.

    >>> written(True), written(("a", "b")), written(0.5)
    ('true', '[a, b]', '0.5')
    """
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)
