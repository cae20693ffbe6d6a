"""Slurm's lists of hosts are expanded as scontrol does."""

from __future__ import annotations

import pytest

from fleetrun.plan import hostlist


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ("n1",)),
        ("n1,n2", ("n1", "n2")),
        ("n[1-2]", ("n1", "n2")),
        ("node[01-04,7]", ("node01", "node02", "node03", "node04", "node7")),
        ("n[098-101]", ("n098", "n099", "n100", "n101")),
        ("n[9-11]", ("n9", "n10", "n11")),
        ("a[1],b[2-3],c", ("a1", "b2", "b3", "c")),
        ("r[0-1]n[1-2]", ("r0n1", "r0n2", "r1n1", "r1n2")),
        ("n[1-2]-ib.example.org", ("n1-ib.example.org", "n2-ib.example.org")),
        ("10.0.0.[1-2]", ("10.0.0.1", "10.0.0.2")),
    ],
)
def test_a_list_is_expanded_in_its_order(text: str, names: tuple[str, ...]) -> None:
    assert hostlist.expand(text) == names


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "a,,b", "n[", "n]", "n[1", "n[[1]]", "n[]", "n[a-b]", "n[3-1]", "n[1-]"),
        *("n[-1]", "n[1,,2]", "n 1", "n[1-999999999]", "n[0-999][0-999]", "n[\u0661]"),
    ],
)
def test_what_slurm_does_not_write_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        hostlist.expand(text)
