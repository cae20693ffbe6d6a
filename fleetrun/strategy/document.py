"""Writes `strategy.json`, the requested strategy for the training process; schema 1."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fleetrun.model import Strategy
from fleetrun.rundir import secrets
from fleetrun.rundir.strategyfiles import DOCUMENT_SCHEMA
from fleetrun.strategy import fields
from fleetrun.strategy.resolve import HostTopology


def text(strategy: Strategy, ranks: HostTopology, environment: Mapping[str, str]) -> str:
    """Return the document of STRATEGY for RANKS; ENVIRONMENT has the variables that it sets."""
    requested = {section: nested(strategy, section) for section in fields.FIELD_SECTIONS}
    document = {
        "schema": DOCUMENT_SCHEMA,
        "mode": strategy.mode,
        "strict": strategy.is_strict,
        "check_ranks": strategy.check_ranks,
        "sources": strategy.sources,
        "digest": strategy.digest,
        **requested,
        "verdicts": known(requested),
        "environment": {name: secrets.redact(name, value) for name, value in environment.items()},
        "reasons": {
            setting.name: setting.reason for setting in strategy.settings if setting.reason
        },
        "topology": {
            "nranks": ranks.nranks,
            "nnodes": ranks.nnodes,
            "ranks_per_node": max(ranks.ranks),
            "ranks_per_group": ranks.group,
        },
    }
    return json.dumps(document, indent=1) + "\n"


def nested(strategy: Strategy, section: str) -> dict[str, object]:
    """Return the settings of STRATEGY in SECTION, with parts nested in their configs."""
    settings: dict[str, object] = {}
    parts: dict[str, dict[str, object]] = {}
    for setting in strategy.settings:
        if setting.section != section:
            continue
        configs, dot, part = setting.name.partition(".")
        if dot:
            settings[configs] = parts.setdefault(configs, {})
            parts[configs][part] = setting.value
        else:
            settings[setting.name] = setting.value
    return settings


def known(requested: Mapping[str, Any]) -> dict[str, dict[str, list[dict[str, object]]]]:
    """Return the outcomes of all fields REQUESTED, by section, and of the switches of configs.

    The training process, which does not have the table, takes from them what it cannot measure.
    Each field has lines for when it is on and, if it is a bool, for when it is off; the first line
    that matches graph, Paddle and device counts.

    >>> known({"strategy": {"dgc": True}})["dgc"]["off"]
    [{'status': 'no_difference', 'reason': 'off, the same as if not set'}]
    """
    table = fields.by_name(fields.STRATEGY)
    sections = [requested.get(section) or {} for section in fields.FIELD_SECTIONS]
    names = [name for section in sections for name in section]
    names += [name.removesuffix("_configs") for name in names]
    outcomes: dict[str, dict[str, list[dict[str, object]]]] = {}
    for name in dict.fromkeys(names):
        field = table.get(name)
        if field is not None:
            outcomes[name] = {"on": list(map(_line, fields.outcomes(field)))}
            if field.kind == "bool":
                outcomes[name]["off"] = list(map(_line, fields.outcomes(field, is_off=True)))
    return outcomes


def _line(outcome: fields.FieldOutcome) -> dict[str, object]:
    """Return OUTCOME as JSON: empty values are omitted, and a status is one word."""
    line: dict[str, object] = {key: value for key, value in outcome._asdict().items() if value}
    return {**line, "status": outcome.status.replace(" ", "_")}
