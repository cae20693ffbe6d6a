"""Hosts for every test that asks for them; they need root."""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING

import lab
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def _check() -> None:
    """Skip where there can be no hosts."""
    if not lab.is_root():
        pytest.skip("network namespaces need root")
    reason = lab.missing()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(f"the tests with several hosts cannot run: {reason}")
    if reason:
        pytest.skip(reason)


@pytest.fixture
def marker() -> str:
    """Return a marker of this test alone: simultaneous runs share no process."""
    return uuid.uuid4().hex


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[tuple[lab.Host, lab.Host]]:
    """Two hosts that reach each other, for one test."""
    _check()
    with lab.hosts(2, tmp_path) as (first, second):
        yield first, second


@pytest.fixture
def four_hosts(tmp_path: Path) -> Iterator[lab.Network]:
    """Four hosts whose cables can be cut, for one test."""
    _check()
    with lab.network(4, tmp_path) as made:
        yield made


@pytest.fixture
def slow_hosts(tmp_path: Path) -> Iterator[lab.Network]:
    """Four hosts, and a switch that can lose and delay, for one test."""
    _check()
    if not os.path.exists("/dev/net/tun"):
        pytest.skip("this machine has no /dev/net/tun")
    with lab.network(4, tmp_path, is_slow=True) as made:
        yield made
