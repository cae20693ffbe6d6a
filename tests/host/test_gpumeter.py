"""A thread measures GPUs; it may find nothing, or hang."""

from __future__ import annotations

from nvmls import FakeNvml, hang
from waiting import until

from fleetrun.host import gpumeter, nvml
from fleetrun.host.gpumeter import GpuMeter


def test_gpus_are_numbered_as_a_launch_numbers_them_and_instances_are_told_of() -> None:
    lib = FakeNvml(
        # In MIG mode without an instance: no job can use it. Then one with two, and a whole one.
        ("a", ""),
        ("b", "MIG-1", "MIG-2"),
        ("c",),
        uses={"MIG-1": (1, 9, ()), "MIG-2": (2, 9, ()), "b": (3, 20, ()), "c": (4, 80, ())},
        whole=("c",),
    )
    measured = gpumeter.read(lib, nvml.opened(lib))
    assert [(gpu.number, gpu.uuid, gpu.memory_used_bytes) for gpu in measured] == [
        (0, "MIG-1", 1),
        (0, "MIG-2", 2),
        (0, "b", 3),
        (1, "c", 4),
    ]
    surveyed = nvml.survey(lib)
    assert [gpu.uuid for gpu in surveyed.gpus] == ["b", "c"]
    assert [number for number, _ in surveyed.lost] == [0]


def test_a_hanging_driver_holds_nobody_up() -> None:
    lib = FakeNvml(("a",), uses={"a": (1, 9, ())})
    meter = GpuMeter(60.0, lambda: lib)
    until(meter.newest)
    assert [(gpu.number, gpu.uuid) for gpu in meter.newest()] == [(0, "a")]
    assert GpuMeter(60.0, lambda: FakeNvml(init=hang)).newest() == ()
