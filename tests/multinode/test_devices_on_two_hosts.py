"""Two-level allreduces on the devices of two hosts: the weights of one process on the CPU."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import device_strategies
import devices
import pytest
import train_kinds
import yaml
from training import PYTHONS, ROOT
from waiting import TRAINING_S

if TYPE_CHECKING:
    from pathlib import Path

    from lab import Host

pytestmark = [pytest.mark.multinode, pytest.mark.train]

PYTHON = PYTHONS["3.3.1"]
FEW = ["strided", "hooked", "transformer"]
LEVELS = ("hierarchical_allreduce", "use_hierarchical_allreduce", "resnet50_32gpu", "recommended")


@pytest.mark.parametrize(
    ("name", "is_long"),
    [
        ("use_hierarchical_allreduce", False),
        *(pytest.param(name, True, marks=pytest.mark.long) for name in LEVELS),
    ],
)
def test_kinds_of_models_are_trained_on_two_devices_of_each_of_two_hosts(
    two_hosts: tuple[Host, Host],
    name: str,
    is_long: bool,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    document = device_strategies.ALL[name]
    kinds = train_kinds.on_plugins(document, 4) if is_long else FEW
    alone = train_kinds.alone(tmp_path_factory)
    (tmp_path / "strategy.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    argv = [
        *("--ips=10.88.0.1,10.88.0.2", "--nproc_per_node=2"),
        *("--strategy", str(tmp_path / "strategy.yaml")),
        *(str(train_kinds.SCRIPT), "--accumulate=4", f"--kinds={','.join(kinds)}"),
    ]
    with devices.on("npu", kernel_us=20, delay_us=100, count=2, witness=tmp_path):
        environ = {
            **devices.variables(PYTHON),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "OUTPUT": str(tmp_path / "report"),
        }
        launchers = [
            host.fleetrun(*argv, folder=host.folder, python=PYTHON, **environ) for host in two_hosts
        ]
        codes = [launcher.wait(TRAINING_S) for launcher in launchers]
    assert codes == [0, 0], "\n".join((host.folder / "output").read_text() for host in two_hosts)
    ranks = [json.loads((tmp_path / f"report.{rank}").read_text()) for rank in range(4)]
    train_kinds.assert_as_alone(alone, ranks, kinds)
    for first, *others in devices.traces(tmp_path, 4):
        assert all(other == first for other in others)
    if not name.endswith("hierarchical_allreduce"):
        # Measurements may choose one level, or there are too few ranks for two.
        return
    seen = devices.witnessed(tmp_path, 0)
    # Sums of a host's two ranks, and of both hosts' leaders.
    sums = [call for call in seen if call.operation == "reduce"]
    among_leaders = [call for call in seen if call.operation == "all_reduce" and call.ranks == 2]
    assert {call.ranks for call in sums} == {2}
    assert len(among_leaders) >= len(sums)
