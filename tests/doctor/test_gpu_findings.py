"""Findings about NVIDIA's driver: each one, and no others."""

from __future__ import annotations

from typing import Any

import pytest
from findings import bad

from fleetrun.doctor import gpus
from fleetrun.doctor.findings import ERROR, OK, WARNING, Finding
from fleetrun.doctor.nvidia import CudaStart, Gpu, Gpus, User, Xid

GIB = 1 << 30
GPU = Gpu(
    number=0,
    name="H100",
    uuid="GPU-0",
    memory=80 * GIB,
    used=GIB // 2,
    capability=(9, 0),
    ecc_errors=0,
    is_remap_pending=False,
    is_remap_failed=False,
    is_mig=False,
    throttle=0x4,
    compute_mode="default",
    lanes=(16, 16),
    nvlinks=(18, 18),
)
OTHER = GPU._replace(number=1, uuid="GPU-1")
WELL = Gpus(
    has_driver=True,
    gpus=(GPU, OTHER),
    driver="550.54.14",
    cuda=(12, 4),
    links={(0, 1): "across the system"},
)


def judged(health: Gpus) -> list[Finding]:
    return list(gpus.judge(health))


def test_gpus_that_are_well_have_nothing_to_mend() -> None:
    findings = judged(WELL)
    assert bad(findings) == []
    assert "GPU 0: H100, 80 GiB, sm_90, 18 NVLinks" in [finding.seen for finding in findings]


def test_without_a_driver_there_is_nothing_to_judge() -> None:
    without = Gpus(has_driver=False)
    (finding,) = judged(without)
    assert (finding.level, finding.seen) == (OK, "no NVIDIA driver: ranks run on the CPU")
    assert [finding.seen for finding in gpus.judge(without, has_others=True)] == [
        "no NVIDIA driver"
    ]


def test_a_driver_that_tells_next_to_nothing_is_no_fault() -> None:
    silent = Gpus(has_driver=True, gpus=(Gpu(0, "GPU", "GPU-0"),), driver="?")
    assert bad(judged(silent)) == []


@pytest.mark.parametrize(
    ("changed", "check", "level", "seen"),
    [
        ({"users": (User(7, "python", GIB),)}, "GPU in use", WARNING, "pid 7 (python) 1 GiB"),
        ({"users": (User(7, "", None),)}, "GPU in use", WARNING, "by pid 7"),
        ({"used": 40 * GIB}, "GPU in use", WARNING, "40 GiB"),
        ({"ecc_errors": 3}, "GPU memory", ERROR, "3 uncorrected"),
        ({"is_remap_pending": True}, "GPU memory", WARNING, "waits for a reset"),
        ({"is_remap_failed": True}, "GPU memory", ERROR, "cannot replace"),
        ({"is_mig": True, "instances": 0}, "MIG", ERROR, "no instance"),
        ({"is_mig": True, "instances": 7}, "MIG", WARNING, "7 MIG instances"),
        ({"compute_mode": "prohibited"}, "compute mode", ERROR, "Prohibited"),
        ({"compute_mode": "exclusive process"}, "compute mode", WARNING, "Exclusive"),
        ({"throttle": 0x40}, "GPU clocks", WARNING, "too hot"),
        ({"throttle": 0x88}, "GPU clocks", WARNING, "power supply"),
        ({"lanes": (8, 16)}, "PCIe", WARNING, "8 of 16"),
        ({"nvlinks": (17, 18)}, "NVLink", WARNING, "17 of 18"),
    ],
)
def test_what_is_not_well_is_the_one_finding(
    changed: dict[str, Any], check: str, level: str, seen: str
) -> None:
    sick = WELL._replace(gpus=(GPU._replace(**changed), OTHER))
    assert bad(judged(sick)) == [(check, level)]
    assert any(seen in finding.seen for finding in judged(sick))


@pytest.mark.parametrize(
    ("changed", "check", "level"),
    [
        ({"gpus": (), "links": {}}, "GPUs", WARNING),
        ({"lost": ((2, "GPU is lost"),)}, "GPU", ERROR),
        ({"barred": ((2, "Insufficient Permissions"),)}, "GPU", WARNING),
        ({"log_refusal": "Operation not permitted"}, "Xid errors", WARNING),
        ({"xids": (Xid(79, "0000:3b:00", "fallen off the bus"),)}, "Xid errors", ERROR),
        ({"xids": (Xid(31, "0000:3b:00", "page fault"),)}, "Xid errors", WARNING),
        ({"gpus": (GPU._replace(nvlinks=None), OTHER)}, "GPU topology", WARNING),
    ],
)
def test_what_is_not_well_of_all_of_them_is_the_one_finding(
    changed: dict[str, Any], check: str, level: str
) -> None:
    assert bad(judged(WELL._replace(**changed))) == [(check, level)]


