"""The JSON Schema and the outcomes before a run, which derive from the table of fields."""

from __future__ import annotations

from itertools import product

import pytest

from fleetrun.strategy import fields


@pytest.mark.parametrize("field", fields.TABLE, ids=lambda field: field.name)
def test_every_field_has_a_verdict_with_a_reason_everywhere(field: fields.Field) -> None:
    for paddle, graph, device in product(fields.PADDLES, fields.GRAPHS, fields.DEVICES):
        verdict = fields.outcome(field, paddle=paddle, graph=graph, device=device)
        assert verdict.reason
        # Tests measure the rest.
        assert verdict.status != fields.UNTESTED or (
            device == "gpu" and verdict.reason.startswith("needs a GPU")
        )
