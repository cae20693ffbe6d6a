"""A stuck driver delays nothing: real processes, and a fake NVML in its own /dev."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import fakedriver
import pytest
from checkout import ROOT
from commandline import Command
from waiting import LONG_S

pytestmark = pytest.mark.extended

# A /dev like this machine's, with the files of a driver and of one GPU.
OTHER_DEV = """
mount -t tmpfs none "$0" && cd "$0" && touch nvidiactl nvidia0 null zero urandom random tty
mkdir shm pts; chmod 1777 shm
for name in null zero urandom random tty shm; do mount --bind /dev/$name $name; done
mount --move . /dev; cd "$OLDPWD"; exec "$@"
"""
NAMESPACE = ("unshare", "--mount", "sh", "-c", OTHER_DEV)

# One GPU.
FAKE = """
import os, select
class NVMLError(Exception): pass
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return "GPU-a"
def nvmlDeviceGetUUID(handle): return "GPU-a"
def nvmlDeviceGetMaxMigDeviceCount(handle): return 0
def nvmlDeviceGetMemoryInfo(handle): raise NVMLError
"""


def can_have_another_dev(folder: Path) -> bool:
    if os.geteuid() or shutil.which("unshare") is None:
        return False
    done = subprocess.run([*NAMESPACE, str(folder), "true"], capture_output=True, check=False)
    return done.returncode == 0


@pytest.fixture
def dev(tmp_path: Path) -> tuple[str, ...]:
    """Install a fake NVML; return the prefix of a command that is to see a driver."""
    (tmp_path / "dev").mkdir()
    if not can_have_another_dev(tmp_path / "dev"):
        pytest.skip("only root may give a command a /dev of its own")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/pynvml.py").write_text(FAKE)
    return (*NAMESPACE, str(tmp_path / "dev"))


def environ(folder: Path, **more: str) -> dict[str, str]:
    return {"PYTHONPATH": f"{folder / 'lib'}:{ROOT}", "CUDA_VISIBLE_DEVICES": "0", **more}


@fakedriver.needed
def test_term_ends_a_launcher_whose_driver_never_answers(
    tmp_path: Path, dev: tuple[str, ...]
) -> None:
    job = Command(tmp_path, "true", ranks=1)
    # The fake is below the real pynvml here.
    stuck = {"PYTHONPATH": str(ROOT), "FAKE_STUCK": str(tmp_path / "asked")}
    driver = fakedriver.build(tmp_path / "driver")
    launcher = job.start_until("asked", prefix=dev, env=environ(tmp_path, **driver) | stuck)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(LONG_S) == 128 + signal.SIGTERM
    # The child of a launcher that has ended ends, too.
    job.finish(launcher)
