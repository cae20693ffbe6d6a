"""The JSON Schema and the outcomes before a run, which derive from the table of fields."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest

from fleetrun.strategy import fields, schema, table


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


def test_every_line_of_the_table_is_about_places_there_are() -> None:
    statuses = {
        *(fields.EFFECTIVE, fields.NO_DIFFERENCE),
        *(fields.NO_EFFECT, fields.REFUSED, fields.UNTESTED),
    }
    for field in fields.TABLE:
        for outcome in (*field.on, *field.off):
            assert outcome.status in statuses
            assert outcome.reason
    places = {*fields.GRAPHS, *fields.PADDLES, *fields.DEVICES, "any", "false"}
    lines = re.findall(r"(?m)^  ([a-z][a-z0-9. ]*): \S", table.TEXT)
    others = {"also", "auto", "only", "own", "as", "never true", "never false"}
    assert all(line in others or {*line.split()} <= places for line in lines)


def status(name: str, paddle: str, graph: str) -> str:
    field = next(row for row in fields.TABLE if row.name == name)
    return fields.outcome(field, paddle=paddle, graph=graph, device="cpu").status


@pytest.mark.parametrize("field", fields.TABLE, ids=lambda field: field.name)
def test_every_field_has_a_verdict_with_a_reason_everywhere(field: fields.Field) -> None:
    for paddle, graph, device in product(fields.PADDLES, fields.GRAPHS, fields.DEVICES):
        verdict = fields.outcome(field, paddle=paddle, graph=graph, device=device)
        assert verdict.reason
        # Tests measure the rest.
        assert verdict.status != fields.UNTESTED or (
            device == "gpu" and verdict.reason.startswith("needs a GPU")
        )


@pytest.mark.parametrize(
    ("name", "paddle", "graph", "expected"),
    [
        ("fuse_grad_size_in_MB", "2.6.2", "dygraph", "effective"),
        ("fuse_grad_size_in_MB", "3.3.1", "static", "effective"),
        ("fuse_all_optimizer_ops", "3.3.1", "dygraph", "effective"),
        ("fuse_bn_act_ops", "3.3.1", "dygraph", "no effect"),
        ("num_threads", "2.6.2", "dygraph", "no effect"),
        ("num_threads", "3.3.1", "static", "no effect"),
        ("amp", "3.3.1", "static", "no effect"),
        ("dgc", "3.3.1", "static", "refused"),
        ("elastic", "3.3.1", "static", "no effect"),
        ("qat", "2.6.2", "static", "refused"),
    ],
)
def test_a_verdict_is_that_of_its_place(name: str, paddle: str, graph: str, expected: str) -> None:
    assert status(name, paddle, graph) == expected


def test_a_field_that_a_paddle_lacks_has_no_effect_there_on_or_off() -> None:
    field = fields.find("build_strategy", "fuse_resunit")
    place = {"paddle": "2.6.2", "graph": "static", "device": "cpu"}
    outcomes = [fields.outcome(field, is_off=is_off, **place) for is_off in (False, True)]
    assert [outcome.reason for outcome in outcomes] == ["Paddle 2.6.2 has no such field"] * 2
