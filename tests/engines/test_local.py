"""The engine of a job on one host."""

from __future__ import annotations

import pytest
from plans import a_request, gathered, some_facts

from fleetrun.errors import UsageError


def test_the_host_option_gives_the_address() -> None:
    own, strange = (gathered(a_request(host=f"10.0.0.{n}"), some_facts(2)) for n in (1, 9))
    assert (own.master.host, strange.members[0].host) == ("10.0.0.1", "127.0.0.1")
    assert strange.notes == (
        "--host=10.0.0.9 is not an address of this host: the ranks use 127.0.0.1.",
    )


def test_hosts_that_nobody_names_cannot_come() -> None:
    with pytest.raises(UsageError, match="--nnodes=2 names no hosts"):
        gathered(a_request(nnodes="2"), some_facts(2))
