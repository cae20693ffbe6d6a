"""The check that Paddle computes on GPUs: run on the CPU, and with fakes that fail in every way."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from training import PYTHONS, ROOT, run

from fleetrun.doctor import gpu_check
from fleetrun.doctor.findings import Finding
from fleetrun.inject import compute_check

pytestmark = pytest.mark.extended

PROGRAM = ROOT / "fleetrun" / "inject" / "compute_check.py"
# The part of Paddle that the first steps need; anything else raises AttributeError.
FAKE = """
import os, sys, time
from paddle.base import core
def set_device(device): {device}
"""
LACKING = (
    "The third-party dynamic library ({}) that Paddle depends on is not configured correctly. "
    "(error code is libnccl.so: cannot open shared object file: No such file or directory)"
)


def proven(folder: Path, device: str = "raise RuntimeError('no')", core: str = "") -> list[Finding]:
    """Return the findings about a Paddle whose set_device runs DEVICE and whose core has CORE."""
    package = folder / "paddle"
    (package / "base").mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE.format(device=device))
    (package / "base" / "__init__.py").touch()
    (package / "base" / "core.py").write_text(core)
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    return list(gpu_check.compute(sys.executable, ["0", "1"], environ))


@pytest.mark.train
@pytest.mark.parametrize("version", PYTHONS)
def test_what_a_gpu_is_asked_is_right_on_the_cpu(tmp_path: Path, version: str) -> None:
    done = run(PYTHONS[version], [PROGRAM, "--cpu", "2"], tmp_path)
    assert json.loads(done.stdout) == {
        "devices": ["cpu", "cpu"],
        "libraries": [],
        "failed": None,
    }


def test_the_step_at_which_paddle_ends_and_its_words_are_told(tmp_path: Path) -> None:
    words = "Cannot use GPU because there is no GPU detected on your machine."
    (finding,) = proven(tmp_path, f"print({words!r}); sys.exit(255)")
    # Of two ranks that fail, the second one may be killed before it does.
    assert re.fullmatch(rf"device on gpu:[01] ended with 255: {re.escape(words)}", finding.seen)


def test_one_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_check, "TIMEOUT_S", 3.0)
    package = tmp_path / "paddle"
    package.mkdir()
    (package / "__init__.py").write_text("import time\ndef set_device(_): time.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    results = compute_check.prove(["npu:0"])
    assert results["failed"]["how"] == "did not answer within 3 s"
    assert results["failed"]["step"] == "device"


def test_libraries_are_named_as_an_exception_and_as_a_warning_name_them(tmp_path: Path) -> None:
    core = f"""
import sys
def cudnn_version(): print({LACKING.format("/usr/lib/libcudnn.so")!r}, file=sys.stderr)
def nccl_version(): raise RuntimeError({LACKING.format("libnccl.so")!r})
"""
    cudnn, nccl = proven(tmp_path, core=core)
    assert cudnn.seen == "Paddle needs libcudnn.so, which is missing"
    assert nccl.seen == "Paddle needs libnccl.so, which is missing"
    version = tmp_path / "paddle" / "version"
    version.mkdir()
    (version / "__init__.py").write_text("cuda_version = '11.8'\ncudnn_version = '8.6.0'\n")
    done = run(Path(sys.executable), [PROGRAM, "--say"], tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "lacks libcudnn.so nvidia-cudnn-cu11<9",
        "lacks libnccl.so nvidia-nccl-cu11",
        "failed device on gpu:0 ended with 1: RuntimeError: no",
    ]


def test_libraries_of_packages_are_linked_beside_paddles_under_both_names(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "paddle" / "libs").mkdir(parents=True)
    (site / "paddle" / "__init__.py").touch()
    for name in ("cudnn/lib/libcudnn.so.8", "nccl/lib/libnccl.so.2"):
        library = site / "nvidia" / name
        library.parent.mkdir(parents=True)
        library.write_text(name)
    env = {**os.environ, "PYTHONPATH": str(site)}

    def link() -> str:
        argv = [sys.executable, str(PROGRAM), "--link"]
        return subprocess.check_output(argv, env=env, text=True)

    assert link() == "4 links\n"
    assert link() == "0 links\n"
    libs = site / "paddle" / "libs"
    assert (libs / "libcudnn.so").read_text() == "cudnn/lib/libcudnn.so.8"
    assert (libs / "libnccl.so.2").read_text() == "nccl/lib/libnccl.so.2"
    assert (libs / "libnccl.so").is_symlink()
