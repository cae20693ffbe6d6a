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


def test_who_says_the_same_does_not_disagree() -> None:
    proof = begin()
    settings.set_by_script("fuse_grad_size_in_MB", 16.0000001)
    settings.set_by_script(CONFIGS, {"avg": False})
    assert not proof._disagreements
    assert not settings.script_wins("fuse_grad_size_in_MB")
    settings.set_by_script("fuse_grad_size_in_MB", 16.001)
    assert settings.script_wins("fuse_grad_size_in_MB")
