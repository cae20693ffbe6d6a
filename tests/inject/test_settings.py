"""The value in effect where the strategy and the script both set a field."""

from __future__ import annotations

from typing import Any

import pytest

from fleetrun.inject import settings
from fleetrun.inject.evidence import Evidence
from fleetrun.inject.spec import StrategySpec

CONFIGS = "gradient_merge_configs"


def begin(mode: str = "defaults") -> Evidence:
    strategy: dict[str, Any] = {
        "fuse_grad_size_in_MB": 16,
        "gradient_merge": True,
        CONFIGS: {"k_steps": 4, "avg": False},
    }
    spec = StrategySpec(strategy, {"fuse_bn_act_ops": True}, {"num_threads": 2}, mode=mode)
    proof = Evidence("", spec)
    settings.reset(spec, proof)
    return proof


@pytest.fixture(autouse=True)
def settings_are_reset() -> Any:
    yield
    settings.reset(StrategySpec({}, {}, {}), Evidence("", StrategySpec({}, {}, {})))


def test_the_strategy_holds_while_the_script_says_nothing() -> None:
    begin()
    assert settings.effective("fuse_grad_size_in_MB") == 16
    assert settings.effective("fuse_bn_act_ops") is True
    assert settings.effective("num_threads") == 2
    assert settings.effective("nccl_comm_num", 1) == 1
    assert settings.effective_spec().merge_steps == 4
    assert not settings.script_wins("fuse_grad_size_in_MB")


def test_the_script_wins_key_by_key() -> None:
    proof = begin()
    assert settings.set_by_script("fuse_grad_size_in_MB", 4) == 4
    assert settings.set_by_script(CONFIGS, {"k_steps": 2}) == {"k_steps": 2, "avg": False}
    assert settings.set_by_script("fuse_bn_act_ops", False) is False
    settled = settings.effective_spec()
    assert (settled.merge_steps, settled.merge_averages) == (2, False)
    assert not settled.builds("fuse_bn_act_ops")
    assert settings.script_wins(CONFIGS)
    assert len(proof._disagreements) == 3


def test_the_strategy_wins_in_override_mode() -> None:
    proof = begin("override")
    assert settings.set_by_script("fuse_grad_size_in_MB", 4) == 16
    assert settings.set_by_script(CONFIGS, {"k_steps": 2}) == {"k_steps": 4, "avg": False}
    assert not settings.script_wins("fuse_grad_size_in_MB")
    assert proof._disagreements[0] == {
        "name": "fuse_grad_size_in_MB",
        "script": 4,
        "strategy": 16,
        "used": 16,
    }


def test_who_says_the_same_does_not_disagree() -> None:
    proof = begin()
    settings.set_by_script("fuse_grad_size_in_MB", 16.0000001)
    settings.set_by_script(CONFIGS, {"avg": False})
    assert not proof._disagreements
    assert not settings.script_wins("fuse_grad_size_in_MB")
    settings.set_by_script("fuse_grad_size_in_MB", 16.001)
    assert settings.script_wins("fuse_grad_size_in_MB")
