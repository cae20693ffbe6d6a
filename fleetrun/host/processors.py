"""The CPUs that we may use, and which GPUs are near them."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fleetrun.host import files
from fleetrun.host.nvml import Survey
from fleetrun.model import Processors
from fleetrun.text import parse_numbers


def near(root: str, survey: Survey) -> dict[str, int]:
    """Return the NUMA node of each GPU, under its number and the UUIDs of it and its instances."""
    near: dict[str, int] = {}
    for index, gpu in enumerate(survey.gpus):
        node = _numa_node(root, gpu.bus) if gpu.bus else None
        if node is not None:
            near |= dict.fromkeys((str(index), gpu.uuid, *gpu.instances), node)
    return near


def _numa_node(root: str, bus: str) -> int | None:
    """Return the NUMA node of the device at BUS; None if unknown."""
    # NVML writes 00000000:3B:00.0, the kernel 0000:3b:00.0.
    domain, _, rest = bus.lower().partition(":")
    device = f"{domain[-4:]}:{rest}"
    node = files.text(os.path.join(root, "sys/bus/pci/devices", device, "numa_node")).strip()
    return int(node) if node.isdigit() else None


def processors(root: str, near: Mapping[str, int]) -> Processors:
    """Return the CPUs that we may use, by physical core."""
    # The CPUs that a container, a batch system or taskset allows us.
    allowed = os.sched_getaffinity(0)
    base = os.path.join(root, "sys/devices/system")
    node_of: dict[int, int] = {}
    for name in files.names(os.path.join(base, "node")):
        if name.startswith("node") and name[4:].isdigit():
            listed = files.text(os.path.join(base, "node", name, "cpulist"))
            node_of |= dict.fromkeys(parse_numbers(listed), int(name[4:]))
    cores: list[tuple[int, ...]] = []
    left = set(allowed)
    for cpu in sorted(allowed):
        path = os.path.join(base, "cpu", f"cpu{cpu}", "topology/thread_siblings_list")
        core = tuple(sorted({cpu, *parse_numbers(files.text(path))} & left))
        if cpu in left:
            cores.append(core)
            left.difference_update(core)
    nodes = tuple(node_of.get(core[0], 0) for core in cores)
    return Processors(tuple(cores), nodes, near)
