"""Launches on devices of Paddle's plug-ins, counted by a fake Paddle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from checkout import ROOT
from commandline import Command
from fake_paddles import fake_paddle, plugins

if TYPE_CHECKING:
    from pathlib import Path

    from commandline import Ended

pytestmark = pytest.mark.extended

NAMES = "CUSTOM_DEVICE_ROOT PADDLE_DISTRI_BACKEND PADDLE_XCCL_BACKEND"
# Each rank prints the variables that select its device.
SCRIPT = f"""
for name in sorted(os.environ):
    if name.startswith("FLAGS_selected_") or name in {NAMES.split()}:
        print(f"{{rank}}: {{name}}={{os.environ[name]}}", flush=True)
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Make the environment of a host whose Paddle has four MLUs."""
    return {
        "PYTHONPATH": f"{fake_paddle(tmp_path)}:{ROOT}",
        "CUSTOM_DEVICE_ROOT": plugins(tmp_path, "mlu 4 MLU_VISIBLE_DEVICES"),
    }


def launched(folder: Path, env: dict[str, str], *options: str) -> Ended:
    """Run ranks that print their device variables, without --nproc_per_node."""
    job = Command.python(folder, SCRIPT, "--tee=all", *options)
    job.argv = [word for word in job.argv if word not in {"--nproc_per_node=2", "--quiet"}]
    return job.finish(job.start(env=env))


def printed(ended: Ended, rank: int) -> dict[str, str]:
    """Return the variables that RANK has printed."""
    lines = [line.partition(f"{rank}: ")[2] for line in ended.out.decode().splitlines()]
    return dict(line.split("=", 1) for line in lines if "=" in line)


def test_every_device_of_a_plugin_gets_a_rank(tmp_path: Path, env: dict[str, str]) -> None:
    foreign = {"FLAGS_selected_npus": "7", "FLAGS_selected_mlus": "3"}
    ended = launched(tmp_path, env | foreign)
    assert ended.code == 0
    assert "devices mlu 0-3; backend xccl" in ended.stderr
    for rank in range(4):
        assert printed(ended, rank) == {
            "CUSTOM_DEVICE_ROOT": env["CUSTOM_DEVICE_ROOT"],
            "FLAGS_selected_accelerators": str(rank),
            "FLAGS_selected_mlus": str(rank),
            "PADDLE_DISTRI_BACKEND": "xccl",
            "PADDLE_XCCL_BACKEND": "mlu",
        }
