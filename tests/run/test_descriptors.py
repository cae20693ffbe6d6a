"""How many files may be open: enough for every process, and for the launchers of other hosts."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

import pytest

from fleetrun.run.descriptors import FileLimit

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def low_limit() -> Iterator[None]:
    """Begin each test with a low limit that may be raised a little."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def soft() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_a_thousand_hosts_have_a_connection_each() -> None:
    files = FileLimit(8, hosts=1024)
    assert soft() > 1024 + 3 * 8
    files.restore()
    assert soft() == 256


def test_what_suffices_is_left_as_it_is() -> None:
    FileLimit(8)
    assert soft() == 256
    FileLimit(8, hosts=4)
    assert 256 <= soft() < 512
