"""How CUDA's driver library starts: in a child, which may crash or hang."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any

from nvmls import FakeCuda, hang

from fleetrun.doctor import nvidia

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest


def crash() -> int:
    """Crash like a library that touches invalid memory."""
    os.kill(os.getpid(), 11)
    raise AssertionError


def read(init: Callable[[], int] = lambda: 0, **options: Any) -> Any:
    return nvidia.read_cuda(lambda: FakeCuda(init), root="/nowhere", **options)


def test_gpus_are_counted_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    start = read()
    assert (start.code, start.gpus, start.trouble) == (0, 2, "")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_an_error_has_its_number_and_name() -> None:
    start = read(lambda: 803)
    assert (start.code, start.name) == (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH")


def test_a_library_that_crashes_or_hangs_is_told_and_left() -> None:
    assert read(crash).trouble == "the process that asks it was killed by SIGSEGV"

    def stay() -> int:
        hang()
        return 0

    assert read(stay, timeout_s=0.2).trouble.startswith("cuInit has not answered within 0.2 s")


def test_a_library_that_is_not_there_is_named(tmp_path: Path) -> None:
    start = nvidia.read_cuda(lambda: ctypes.CDLL("libcuda-of-nobody.so.1"), root=str(tmp_path))
    assert start.trouble.startswith("libcuda-of-nobody.so.1: cannot open")
    assert not start.has_uvm


def test_the_device_file_that_only_cuda_needs_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia-uvm").touch()
    assert nvidia.read_cuda(FakeCuda, root=str(tmp_path)).has_uvm
