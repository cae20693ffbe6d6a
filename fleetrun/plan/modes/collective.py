"""Collective training: every rank is a trainer, ranks follow hosts, and all must finish."""

from __future__ import annotations

from fleetrun.model import TRAINER, Device, Endpoint, Facts, RankSpec, Request, Roster
from fleetrun.plan.devices import Share
from fleetrun.plan.layout import Layout, LocalProcess, ModeHosts, Slot, Slots

# Paddle's first port with --ips.
FIRST_PORT = 6070


def places(_request: Request) -> ModeHosts:
    """Return no hosts: no option of this mode names any."""
    return ModeHosts()


def slots(_request: Request, share: Share) -> Slots:
    """Return one trainer for each group of devices."""
    return Slots(tuple(Slot(TRAINER, devices=group) for group in share.groups), FIRST_PORT)


def layout(_request: Request, _facts: Facts, share: Share, roster: Roster) -> Layout:
    """Return all ranks of the job, and the processes that this host starts."""
    all_ranks = ranks(roster)
    processes = [
        LocalProcess(
            spec,
            name=f"trainer.{spec.rank}",
            log=f"workerlog.{spec.local_rank}",
            identity=_rank(share, spec),
        )
        for spec in all_ranks
        if spec.node_rank == roster.me
    ]
    return Layout(all_ranks, tuple(processes), _job(share, roster, all_ranks))


def ranks(roster: Roster) -> tuple[RankSpec, ...]:
    """Return every rank of the job, host by host in the roster's order."""
    specs: list[RankSpec] = []
    for node_rank, member in enumerate(roster.members):
        for local_rank, (port, devices) in enumerate(zip(member.ports, member.groups, strict=True)):
            endpoint = Endpoint(member.host, port)
            specs.append(RankSpec(TRAINER, len(specs), local_rank, node_rank, devices, endpoint))
    return tuple(specs)


def _job(share: Share, roster: Roster, all_ranks: tuple[RankSpec, ...]) -> dict[str, str]:
    """Return the variables of the job, which all ranks of this host share."""
    return {
        "PADDLE_TRAINERS_NUM": str(len(all_ranks)),
        "PADDLE_TRAINER_ENDPOINTS": ",".join([str(spec.endpoint) for spec in all_ranks]),
        "PADDLE_GLOBAL_SIZE": str(len(all_ranks)),
        "PADDLE_LOCAL_SIZE": str(len(roster.members[roster.me].ports)),
        "PADDLE_NNODES": str(len(roster.members)),
        "PADDLE_MASTER": str(roster.master),
        "PADDLE_WORLD_DEVICE_IDS": ",".join(
            [_indexes(spec.devices, ":", share) for spec in all_ranks]
        ),
        "PADDLE_DISTRI_BACKEND": share.backend,
    }


def _rank(share: Share, spec: RankSpec) -> dict[str, str]:
    """Return the variables of one rank."""
    rank, local_rank = str(spec.rank), str(spec.local_rank)
    indexes = _indexes(spec.devices, ",", share)
    identity = {
        "PADDLE_TRAINER_ID": rank,
        "PADDLE_CURRENT_ENDPOINT": str(spec.endpoint),
        "PADDLE_RANK_IN_NODE": local_rank,
        "PADDLE_GLOBAL_RANK": rank,
        "PADDLE_LOCAL_RANK": local_rank,
        "PADDLE_LOCAL_DEVICE_IDS": indexes,
    }
    if spec.devices:
        identity[f"FLAGS_selected_{share.kind}s"] = indexes
        identity["FLAGS_selected_accelerators"] = indexes
    return identity


def _indexes(devices: tuple[Device, ...], separator: str, share: Share) -> str:
    """Join the devices' indexes into the mask of the worker."""
    if share.has_own_masks:
        return separator.join(map(str, range(len(devices))))
    return separator.join([str(device.ordinal) for device in devices])
