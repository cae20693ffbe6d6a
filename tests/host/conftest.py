"""A fixture of the probe's tests: patience with killed children."""

from __future__ import annotations

import pytest
from waiting import LONG_S

from fleetrun.run import isolation


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the end of a killed child however long it takes on a machine that is busy."""
    monkeypatch.setattr(isolation, "_END_S", LONG_S)
