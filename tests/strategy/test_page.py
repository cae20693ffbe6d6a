"""The page about a field: a launch accepts its examples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fleetrun.model import VARIABLE_SECTIONS
from fleetrun.strategy import explanation, fields, load

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("section", VARIABLE_SECTIONS)
def test_the_example_of_a_section_of_variables_is_one(section: str, tmp_path: Path) -> None:
    _, line = explanation.VARIABLES[section]
    path = tmp_path / f"{section}.yaml"
    path.write_text(f"{section}:\n  {line}\n")
    (knob,) = load.read(str(path)).knobs
    assert knob.section == section


def test_every_section_of_fields_has_paddles_own_page() -> None:
    assert set(fields.FIELD_SECTIONS) <= set(explanation.LINKS)
