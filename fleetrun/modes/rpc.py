"""Remote procedure calls: every rank is a worker with a name, and all meet at the master."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetrun.modes import collective
from fleetrun.modes.cast import Cast, Part

if TYPE_CHECKING:
    from fleetrun.model import Roster

NAME = "rpc"


def cast(roster: Roster) -> Cast:
    """Return every rank of the job; ours are told what paddle.distributed.rpc reads."""
    ranks = collective.layout(roster)
    parts = [
        Part(
            spec,
            name=f"trainer.{spec.rank}",
            # Paddle counts these over all hosts.
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
    return Cast(NAME, ranks, tuple(parts))
