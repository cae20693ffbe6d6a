"""The use of the job's GPUs, read before the job is called hung."""

from __future__ import annotations

import pytest
from nvmls import FakeNvml

from fleetrun.host import nvml

# Two GPUs, the second one busy; a third one has no rates.
GPUS = (("GPU-a",), ("GPU-b",), ("GPU-c", "MIG-c"))
LOADS = {"GPU-a": (0, 0), "GPU-b": (37, 2)}


@pytest.mark.parametrize(
    ("gpus", "busy"),
    [
        (("0",), [(0, 0)]),
        (("0", "1"), [(0, 0), (37, 2)]),
        (("GPU-b",), [(37, 2)]),
        (("9", "GPU-gone"), []),
        ((), []),
        (None, [(0, 0), (37, 2)]),
    ],
)
def test_only_our_gpus_count(gpus: tuple[str, ...] | None, busy: list[tuple[int, int]]) -> None:
    assert nvml.rates(FakeNvml(*GPUS, loads=LOADS), gpus) == busy
