"""The limit of open files suffices for every process, and for the launchers of other hosts."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

import psutil
import pytest

from fleetrun.run.descriptors import FileLimit

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def low() -> Iterator[int]:
    """Begin each test with a low limit that may be raised a little, beyond what pytest has open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = psutil.Process().num_fds() + 200
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, before[1]))
    yield low
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def soft() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_a_thousand_hosts_have_a_connection_each(low: int) -> None:
    files = FileLimit(8, hosts=1024)
    assert soft() > 1024 + 3 * 8
    files.restore()
    assert soft() == low


def test_what_suffices_is_left_as_it_is(low: int) -> None:
    FileLimit(8)
    assert soft() == low
    FileLimit(8, hosts=4)
    assert low <= soft() < low + 200
