"""What a launch asks of NVML, on a fake driver in C."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import fakedriver
import pytest
from checkout import ROOT

from fleetrun.model import Gpu

if TYPE_CHECKING:
    from pathlib import Path

ASK = """
import json
from fleetrun.host import nvml
print(json.dumps(nvml.survey(nvml.library())[:3]))
"""
pytestmark = fakedriver.needed


@pytest.mark.parametrize(
    "gpus",
    [
        {"FAKE_GPUS": "3", "FAKE_HOLDERS": "20"},
        {"FAKE_GPUS": "2", "FAKE_BARRED": "1"},
        {"FAKE_GPUS": "0"},
    ],
)
def test_a_launch_sees_what_the_driver_has(tmp_path: Path, gpus: dict[str, str]) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **fakedriver.build(tmp_path), **gpus}
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=env, capture_output=True, text=True, check=True
    )
    usable, barred, lost = json.loads(done.stdout)
    assert len(usable) + len(barred) == int(gpus["FAKE_GPUS"])
    assert not lost
    if usable:
        expected = Gpu("GPU-0", 0, "GPU", "00000000:01:00.0", 1 << 30, 80 << 30)
        holders = [[5_000_000 + at, ""] for at in range(int(gpus.get("FAKE_HOLDERS", 0)))]
        assert usable[0] == json.loads(json.dumps(expected._replace(users=tuple(holders))))  # type: ignore[arg-type]
