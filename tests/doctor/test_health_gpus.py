"""GPUs by NVML and the kernel's log; the fake raises on unknown calls."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from nvmls import Bytes, FakeNvml, FakeNvmlError, NoPermission, hang

from fleetrun.doctor import nvidia
from fleetrun.doctor.nvidia import CudaStart, Xid

if TYPE_CHECKING:
    from pathlib import Path

    from fleetrun.host.nvml import Library

GIB = 1 << 30
# The fake is asked in a child.
_PID = os.getpid()


class Process(NamedTuple):
    """A process that computes on a GPU."""

    pid: int
    usedGpuMemory: int | None


class Talkative(FakeNvml):
    """An NVML that answers a check-up about its first GPU, and nothing about others."""

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"550.54.14"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12040

    def nvmlDeviceGetName(self, handle: object, /) -> str:
        return str(self._of_first(handle, "H100"))

    def nvmlDeviceGetMemoryInfo(self, handle: object, /) -> Bytes:
        memory = self._of_first(handle, Bytes(used=GIB, total=80 * GIB))
        assert isinstance(memory, Bytes)
        return memory

    def nvmlDeviceGetComputeRunningProcesses(self, handle: object, /) -> list[Any]:
        self._of_first(handle, None)
        return [Process(_PID, None)]

    def nvmlDeviceGetTotalEccErrors(self, handle: object, kind: int, counter: int, /) -> int:
        self._of_first(handle, None)
        return 2

    def _of_first(self, handle: object, answer: object) -> object:
        if self.nvmlDeviceGetUUID(handle) != "GPU-a":
            raise FakeNvmlError("Not Supported")
        return answer

    def __getattr__(self, name: str) -> Any:
        """Answer for the functions that take a GPU first."""
        known: dict[str, Any] = {
            "nvmlDeviceGetCudaComputeCapability": (9, 0),
            "nvmlDeviceGetRemappedRows": (0, 1, 1, 0),
            "nvmlDeviceGetMigMode": (1, 1),
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x40,
            "nvmlDeviceGetComputeMode": 3,
            "nvmlDeviceGetCurrPcieLinkWidth": 8,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetTopologyCommonAncestor": 50,
        }
        if name not in known and name != "nvmlDeviceGetNvLinkState":
            raise AttributeError(name)

        def answer(handle: object, *words: object) -> Any:
            self._of_first(handle, None)
            if name == "nvmlDeviceGetNvLinkState":
                if int(str(words[0])) > 3:
                    raise FakeNvmlError("Invalid Argument")
                return int(words[0] != 2)
            return known[name]

        return answer


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    (tmp_path / "dev" / "kmsg").touch()
    return tmp_path


def test_without_a_driver_nobody_is_asked(tmp_path: Path) -> None:
    def never() -> Library:
        raise AssertionError

    assert not nvidia.read(never, root=str(tmp_path)).has_driver


def test_all_that_the_driver_tells_is_read(root: Path) -> None:
    health = nvidia.read(lambda: Talkative(("GPU-a", "MIG-a"), ("GPU-b",)), root=str(root))
    first, second = health.gpus
    assert (health.driver, health.cuda, health.trouble) == ("550.54.14", (12, 4), "")
    assert health.links == {(0, 1): "across the system"}
    assert (first.name, first.memory, first.used) == ("H100", 80 * GIB, GIB)
    ((pid, name, used),) = first.users
    assert (pid, used) == (_PID, None)
    assert name
    assert (first.capability, first.ecc_errors) == ((9, 0), 2)
    assert (first.is_remap_pending, first.is_remap_failed) == (True, False)
    assert (first.is_mig, first.instances) == (True, 1)
    assert (first.throttle, first.compute_mode) == (0x40, "exclusive process")
    assert (first.lanes, first.nvlinks) == ((8, 16), (3, 4))
    assert (second.number, second.name, second.memory, second.users) == (1, "GPU", None, ())


def test_a_library_that_knows_next_to_nothing_is_no_failure(root: Path) -> None:
    health = nvidia.read(lambda: FakeNvml(("GPU-a",)), root=str(root))
    (gpu,) = health.gpus
    assert (gpu.uuid, gpu.memory, gpu.is_mig, gpu.nvlinks) == ("GPU-a", None, None, None)
    assert (health.driver, health.cuda) == ("?", None)


def test_gpus_that_are_lost_or_barred_are_told_apart(root: Path) -> None:
    trouble = {0: FakeNvmlError("GPU is lost"), 1: NoPermission("Insufficient Permissions")}
    lib = FakeNvml(("GPU-a",), ("GPU-b",), ("GPU-c",), trouble=trouble)
    health = nvidia.read(lambda: lib, root=str(root))
    assert health.lost == ((0, "GPU is lost"),)
    assert health.barred == ((1, "Insufficient Permissions"),)
    assert [gpu.number for gpu in health.gpus] == [2]


def test_a_library_that_does_not_fit_says_why(root: Path) -> None:
    health = nvidia.read(lambda: FakeNvml(broken=True), root=str(root))
    assert "version mismatch" in health.trouble
    assert not health.is_stuck


def test_a_container_without_gpus_is_no_broken_driver(tmp_path: Path) -> None:
    folder = tmp_path / "proc" / "driver" / "nvidia"
    folder.mkdir(parents=True)
    (folder / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\n"
    )

    def missing() -> Library:
        raise FakeNvmlError("NVML Shared Library Not Found")

    health = nvidia.read(missing, root=str(tmp_path))
    assert (health.has_driver, health.has_files, health.driver) == (True, False, "550.54.14")
    assert health.trouble == ""


def test_cuda_is_started_where_nvml_answers_or_fails_but_not_where_it_hangs(root: Path) -> None:
    start = CudaStart(has_uvm=True, gpus=1)
    for lib in (FakeNvml(("GPU-a",)), FakeNvml(broken=True)):
        cards = nvidia.read(lambda lib=lib: lib, start_cuda=lambda: start, root=str(root))  # type: ignore[misc]
        assert cards.cuda_start == start

    def never() -> CudaStart:
        raise AssertionError

    cards = nvidia.read(
        lambda: FakeNvml(init=hang), start_cuda=never, root=str(root), timeout_s=0.2
    )
    assert cards.cuda_start is None


def test_a_driver_that_hangs_is_left_behind(root: Path) -> None:
    health = nvidia.read(lambda: FakeNvml(init=hang), root=str(root), timeout_s=0.2)
    assert health.is_stuck


def test_errors_of_gpus_are_found_in_the_kernels_log(root: Path) -> None:
    log = root / "dev" / "kmsg"
    log.write_text(
        "4,100,5,-;usb 1-1: new device\n"
        "4,101,6,-;NVRM: Xid (PCI:0000:3B:00): 79, pid=1, GPU has fallen off the bus.\n"
    )
    assert nvidia.kernel_log(str(log)) == (
        (
            Xid(
                79,
                "0000:3b:00",
                "NVRM: Xid (PCI:0000:3B:00): 79, pid=1, GPU has fallen off the bus.",
            ),
        ),
        "",
    )
    assert nvidia.kernel_log(str(root / "nowhere")) == ((), "No such file or directory")
