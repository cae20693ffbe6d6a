"""Findings about NVIDIA's driver, CUDA, GPUs and the devices of plug-ins: each one, no others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from findings import bad
from plans import a_request

from fleetrun.doctor import checked_job, gpus
from fleetrun.doctor.checked_job import CheckedJob
from fleetrun.doctor.cuda import CudaStart
from fleetrun.doctor.findings import ERROR, WARNING, Finding
from fleetrun.host.nvml import Survey
from fleetrun.model import Gpu

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30
GPU = Gpu(
    "GPU-0",
    name="H100",
    total_bytes=80 * GIB,
    used_bytes=GIB // 2,
)
OTHER = GPU._replace(number=1, uuid="GPU-1")
WELL = Survey(gpus=(GPU, OTHER), driver="550.54.14", cuda=(12, 4))
STARTED = CudaStart(gpus=2)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make a machine with the files of a driver."""
    (tmp_path / "dev").mkdir()
    for name in ("nvidiactl", "nvidia-uvm", "kmsg"):
        (tmp_path / "dev" / name).touch()
    return tmp_path


def judged(
    root: Path, driver: Survey | None = WELL, cuda: CudaStart | None = None
) -> list[Finding]:
    return list(gpus.check(CheckedJob(a_request(), {}, driver=driver, cuda=cuda), str(root)))


def test_gpus_that_are_well_have_nothing_to_mend(root: Path) -> None:
    findings = judged(root, cuda=STARTED)
    assert bad(findings) == []
    assert [finding.seen for finding in findings] == [
        "GPU 0: H100, 80 GiB",
        "GPU 1: H100, 80 GiB",
        "it starts, with 2 GPUs",
    ]
    # A driver that tells next to nothing is no fault.
    assert bad(judged(root, Survey(gpus=(Gpu("GPU-0"),)))) == []


@pytest.mark.parametrize(
    ("changed", "check", "level", "seen"),
    [
        ({"users": ((7, "python"), (8, ""))}, "GPU in use", WARNING, "pid 7 (python), pid 8"),
        ({"used_bytes": 40 * GIB}, "GPU in use", WARNING, "40 GiB"),
        ({"compute_mode": 2}, "compute mode", ERROR, "Prohibited"),
        ({"compute_mode": 3}, "compute mode", WARNING, "Exclusive"),
        (WELL._replace(lost=((2, "GPU is lost"),)), "GPU", ERROR, "GPU is lost"),
        (WELL._replace(barred=((2, "Insufficient"),)), "GPU", WARNING, "Insufficient"),
    ],
)
def test_what_is_not_well_is_the_one_finding(
    root: Path, changed: dict[str, Any] | Survey, check: str, level: str, seen: str
) -> None:
    if isinstance(changed, dict):
        changed = WELL._replace(gpus=(GPU._replace(**changed), OTHER))
    findings = judged(root, changed)
    assert bad(findings) == [(check, level)]
    assert any(seen in finding.seen for finding in findings)


@pytest.mark.parametrize(
    ("start", "seen", "fix"),
    [
        (CudaStart(802, "CUDA_ERROR_X"), "802, CUDA_ERROR_X: the switches", "fabric"),
        (CudaStart(803), "ends with 803: the loaded driver", "ldconfig -p"),
        (CudaStart(804), "cuda-compat", "LD_LIBRARY_PATH"),
        (CudaStart(100), "it sees no GPU", "--gpus all"),
        (CudaStart(999, "CUDA_ERROR_UNKNOWN"), "999, CUDA_ERROR_UNKNOWN", "dmesg"),
        (CudaStart(trouble="libcuda.so.1: cannot open"), "libcuda.so.1", "compute,utility"),
        (CudaStart(trouble="cuInit has not answered"), "has not answered", "dmesg"),
        (CudaStart(gpus=1), "shows 1 of the 2 GPUs", "compute mode"),
    ],
)
def test_cuda_that_does_not_start_where_nvml_does_is_an_error(
    root: Path, start: CudaStart, seen: str, fix: str
) -> None:
    findings = judged(root, cuda=start)
    assert bad(findings) == [("CUDA", ERROR)]
    (finding,) = (finding for finding in findings if finding.check == "CUDA")
    assert seen in finding.seen
    assert fix in finding.fix


@pytest.mark.parametrize(
    ("driver", "seen", "fix"),
    [
        (Survey(trouble="silence", is_stuck=True), "it is stuck", "reboot"),
        (Survey(trouble="NVMLError_X: Driver/library version mismatch"), "mismatch", "rmmod"),
        (Survey(trouble="NVMLError_LibraryNotFound: x"), "LibraryNotFound", "compute,utility"),
        (Survey(trouble="NVMLError_DriverNotLoaded: x"), "DriverNotLoaded", "modprobe nvidia"),
        (Survey(trouble="NVMLError_NoPermission: x"), "NoPermission", "nvidia-smi"),
    ],
)
def test_a_driver_that_does_not_answer_is_an_error(
    root: Path, driver: Survey, seen: str, fix: str
) -> None:
    finding = judged(root, driver)[0]
    assert finding.level == ERROR
    assert seen in finding.seen
    assert fix in finding.fix


# -- devices of plug-ins --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "counts", "check", "fix"),
    [
        # A driver without its plug-in.
        ("npu", {}, "NPUs", "pip install paddle-custom-npu  # of Paddle's own version"),
        ("musa", {}, "MUSAs", "pip install the plug-in  # of Paddle's own version"),
        # A plug-in without its device.
        ("npu", {"npu": 0}, "NPUs", "ls /dev/davinci*  # are they there, and does ASCEND_RT_"),
    ],
)
def test_what_is_missing_is_said_with_what_mends_it(
    kind: str, counts: dict[str, int], check: str, fix: str
) -> None:
    (finding,) = checked_job.plugins(counts, {kind: "why"})
    assert (finding.check, finding.level, finding.seen) == (check, WARNING, "why")
    assert finding.fix.startswith(fix)
