"""The CPUs that we may use, and which GPUs are near them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fleetrun.host import files
from fleetrun.model import Gpu, Processors
from fleetrun.text import parse_range


def read(root: str, gpus: Sequence[Gpu]) -> Processors:
    """Return the CPUs that we may use, by physical core, and the NUMA nodes of GPUS."""
    # The CPUs that a container, a batch system or taskset allows us.
    allowed = os.sched_getaffinity(0)
    base = os.path.join(root, "sys/devices/system")
    node_of: dict[int, int] = {}
    for name in files.names(os.path.join(base, "node")):
        if name.startswith("node") and name[4:].isdigit():
            listed = files.text(os.path.join(base, "node", name, "cpulist"))
            node_of |= dict.fromkeys(_numbers(listed), int(name[4:]))
    cores: list[tuple[int, ...]] = []
    left = set(allowed)
    for cpu in sorted(allowed):
        path = os.path.join(base, "cpu", f"cpu{cpu}", "topology/thread_siblings_list")
        core = tuple(sorted({cpu, *_numbers(files.text(path))} & left))
        if cpu in left:
            cores.append(core)
            left.difference_update(core)
    nodes = tuple(node_of.get(core[0], 0) for core in cores)
    near: dict[str, int] = {}
    for index, gpu in enumerate(gpus):
        # NVML writes 00000000:3B:00.0, the kernel 0000:3b:00.0.
        path = os.path.join(root, "sys/bus/pci/devices", gpu.bus.lower()[-12:], "numa_node")
        node = files.text(path).strip() if gpu.bus else ""
        if node.isdigit():
            parts = [part.uuid for part in gpu.instances]
            near |= dict.fromkeys((str(index), gpu.uuid, *parts), int(node))
    return Processors(tuple(cores), nodes, near)


def _numbers(listed: str) -> set[int]:
    """Return the numbers that the kernel has LISTED: `0-2,8`."""
    return {number for span in listed.split(",") for number in parse_range(span) or ()}
