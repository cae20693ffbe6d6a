"""Remote procedure calls: every rank is a named worker, and all rendezvous at the master."""

from __future__ import annotations

from fleetrun.model import Facts, Request, Roster
from fleetrun.plan.devices import Share
from fleetrun.plan.layout import Layout, LocalProcess, ModeHosts, Slots
from fleetrun.plan.modes import collective


def places(_request: Request) -> ModeHosts:
    """Return no hosts: no option of this mode names any."""
    return ModeHosts()


def slots(request: Request, share: Share) -> Slots:
    """Return one worker for each group of devices, and a port where they meet."""
    # The first endpoint is a worker's here, so it cannot be the store's.
    return collective.slots(request, share)._replace(master="own")


def layout(_request: Request, _facts: Facts, _share: Share, roster: Roster) -> Layout:
    """Return every rank of the job; local ones get the variables of paddle.distributed.rpc."""
    ranks = collective.ranks(roster)
    processes = [
        LocalProcess(
            spec,
            name=f"trainer.{spec.rank}",
            # Paddle numbers these over all hosts.
            log=f"workerlog.{spec.rank}",
            identity={
                "PADDLE_MASTER_ENDPOINT": str(roster.master),
                "PADDLE_WORKER_ENDPOINT": str(spec.endpoint),
                "PADDLE_TRAINER_ID": str(spec.rank),
                "PADDLE_TRAINERS_NUM": str(len(ranks)),
            },
        )
        for spec in ranks
        if spec.node_rank == roster.me
    ]
    return Layout(ranks, tuple(processes))
