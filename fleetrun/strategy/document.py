"""`strategy.json`, by which the training process learns what is asked for; schema 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetrun.plan import secrets
from fleetrun.strategy import fields

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fleetrun.model import Knob, Strategy
    from fleetrun.strategy.resolve import Topology

SCHEMA = 1


def text(strategy: Strategy, ranks: Topology, environment: Mapping[str, str]) -> str:
    """Return the document of STRATEGY for RANKS; ENVIRONMENT is what its variables came to."""
    import json  # noqa: PLC0415 - only those who have a strategy pay for it

    document = {
        "schema": SCHEMA,
        "mode": strategy.mode,
        "strict": strategy.is_strict,
        "check_ranks": strategy.check_ranks,
        "merge_tail": strategy.merge_tail,
        "sources": strategy.sources,
        "digest": strategy.digest,
        **{section: nested(strategy, section) for section in fields.FIELD_SECTIONS},
        "environment": {name: secrets.redact(name, value) for name, value in environment.items()},
        "reasons": {knob.name: knob.reason for knob in strategy.knobs if knob.reason},
        "topology": {
            "nranks": ranks.nranks,
            "nnodes": ranks.nnodes,
            "ranks_per_node": max(ranks.ranks),
        },
    }
    return json.dumps(document, indent=1) + "\n"


def nested(strategy: Strategy, section: str) -> dict[str, object]:
    """Return what STRATEGY asks for in SECTION, parts inside of their configs."""
    found: dict[str, object] = {}
    parts: dict[str, dict[str, object]] = {}
    for knob in strategy.knobs:
        if knob.section != section:
            continue
        configs, dot, part = knob.name.partition(".")
        if dot:
            found[configs] = parts.setdefault(configs, {})
            parts[configs][part] = knob.value
        else:
            found[knob.name] = knob.value
    return found


def variables(strategy: Strategy) -> dict[str, Knob]:
    """Return the environment variables that STRATEGY asks for."""
    return {knob.name: knob for knob in strategy.knobs if knob.section in fields.VARIABLE_SECTIONS}
