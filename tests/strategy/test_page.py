"""The page about a field: a launch accepts its examples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fleetrun.model import VARIABLE_SECTIONS
from fleetrun.strategy import explanation, fields, load

if TYPE_CHECKING:
    from pathlib import Path

NAMES = [field.name for field in fields.TABLE]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the examples."""
    return tmp_path_factory.mktemp("examples")


@pytest.mark.parametrize("field", fields.TABLE, ids=NAMES)
def test_the_example_of_every_field_is_a_strategy(field: fields.Field, written: Path) -> None:
    path = written / f"{field.section}.{field.name}.yaml"
    path.write_text("\n".join(explanation.example(field)) + "\n")
    layer = load.read(str(path))
    assert list(load.refusals(layer.knobs)) == []
    assert field.name in {knob.name.partition(".")[0] for knob in layer.knobs}
    typed = [load.parse_set(word.replace("'", "")) for word in explanation.sets(field)]
    assert {(knob.section, knob.name, knob.value) for knob in typed} == {
        (knob.section, knob.name, knob.value) for knob in layer.knobs
    }


@pytest.mark.parametrize("field", fields.TABLE, ids=NAMES)
def test_an_example_shows_another_value_than_the_default_unless_that_is_refused(
    field: fields.Field,
) -> None:
    for part in field.keys or (field,):
        assert explanation.other_than_default(part) != part.default or part.refused is not None


@pytest.mark.parametrize("section", VARIABLE_SECTIONS)
def test_the_example_of_a_section_of_variables_is_one(section: str, written: Path) -> None:
    _, line = explanation.VARIABLES[section]
    path = written / f"{section}.yaml"
    path.write_text(f"{section}:\n  {line}\n")
    (knob,) = load.read(str(path)).knobs
    assert knob.section == section


def test_every_section_of_fields_has_paddles_own_page() -> None:
    assert set(fields.FIELD_SECTIONS) <= set(explanation.LINKS)
