"""The table of fields compared with each Paddle: names, defaults, and accepted values."""

from __future__ import annotations

import json
from typing import Any

import pytest
from training import PYTHONS, run

from fleetrun.strategy import fields

pytestmark = pytest.mark.train

# Reads Paddle's own description of a strategy: the default of each field, or of its parts.
READ = """
import json
from paddle.distributed import fleet
defaults = {}
def read(message):
    for field in message.fields:
        try:
            inner = field.message_type
        except Exception:
            inner = None
        yield field.name, dict(read(inner)) if inner else field.default_value
for name, value in read(fleet.DistributedStrategy().strategy.DESCRIPTOR):
    defaults[name] = value
print("FOUND" + json.dumps(defaults, default=str))
"""
_SECTIONS = ("build_strategy", "execution_strategy")


@pytest.fixture(scope="module", params=sorted(PYTHONS))
def paddle(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Any]]:
    """Read what one Paddle knows."""
    version = str(request.param)
    done = run(PYTHONS[version], ["-c", READ], tmp_path_factory.mktemp("fields"))
    assert done.returncode == 0, done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    outcomes: dict[str, Any] = json.loads(line.removeprefix("FOUND"))
    return version, outcomes


def ours(version: str, section: str) -> dict[str, fields.Field]:
    return {
        field.name: field
        for field in fields.TABLE
        if field.section == section and field.only in ("", version) and not field.is_own
    }


def keys(version: str, field: fields.Field) -> list[fields.Field]:
    """Return the parts of FIELD that the Paddle VERSION has according to the table."""
    return [key for key in field.keys if version != "2.6.2" or "(Paddle 3)" not in key.doc]


def part(known: dict[str, Any], name: str) -> Any:
    """Return the default of the part NAME, which may be nested; raise KeyError if there is none."""
    for key in name.split("."):
        known = known[key]
    return known


def test_paddle_knows_each_field_and_part(paddle: tuple[str, dict[str, Any]]) -> None:
    version, fields = paddle
    assert {*ours(version, "strategy")} <= fields.keys()
    for name, field in ours(version, "strategy").items():
        if field.keys:
            assert all(part(fields[name], key.name) is not None for key in keys(version, field)), (
                name
            )
    for section in _SECTIONS:
        assert {*ours(version, section)} <= fields.get(section, {}).keys()


def test_no_field_of_paddles_build_or_execution_strategy_is_missing(
    paddle: tuple[str, dict[str, Any]],
) -> None:
    version, defaults = paddle
    for section in _SECTIONS:
        assert defaults.get(section, {}).keys() <= {*ours(version, section)}


def test_defaults_are_those_of_paddle(paddle: tuple[str, dict[str, Any]]) -> None:
    version, defaults = paddle
    for section in fields.FIELD_SECTIONS:
        known = defaults if section == "strategy" else defaults.get(section, {})
        for name, field in ours(version, section).items():
            for row, default in (
                [(key, part(known[name], key.name)) for key in keys(version, field)]
                if field.keys
                else [(field, known[name])]
            ):
                if isinstance(row.default, tuple):
                    assert not default, row.name
                else:
                    expected = pytest.approx(default) if row.kind == "float" else default
                    assert row.default == expected, row.name
