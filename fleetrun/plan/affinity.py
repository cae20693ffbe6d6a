"""Which CPUs each local rank may use, and its number of threads."""

# No `from __future__ import annotations` here, for the reason given in model.py.
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fleetrun.model import Device, Processors
from fleetrun.text import counted

THREADS = "OMP_NUM_THREADS"

Mask = tuple[int, ...]


class Binding(NamedTuple):
    """The CPUs and number of threads of each local rank, and remarks for the user."""

    masks: tuple[Mask, ...]
    threads: tuple[int, ...]
    notes: tuple[str, ...] = ()


def bind(how: str, processors: "Processors", groups: "Sequence[tuple[Device, ...]]") -> Binding:
    """Distribute PROCESSORS over the ranks with GROUPS of devices, as HOW requests.

    `cores`: all cores are distributed, near each rank's device if each rank then gets one.
    `numa`: each rank gets the CPUs of its device's node; without devices, no rank spans two nodes.
    """
    cores = sorted(
        zip(processors.nodes, processors.cores, strict=True),
        key=lambda entry: (entry[0], entry[1][0]),
    )
    room: dict[int, int] = {}
    for node, core in cores:
        room[node] = room.get(node, 0) + len(core)
    numa_nodes, notes = _numa_nodes(how, groups, processors.near, room)
    if numa_nodes is None and how == "numa":
        numa_nodes = _dealt(len(groups), room)
    masks: list[Mask] = [()] * len(groups)
    threads = [1] * len(groups)
    for numa_node in sorted(set(numa_nodes)) if numa_nodes else [None]:
        tenants = [
            rank
            for rank in range(len(groups))
            if numa_nodes is None or numa_nodes[rank] == numa_node
        ]
        usable = [core for node, core in cores if numa_node is None or node == numa_node]
        shares = _split(usable, len(tenants))
        for rank, mask in zip(tenants, shares, strict=True):
            masks[rank] = mask
            threads[rank] = len(mask)
        cpus = sum(len(core) for core in usable)
        if len(tenants) > cpus:
            for rank in tenants:
                threads[rank] = 1
            where = "" if numa_node is None or len(room) == 1 else f" of NUMA node {numa_node}"
            shortage = f"{len(tenants)} processes share {counted(cpus, 'CPU')}{where}"
            notes += (f"--bind={how}: {shortage}, too few for one each.",)
    return Binding(tuple(masks), tuple(threads), (*notes, *_left_over(how, numa_nodes, room)))


def with_threads(
    env: Mapping[str, str], threads: int, exported: Mapping[str, str]
) -> Mapping[str, str]:
    """Return ENV with one OpenMP thread per CPU, unless the user has set the number.

    >>> with_threads({"A": "1"}, 4, {})
    {'A': '1', 'OMP_NUM_THREADS': '4'}
    """
    if THREADS in env or THREADS in exported:
        return env
    return {**env, THREADS: str(threads)}


def _numa_nodes(
    how: str,
    groups: "Sequence[tuple[Device, ...]]",
    near: Mapping[str, int],
    room: Mapping[int, int],
) -> tuple[list[int] | None, tuple[str, ...]]:
    """Return the NUMA node near each rank's device, or None and the reason."""
    if len(room) < 2 or not all(groups):  # with a single node there is no choice
        return None, ()
    # A rank with devices on two nodes is driven from the first one.
    nearest = [_near(group[0], near) for group in groups]
    numa_nodes = [node for node in nearest if node is not None]
    otherwise = f"--bind={how} shares the CPUs out in the order of ranks: "
    if len(numa_nodes) < len(nearest):
        return None, (f"{otherwise}the NUMA node of each device is not known.",)
    missing = sorted({node for node in numa_nodes if node not in room})
    if missing:
        return None, (f"{otherwise}NUMA node {missing[0]} has none of those we may use.",)
    crowded = any(numa_nodes.count(node) > room[node] for node in numa_nodes)
    if crowded and how == "cores" and len(groups) <= sum(room.values()):
        return None, (f"{otherwise}near the devices there are too few for one each.",)
    return numa_nodes, ()


def _near(device: "Device", near: Mapping[str, int]) -> int | None:
    """Return the NUMA node near DEVICE; its id may be the beginning of a UUID."""
    if device.kind != "gpu":
        return None
    if device.id in near or device.id.isdigit():
        return near.get(device.id)
    return next((node for name, node in near.items() if name.startswith(device.id)), None)


def _dealt(ranks: int, room: Mapping[int, int]) -> list[int]:
    """Distribute RANKS over the nodes in blocks, in proportion to the CPUs of each node."""
    ends: list[tuple[int, int]] = []
    total = 0
    for node in sorted(room):
        total += room[node]
        ends.append((total, node))
    firsts = [rank * total // ranks for rank in range(ranks)]
    return [next(node for end, node in ends if first < end) for first in firsts]


def _split(cores: Sequence[Mask], ranks: int) -> list[Mask]:
    """Divide CORES among RANKS in blocks: whole cores if they suffice, else CPUs, else all to each.

    >>> _split([(0, 4), (1, 5), (2, 6), (3, 7)], 2)
    [(0, 1, 4, 5), (2, 3, 6, 7)]
    >>> _split([(0, 4), (1, 5)], 3)
    [(0,), (4,), (1, 5)]
    >>> _split([(0,), (1,)], 3)
    [(0, 1), (0, 1), (0, 1)]
    """
    pieces = list(cores)
    if ranks > len(pieces):
        pieces = [(cpu,) for core in cores for cpu in core]
    if ranks > len(pieces):
        # If each were bound to one CPU, the ranks with a CPU to themselves would wait for the
        # others.
        return [tuple(sorted(cpu for piece in pieces for cpu in piece))] * ranks
    count = len(pieces)
    blocks = [pieces[rank * count // ranks : (rank + 1) * count // ranks] for rank in range(ranks)]
    return [tuple(sorted(cpu for piece in block for cpu in piece)) for block in blocks]


def _left_over(
    how: str, numa_nodes: Sequence[int] | None, room: Mapping[int, int]
) -> tuple[str, ...]:
    """Return which NUMA nodes have no rank."""
    empty = [node for node in sorted(room) if numa_nodes is not None and node not in numa_nodes]
    return tuple(
        f"--bind={how}: no process is on NUMA node {node}, "
        f"so {counted(room[node], 'CPU')} stay free."
        for node in empty
    )
