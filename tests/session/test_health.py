"""What keeps a host out of the next generation: a disk, or GPUs that do not work or are full."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvmls import FakeNvml, FakeNvmlError

from fleetrun.session import health

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30
BEFORE = {"GPU-a": GIB}


def trouble(folder: Path, lib: FakeNvml) -> str:
    """Return the fault of a host with the GPUs of LIB, which had BEFORE."""
    return health.trouble(str(folder), BEFORE, lambda: lib, given_back_s=0.0)


def test_a_host_that_can_write_and_has_its_memory_back_is_well(tmp_path: Path) -> None:
    lib = FakeNvml(("GPU-a",), uses={"GPU-a": (2 * GIB, 80 * GIB, ())})
    assert not trouble(tmp_path, lib)
    assert not health.trouble(str(tmp_path), {})


def test_a_folder_where_no_log_can_be_written_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert health.trouble(str(gone), {}) == (
        f"no log can be written to {gone} (No such file or directory)"
    )


def test_memory_that_is_not_given_back_is_told_with_who_has_it(tmp_path: Path) -> None:
    lib = FakeNvml(("GPU-a",), uses={"GPU-a": (60 * GIB, 80 * GIB, (4711,))})
    fault = trouble(tmp_path, lib)
    assert fault == "60.0 of 80.0 GiB of the memory of GPU-a are still in use (pid 4711)"


def test_a_gpu_that_is_no_longer_there_is_told_with_why(tmp_path: Path) -> None:
    lib = FakeNvml(("GPU-a",), trouble={0: FakeNvmlError("GPU is lost")})
    assert trouble(tmp_path, lib) == "GPU-a does not answer: GPU is lost"