@pytest.mark.parametrize(("is_stuck", "seen"), [(True, "stuck"), (False, "NVML does not work")])
def test_a_driver_that_does_not_answer_is_an_error(is_stuck: bool, seen: str) -> None:
    findings = judged(Gpus(has_driver=True, trouble="silence", is_stuck=is_stuck))
    assert findings[0].level == ERROR
    assert seen in findings[0].seen


STARTED = CudaStart(has_uvm=True, gpus=2)


@pytest.mark.parametrize(
    ("start", "seen", "fix"),
    [
        (
            STARTED._replace(code=802, name="CUDA_ERROR_X"),
            "802, CUDA_ERROR_X: the switches",
            "fabric",
        ),
        (STARTED._replace(code=803), "ends with 803: the loaded driver", "ldconfig -p"),
        (STARTED._replace(code=804), "cuda-compat", "LD_LIBRARY_PATH"),
        (STARTED._replace(code=100), "it sees no GPU", "--gpus all"),
        (STARTED._replace(code=999, name="CUDA_ERROR_UNKNOWN"), "999, CUDA_ERROR_UNKNOWN", "dmesg"),
        (STARTED._replace(code=999, has_uvm=False), "/dev/nvidia-uvm, which it", "nvidia-modprobe"),
        (STARTED._replace(trouble="libcuda.so.1: cannot open"), "libcuda.so.1", "compute,utility"),
        (STARTED._replace(trouble="cuInit has not answered"), "has not answered", "dmesg"),
        (STARTED._replace(gpus=1), "shows 1 of the 2 GPUs", "compute mode"),
    ],
)
def test_cuda_that_does_not_start_where_nvml_does_is_an_error(
    start: CudaStart, seen: str, fix: str
) -> None:
    (finding,) = [
        finding for finding in judged(WELL._replace(cuda_start=start)) if finding.level != OK
    ]
    assert (finding.check, finding.level) == ("CUDA", ERROR)
    assert seen in finding.seen
    assert fix in finding.fix


def test_cuda_that_starts_is_said() -> None:
    findings = judged(WELL._replace(cuda_start=STARTED))
    assert bad(findings) == []
    assert "it starts, with 2 GPUs" in [finding.seen for finding in findings]
    # Of instances it shows one.
    divided = WELL._replace(gpus=(GPU._replace(is_mig=True, instances=1), OTHER))
    assert bad(judged(divided._replace(cuda_start=STARTED._replace(gpus=1)))) == []


def test_a_container_without_gpus_is_told_how_to_get_them_and_may_go_on() -> None:
    (finding,) = judged(Gpus(has_driver=True, has_files=False, driver="550.54.14"))
    assert finding.level == WARNING
    assert finding.seen.startswith("the machine has NVIDIA's driver 550.54.14, but its device")
    assert finding.fix.startswith("docker run --gpus all")


@pytest.mark.parametrize(
    ("trouble", "fix"),
    [
        ("NVMLError_LibRmVersionMismatch: Driver/library version mismatch", "rmmod"),
        ("NVMLError_LibraryNotFound: NVML Shared Library Not Found", "compute,utility"),
        ("NVMLError_DriverNotLoaded: Driver Not Loaded", "modprobe nvidia"),
        ("NVMLError_Unknown: Unknown Error", "docker restart"),
        ("NVMLError_NoPermission: Insufficient Permissions", "nvidia-smi"),
    ],
)
def test_only_what_an_upgrade_has_left_is_mended_by_loading_the_driver_again(
    trouble: str, fix: str
) -> None:
    finding = judged(Gpus(has_driver=True, trouble=trouble))[0]
    assert finding.level == ERROR
    assert fix in finding.fix
    assert ("rmmod" in finding.fix) is (fix == "rmmod")


def test_nvml_alone_keeps_no_job_from_its_gpus() -> None:
    silent = Gpus(has_driver=True, trouble="NVMLError_LibraryNotFound: no", cuda_start=STARTED)
    assert [finding.level for finding in judged(silent)] == [WARNING, OK, OK]


def test_the_same_error_many_times_is_one_finding() -> None:
    rows = tuple(Xid(79, "0000:3b:00", "x") for _ in range(50))
    (finding,) = [finding for finding in judged(WELL._replace(xids=rows)) if finding.level != OK]
    assert "50 times" in finding.seen
