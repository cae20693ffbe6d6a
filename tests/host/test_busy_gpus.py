"""The use of the job's GPUs, read before the job is called hung."""

from __future__ import annotations

import pytest
from nvmls import FakeNvml

from fleetrun.host import nvml

# Two GPUs, the second one busy; a third one has no rates.
GPUS = (("GPU-a",), ("GPU-b",), ("GPU-c", "MIG-c"))
LOADS = {"GPU-a": (0, 0), "GPU-b": (37, 2)}
USES = {"GPU-b": (5, 10, ()), "MIG-c": (7, 10, ())}


@pytest.mark.parametrize(
    ("gpus", "busy"),
    [
        (("0",), {"0": (0, 0, 0)}),
        (("0", "1"), {"0": (0, 0, 0), "1": (37, 2, 5)}),
        (("GPU-b",), {"GPU-b": (37, 2, 5)}),
        (("GPU-a", "MIG-c"), {"GPU-a": (0, 0, 0), "MIG-c": (0, 0, 7)}),
        (("9", "2"), {"2": (0, 0, 0)}),
        (("GPU-gone",), {}),
        ((), {}),
        (None, {"0": (0, 0, 0), "1": (37, 2, 5), "2": (0, 0, 0)}),
    ],
)
def test_only_our_gpus_count(
    gpus: tuple[str, ...] | None, busy: dict[str, tuple[int, int, int]]
) -> None:
    assert nvml.loads(FakeNvml(*GPUS, loads=LOADS, uses=USES), gpus) == busy
