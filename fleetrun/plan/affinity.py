"""Which CPUs each local rank may use, and its number of threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleetrun.model import Device, Processors

Mask = tuple[int, ...]


def bind(
    how: str, processors: Processors, groups: Sequence[tuple[Device, ...]]
) -> tuple[list[Mask], list[int]]:
    """Return the CPUs of each rank and its number of threads; GROUPS are the ranks' devices.

    `cores`: the cores are divided; `numa`: each rank gets its share of one NUMA node. Both take the
    node of the rank's first device where the nodes of all are known.
    """
    cores = sorted(zip(processors.nodes, processors.cores, strict=True))
    cpus = [node for node, core in cores for _ in core]
    near = [_near(group, processors.near) for group in groups]
    is_crowded = any(near.count(node) > cpus.count(node) for node in set(cpus))
    if not set(near) <= set(cpus) or (how == "cores" and is_crowded):
        near = [None] * len(groups)
        if how == "numa":
            near = [cpus[rank * len(cpus) // len(groups)] for rank in range(len(groups))]
    masks: list[Mask] = [()] * len(groups)
    threads = [1] * len(groups)
    for node in set(near):
        tenants = [rank for rank, own in enumerate(near) if own == node]
        usable = [core for place, core in cores if node in {None, place}]
        for rank, mask in zip(tenants, _split(usable, len(tenants)), strict=True):
            masks[rank] = mask
            threads[rank] = len(mask) if len(tenants) <= sum(map(len, usable)) else 1
    return masks, threads


def _near(group: Sequence[Device], near: Mapping[str, int]) -> int | None:
    """Return the NUMA node of the first GPU of GROUP; its id may be the beginning of a UUID."""
    if not group or group[0].kind != "gpu":
        return None
    own = group[0].id
    if own in near or own.isdigit():
        return near.get(own)
    return next((node for name, node in near.items() if name.startswith(own)), None)


def _split(cores: Sequence[Mask], ranks: int) -> list[Mask]:
    """Divide CORES among RANKS in blocks: whole cores if they suffice, else CPUs, else all to each.

    >>> _split([(0, 4), (1, 5), (2, 6), (3, 7)], 2)
    [(0, 1, 4, 5), (2, 3, 6, 7)]
    >>> _split([(0, 4), (1, 5)], 3), _split([(0,), (1,)], 3)
    ([(0,), (4,), (1, 5)], [(0, 1), (0, 1), (0, 1)])
    """
    pieces = list(cores)
    if ranks > len(pieces):
        pieces = [(cpu,) for core in cores for cpu in core]
    if ranks > len(pieces):
        # A rank with a CPU to itself would wait for those that share one.
        return [tuple(sorted(cpu for piece in pieces for cpu in piece))] * ranks
    count = len(pieces)
    blocks = [pieces[rank * count // ranks : (rank + 1) * count // ranks] for rank in range(ranks)]
    return [tuple(sorted(cpu for piece in block for cpu in piece)) for block in blocks]
