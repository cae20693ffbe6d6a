"""Which strategies leave the gradients to Paddle's own reducer."""

from __future__ import annotations

from typing import Any

import pytest

from fleetrun.inject import settings
from fleetrun.inject.dygraph import handover
from fleetrun.inject.dygraph.data_parallel import REDUCER_FIELDS
from fleetrun.inject.evidence import Evidence
from fleetrun.inject.spec import StrategySpec
from fleetrun.strategy import fields

ONE: list[list[int]] = [[0, 1, 2]]
SEVERAL: list[list[int]] = [[0], [1], [2]]


def begin(asked: dict[str, Any]) -> None:
    spec = StrategySpec(asked, {}, {})
    settings.reset(spec, Evidence("", spec))


@pytest.fixture(autouse=True)
def settings_are_reset() -> Any:
    yield
    begin({})


@pytest.mark.parametrize(
    ("asked", "packed", "are_paddles", "is_enough"),
    [
        # It has limits in bytes, and communicates on one communicator without waiting.
        ({"fuse_all_reduce_ops": True}, SEVERAL, True, True),
        ({"fuse_grad_size_in_MB": 32, "last_comm_group_size_MB": 1.0}, SEVERAL, False, True),
        ({"fuse_grad_size_in_MB": "auto"}, SEVERAL, False, True),
        ({"fuse_all_reduce_ops": False}, SEVERAL, False, False),
        ({"nccl_comm_num": 1}, SEVERAL, False, True),
        ({"nccl_comm_num": 2}, SEVERAL, True, False),
        ({"sync_nccl_allreduce": False}, SEVERAL, False, True),
        # Fleet's default is for static graphs: in dynamic ones Paddle never waits.
        ({"sync_nccl_allreduce": True}, SEVERAL, False, True),
        ({"sync_nccl_allreduce": True, "nccl_comm_num": 2}, ONE, True, True),
        # Paddle's reducer has no limit by number; fleet's defaults are no request.
        ({"fuse_grad_size_in_num": 8}, SEVERAL, False, True),
        ({"fuse_grad_size_in_num": 9}, SEVERAL, False, False),
        ({"fuse_grad_size_in_num": 9}, SEVERAL, True, True),
        ({"fuse_grad_size_in_TFLOPS": 50.0}, SEVERAL, False, True),
        ({"fuse_grad_size_in_TFLOPS": 9.0}, SEVERAL, False, False),
        ({"fuse_grad_size_in_TFLOPS": 9.0}, SEVERAL, True, True),
        # Another field needs fleetrun's reducer.
        ({"fuse_grad_size_in_num": 8, "nccl_comm_num": 2}, SEVERAL, True, False),
        ({"sync_nccl_allreduce": True, "fuse_grad_size_in_num": 9}, SEVERAL, False, False),
        ({"use_hierarchical_allreduce": "auto"}, SEVERAL, False, True),
        ({"use_hierarchical_allreduce": True}, SEVERAL, True, False),
        ({"bf16_allreduce": True}, ONE, True, False),
        ({"fp16_allreduce": True}, ONE, True, False),
        # One step is one update, as without it.
        ({"gradient_merge": True}, SEVERAL, False, True),
        ({"gradient_merge": True, "gradient_merge_configs": {"k_steps": 1}}, SEVERAL, False, True),
        ({"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}, ONE, True, False),
    ],
)
def test_paddles_reducer_stays_where_it_does_what_is_asked(
    asked: dict[str, Any], packed: list[list[int]], *, are_paddles: bool, is_enough: bool
) -> None:
    begin(asked)
    names = [name for name in asked if name in REDUCER_FIELDS]
    suffices = handover.suffices(names, packed, has_levels=None, are_paddles=are_paddles)
    assert suffices is is_enough
    assert not handover.suffices(names, packed, has_levels=2, are_paddles=are_paddles)


def test_defaults_of_fleet_ask_for_nothing() -> None:
    asked = {
        field.name: field.default
        for field in fields.TABLE
        if field.name in handover._PADDLES_OWN.keys() | handover._BYTES
    }
    assert len(asked) == len(handover._PADDLES_OWN.keys() | handover._BYTES)
    begin(asked)
    assert handover.suffices(asked, SEVERAL, has_levels=None, are_paddles=False)


def test_who_waits_for_each_allreduce_saves_nothing_over_gloo() -> None:
    large = [1 << 20]
    for waits in (False, True):
        begin({"sync_nccl_allreduce": waits})
        assert handover.pays(large, is_synchronous=True) is waits
        assert handover.pays(large, is_synchronous=False)
