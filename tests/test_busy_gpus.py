"""Whether a GPU of the job computes, asked before the job is called hung."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from fleetrun import probe


class Rates(NamedTuple):
    """Percentages."""

    gpu: int


class FakeNvml:
    """Two GPUs, the second one busy; a third one has no rates."""

    class NVMLError(Exception):
        """NVML's own."""

    def __init__(self, *, has_driver: bool = True) -> None:
        self.open = 0
        self._has_driver = has_driver

    def nvmlInit(self) -> None:  # noqa: D102, N802 - pynvml's names
        if not self._has_driver:
            raise self.NVMLError
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: D102, N802
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int, /) -> object:  # noqa: D102, N802
        if index > 2:
            raise self.NVMLError
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str, /) -> object:  # noqa: D102, N802
        return {"GPU-a": 0, "GPU-b": 1, "MIG-c": 2}[uuid]

    def nvmlDeviceGetUtilizationRates(self, handle: object, /) -> Rates:  # noqa: D102, N802
        if handle == 2:
            raise self.NVMLError
        return Rates(37 if handle == 1 else 0)


@pytest.mark.parametrize(
    ("gpus", "busy"),
    [
        (("0",), False),
        (("0", "1"), True),
        (("GPU-b",), True),
        (("GPU-a", "MIG-c"), False),
        (("9", "2"), False),
        ((), False),
    ],
)
def test_only_our_gpus_count(gpus: tuple[str, ...], busy: bool) -> None:  # noqa: FBT001
    fake = FakeNvml()
    assert probe.is_any_busy(gpus, nvml=lambda: fake) is busy
    assert fake.open == 0


def test_without_a_driver_nobody_is_busy() -> None:
    assert not probe.is_any_busy(("0",), nvml=lambda: FakeNvml(has_driver=False))
