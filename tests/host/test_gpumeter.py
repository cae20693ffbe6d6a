"""A separate process measures GPUs; it may find nothing, hang, or die."""

from __future__ import annotations

from contextlib import closing

from nvmls import FakeNvml
from waiting import until

from fleetrun.host import gpumeter, nvml
from fleetrun.host.gpumeter import GpuMeter
from fleetrun.rundir.metricsfile import GpuUsage

LINE = [["number", 0], ["uuid", "a"], ["name", "H"], ["use_percent", 50], ["power_w", 300.5]]
LINE += [["memory_used_bytes", 1], ["memory_total_bytes", 2], ["temperature_c", None]]
SAY = f"import json, sys; print(json.dumps([dict({LINE})]), flush=True);"


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


def test_the_newest_line_counts_and_a_hanging_driver_holds_nobody_up() -> None:
    with closing(
        GpuMeter(60.0, f"{SAY} sys.stdout.write('[half a li'); sys.stdout.flush(); input()")
    ) as meter:
        until(meter.newest)
        assert meter.newest() == (GpuUsage(0, "a", "H", 50, 1, 2, 300.5, None),)
