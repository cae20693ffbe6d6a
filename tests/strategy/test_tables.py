"""The JSON Schema and the outcomes before a run, which derive from the table of fields."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from fleetrun.strategy import fields, schema


def test_the_schema_knows_every_section_field_and_part() -> None:
    made: Any = schema.schema()
    assert list(made["properties"]) == list(fields.SECTIONS)
    strategy = made["properties"]["strategy"]
    assert strategy["additionalProperties"] is False
    assert set(strategy["properties"]) == set(fields.by_name("strategy"))
    merge = strategy["properties"]["gradient_merge_configs"]
    assert merge["properties"]["k_steps"]["minimum"] == 1
    assert made["properties"]["flags"]["propertyNames"]["pattern"].startswith("^FLAGS_")


def test_the_schema_says_types_ranges_words_and_auto() -> None:
    made: Any = schema.schema()
    known = made["properties"]["strategy"]["properties"]
    size = known["fuse_grad_size_in_MB"]
    assert size["anyOf"] == [
        {"type": "integer", "minimum": 1, "maximum": 65536},
        {"const": "auto"},
    ]
    assert "In MB." in size["description"]
    assert known["asp"]["not"] == {"const": True}
    scale = known["gradient_scale_configs"]["properties"]["scale_strategy"]
    assert scale["enum"] == ["avg", "sum", "customized"]
    checkpoints = known["recompute_configs"]["properties"]["checkpoints"]
    assert checkpoints["items"] == {"type": "string"}


@pytest.mark.parametrize("field", fields.TABLE, ids=lambda field: field.name)
def test_every_field_has_a_verdict_with_a_reason_everywhere(field: fields.Field) -> None:
    for paddle, graph, device in product(fields.PADDLES, fields.GRAPHS, fields.DEVICES):
        verdict = fields.outcome(field, paddle=paddle, graph=graph, device=device)
        assert verdict.reason
        # Tests measure the rest.
        assert verdict.status != fields.UNTESTED or (
            device == "gpu" and verdict.reason.startswith("needs a GPU")
        )


def test_a_field_that_a_paddle_lacks_has_no_effect_there_on_or_off() -> None:
    field = fields.find("build_strategy", "fuse_resunit")
    place = {"paddle": "2.6.2", "graph": "static", "device": "cpu"}
    outcomes = [fields.outcome(field, is_off=is_off, **place) for is_off in (False, True)]
    assert [outcome.reason for outcome in outcomes] == ["Paddle 2.6.2 has no such field"] * 2
