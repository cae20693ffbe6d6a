"""Generates a JSON Schema from the table of fields, for editors; pure."""

from __future__ import annotations

from fleetrun.strategy import fields
from fleetrun.strategy.fields import Field

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_TYPES = {"bool": "boolean", "int": "integer", "float": "number", "choice": "string"}
_ITEMS = {"ints": "integer", "floats": "number", "texts": "string"}


def schema() -> dict[str, object]:
    """Return the schema of a strategy file; it also accepts values that are converted when read."""
    sections: dict[str, object] = {
        section: _mapping(fields.by_name(section)) for section in fields.FIELD_SECTIONS
    }
    for section, prefix in fields.PREFIXES.items():
        sections[section] = {
            "type": "object",
            "propertyNames": {"pattern": f"^{prefix}[A-Za-z0-9_]*$"},
            "additionalProperties": {"type": ["string", "number", "boolean"]},
        }
    return {
        "$schema": DIALECT,
        "title": "fleetrun strategy",
        "type": "object",
        "properties": sections,
        "additionalProperties": False,
    }


def _mapping(known: dict[str, Field]) -> dict[str, object]:
    return {
        "type": ["object", "null"],
        "properties": {name: _property(field) for name, field in known.items()},
        "additionalProperties": False,
    }


def _property(field: Field) -> dict[str, object]:
    unit = f" In {field.unit}." if field.unit else ""
    schema: dict[str, object] = {"description": describe(field) + unit}
    if field.kind == "configs":
        return schema | _mapping({key.name: key for key in field.keys})
    if field.kind in _ITEMS:
        return schema | {"type": "array", "items": {"type": _ITEMS[field.kind]}}
    plain: dict[str, object] = {"type": _TYPES.get(field.kind, "string")}
    if field.words:
        plain["enum"] = list(field.words)
    if field.minimum is not None:
        plain["minimum"] = field.minimum
    if field.maximum is not None:
        plain["maximum"] = field.maximum
    if field.refused is not None:
        plain["not"] = {"const": field.refused[0]}
    schema["default"] = field.default
    return schema | ({"anyOf": [plain, {"const": fields.AUTO}]} if field.auto else plain)


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
