"""Two hosts for every test that asks for them; without root there are none."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import lab
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[tuple[lab.Host, lab.Host]]:
    """Two hosts that reach each other, for one test."""
    if not lab.is_root():
        pytest.skip("network namespaces need root")
    reason = lab.missing()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(f"the tests with several hosts cannot run: {reason}")
    if reason:
        pytest.skip(reason)
    with lab.hosts(2, tmp_path) as (first, second):
        yield first, second
