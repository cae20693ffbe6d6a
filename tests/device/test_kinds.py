"""Models of every kind on the device under test: the weights of one process on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import device_strategies
import devices
import pytest
import train_kinds
import yaml
from train_kinds import launch
from training import PYTHONS

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

PYTHON = PYTHONS["3.3.1"]
LATE = {"kernel_us": 20, "delay_us": 100}
# Every run of scripts/test trains each kind with one of these; multinode/ has two levels.
SHORT = [("recommended", 2), ("merged", 2)]
# Not with Paddle's own reducer, which averages strided gradients wrongly.
LONG = [
    (name, nranks)
    for name, document in device_strategies.ALL.items()
    if (name in device_strategies.PRESETS or name not in device_strategies.TOGETHER)
    and device_strategies.sends_gradients(document)
    for nranks in (2, 3, 4)
]


def shared_out() -> dict[tuple[str, int], list[str]]:
    """Return which kinds each of SHORT trains."""
    shares: dict[tuple[str, int], list[str]] = {case: [] for case in SHORT}
    able = {
        case: set(train_kinds.on_plugins(device_strategies.ALL[case[0]], case[1])) for case in SHORT
    }
    for kind in train_kinds.ON_PLUGINS:
        # Each rank trains it.
        case = min(SHORT, key=lambda case: (kind not in able[case], case[1] * len(shares[case])))
        shares[case].append(kind)
    # Their later backwards make fleetrun replace Paddle's reducer.
    shares[SHORT[0]] = [*dict.fromkeys([*shares[SHORT[0]], "paired"])]
    return shares


@pytest.mark.parametrize(
    ("name", "nranks", "kinds"),
    [
        *(
            pytest.param(*case, kinds, id=f"{case[0]}-{case[1]}")
            for case, kinds in shared_out().items()
        ),
        *(
            pytest.param(*case, None, id=f"all-{case[0]}-{case[1]}", marks=pytest.mark.long)
            for case in LONG
        ),
    ],
)
def test_kinds_of_models_are_trained_as_by_one_cpu_process(
    name: str,
    nranks: int,
    kinds: list[str] | None,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    alone = train_kinds.alone(tmp_path_factory)
    document = device_strategies.ALL[name]
    kinds = kinds or train_kinds.on_plugins(document, nranks)
    with devices.on("npu", **LATE, witness=tmp_path):
        ranks = launch(
            *(PYTHON, tmp_path, f"--kinds={','.join(kinds)}"),
            strategy=yaml.safe_dump(document),
            nranks=nranks,
            accumulate=4 // device_strategies.merged_steps(document),
            is_strict=False,
        ).reports
    exactness = 2e-2 if document["strategy"].get("bf16_allreduce") else 2e-6
    train_kinds.assert_as_alone(alone, ranks, kinds, exactness)
    for first, *others in devices.traces(tmp_path, nranks):
        assert all(other == first for other in others)
