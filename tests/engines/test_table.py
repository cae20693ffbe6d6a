"""The tables of engines and modes: each row names a file that implements its protocol."""

from __future__ import annotations

from importlib import import_module

import pytest

from fleetrun.engines import ENGINES
from fleetrun.plan.modes import MODES, Mode


@pytest.mark.parametrize("file", [row[0] for row in ENGINES])
def test_an_engine_finds_hosts_and_is_made(file: str) -> None:
    engine = import_module(file)
    assert callable(engine.find)
    assert callable(engine.assign)
    assert engine.NAME


@pytest.mark.parametrize("mode", MODES, ids=[mode.name for mode in MODES])
def test_a_mode_says_which_slots_it_wants_and_lays_them_out(mode: Mode) -> None:
    assert callable(mode.rules.places)
    assert callable(mode.rules.slots)
    assert callable(mode.rules.layout)


def test_the_last_engine_takes_every_job() -> None:
    assert ENGINES[-1][1:] == ((), ())
