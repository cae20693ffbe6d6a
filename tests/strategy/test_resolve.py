"""The values that auto resolves to, with their reasons."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetrun.model import Endpoint, RankSpec
from fleetrun.strategy import load, resolve
from fleetrun.strategy.resolve import HostTopology


def resolved(ranks: tuple[int, ...], *sets: str) -> dict[str, tuple[object, str]]:
    """Resolve the strategy of SETS for hosts with RANKS."""
    asked = load.combine([], [load.parse_set(text) for text in sets])
    resolved = resolve.resolve(asked, HostTopology(ranks))
    return {setting.name: (setting.value, setting.reason) for setting in resolved.settings}


@pytest.mark.parametrize(
    ("ranks", "name", "value", "reason"),
    [
        ((2,), "nccl_comm_num", 1, "auto: 1 on 1 host"),
        ((8, 8), "nccl_comm_num", 2, "auto: 2 on 2 hosts"),
        ((8,), "use_hierarchical_allreduce", False, "auto: off with 1 host"),
        (
            (8, 8),
            "use_hierarchical_allreduce",
            False,
            "auto: off with 2 hosts: to see what two levels gain, launch with true and with false",
        ),
        ((8, 8), "hierarchical_allreduce_inter_nranks", 8, "auto: the 8 ranks of each host"),
        ((4, 2), "hierarchical_allreduce_inter_nranks", 2, "auto: hosts have 4, 2 ranks"),
    ],
)
def test_auto_follows_from_the_hosts(
    ranks: tuple[int, ...], name: str, value: object, reason: str
) -> None:
    assert resolved(ranks, f"{name}=auto")[name] == (value, reason)


@given(st.lists(st.integers(min_value=1, max_value=16), min_size=1, max_size=6))
def test_no_group_is_on_two_hosts(ranks: list[int]) -> None:
    nodes = [node for node, number in enumerate(ranks) for _ in range(number)]
    placed = resolve.topology(
        [RankSpec("TRAINER", n, n, node, (), Endpoint("h", n)) for n, node in enumerate(nodes)]
    )
    assert placed.ranks == tuple(ranks)
    groups = [nodes[at : at + placed.group] for at in range(0, len(nodes), placed.group)]
    assert all(len(set(group)) == 1 for group in groups)


@given(st.lists(st.integers(min_value=1, max_value=16), min_size=1, max_size=6))
def test_a_preset_has_nothing_left_to_decide_but_what_only_the_training_can_measure(
    ranks: list[int],
) -> None:
    for name in ("recommended", "overlap", "hierarchical_allreduce"):
        asked = load.combine([load.read(name)])
        settled = resolve.resolve(asked, HostTopology(tuple(ranks)))
        assert [k.name for k in settled.settings if k.value == "auto"] == ["fuse_grad_size_in_MB"]
        assert resolve.resolve(settled, HostTopology(tuple(ranks))).settings == tuple(
            settled.settings
        )
