"""Launches on real GPUs, without Paddle: masks, hangs in a kernel, and memory that is freed."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from checkout import ROOT
from commandline import FLEETRUN
from waiting import LONG_S

from fleetrun.doctor import cuda
from fleetrun.host.nvml import Survey
from fleetrun.run.isolation import IsolatedCall

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.gpu
SPIN = str(Path(__file__).parent / "spin.py")
MASK = "CUDA_VISIBLE_DEVICES"
# After the end of a process the driver takes its memory back; this much may be others'.
SLACK = 256 << 20


def environment(**more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != MASK}
    return {**inherited, "PYTHONPATH": str(ROOT), "SPIN_ON": "gpu", **more}


def start(folder: Path, how: str, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*FLEETRUN, "--gpus=0", *options, SPIN, how],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def planned(folder: Path, env: Mapping[str, str]) -> int | None:
    """Return how many ranks have GPUs in a dry run with ENV; None where it is refused."""
    done = subprocess.run(
        [*FLEETRUN, "--dry-run=json", SPIN, "wait"],
        cwd=folder,
        env=environment(**env),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return None
    (node,) = json.loads(done.stdout)["nodes"]
    devices = [device for process in node["processes"] for device in process["rank"]["devices"]]
    return [device["kind"] for device in devices].count("gpu")


def shown_by_cuda(env: Mapping[str, str]) -> int:
    """Return how many GPUs CUDA shows with ENV."""

    def ask() -> int:
        os.environ.pop(MASK, None)
        os.environ.update(env)
        lib = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int(0)
        lib.cuInit(0)
        lib.cuDeviceGetCount(ctypes.byref(count))
        return count.value

    answer = IsolatedCall(ask).result(LONG_S)
    assert answer is not None
    assert not answer.trouble
    return int(str(answer.value))


def driver() -> Survey:
    """Return what the driver of this host tells."""
    survey = cuda.read_driver()
    assert survey is not None
    return survey


def test_cuda_starts_with_the_gpus_that_nvml_has() -> None:
    health, begun = driver(), cuda.start_cuda()
    assert not health.trouble
    assert begun.code == 0
    assert any(gpu.is_mig for gpu in health.gpus) or begun.gpus == len(health.gpus)


@pytest.mark.parametrize("mask", [None, "", "0", "{uuid}", "0,99", "99"])
def test_a_launch_uses_the_gpus_that_a_mask_shows(mask: str | None, tmp_path: Path) -> None:
    env = {} if mask is None else {MASK: mask.format(uuid=driver().gpus[0].uuid)}
    shown, taken = shown_by_cuda(env), planned(tmp_path, env)
    # A launch may refuse what CUDA drops without a word; it may not use more.
    assert taken == shown or (taken is None and mask is not None and shown < mask.count(",") + 1)


def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [*FLEETRUN, "--gpus=99", SPIN, "wait"], cwd=tmp_path, env=environment(), check=False
    )
    assert done.returncode in {2, 3}
    assert not (tmp_path / "log").exists()


def test_the_doctor_ends_with_its_own_codes(tmp_path: Path) -> None:
    command = [*FLEETRUN, "doctor", "--json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, check=False
    )
    assert done.returncode in {0, 3}
    assert json.loads(done.stdout)["findings"]


def test_a_rank_that_waits_in_a_kernel_hangs(tmp_path: Path) -> None:
    launcher = start(tmp_path, "wait", "--hang_timeout=5")
    output = launcher.communicate(timeout=LONG_S)[0]
    assert launcher.returncode == 124, output


def test_a_gpu_that_works_under_a_still_stack_is_alive(tmp_path: Path) -> None:
    launcher = start(tmp_path, "work", "--hang_timeout=5")
    output = launcher.communicate(timeout=LONG_S)[0]
    assert launcher.returncode == 0, output


@pytest.mark.parametrize("victim", ["rank", "launcher"])
def test_memory_is_freed_after_a_kill(victim: str, tmp_path: Path) -> None:
    before = driver().gpus[0].used_bytes or 0
    launcher = start(tmp_path, "hold")
    assert launcher.stdout is not None
    assert any("waits" in line for line in launcher.stdout)
    events = (tmp_path / "log/latest/events.jsonl").read_text().splitlines()
    rank = next(json.loads(line)["pid"] for line in events if '"started"' in line)
    os.kill(rank if victim == "rank" else launcher.pid, signal.SIGKILL)
    launcher.communicate(timeout=LONG_S)
    end = time.monotonic() + LONG_S
    while time.monotonic() < end and (driver().gpus[0].used_bytes or 0) > before + SLACK:
        time.sleep(0.05)
    assert (driver().gpus[0].used_bytes or 0) <= before + SLACK
    assert not Path(f"/proc/{rank}").exists()


@pytest.mark.train
@pytest.mark.parametrize("strategy", ["recommended", "overlap"])
def test_a_strategy_trains_as_plain_paddle_does(strategy: str, tmp_path: Path) -> None:
    if len(driver().gpus) < 2:
        pytest.skip("averaging needs two GPUs")
    script = str(ROOT / "scripts" / "train_resnet.py")
    options = [f"--strategy={strategy}", "--gpus=0,1", "--updates=8"]
    command = [sys.executable, "-m", "fleetrun", "verify", *options, script, "--depth=8"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
