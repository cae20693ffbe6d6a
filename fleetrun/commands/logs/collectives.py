"""`fleetrun logs --collectives`: the collectives that a run's ranks have recorded."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Container, Sequence
from datetime import datetime

from fleetrun.errors import EnvironmentFault
from fleetrun.postmortem import flight
from fleetrun.rundir import flightfile, names, rankfile, runs
from fleetrun.text import sentence, visible_lines

# The most collectives shown of each rank.
_MOST = 12


def text(chosen: Sequence[runs.Run], ranks: Container[str] | None) -> str:
    """Return the conclusion from the records of CHOSEN, and the newest collectives of RANKS.

    Raises EnvironmentFault if there are no records.
    """
    from fleetrun.commands import tables  # rich takes as long as a million lines

    records = {rank: record for run in chosen for rank, record in run.collectives().items()}
    if not any(record.last for record in records.values()):
        raise EnvironmentFault(
            f"No collectives were recorded in {chosen[0].path}: launch with --flight_recorder or "
            "--hang_timeout."
        )
    files = [run.file(names.rank_records(rank)) for run in chosen for rank in records]
    states = {
        log.rank: flight.RankState(has_ended=True)
        for run in chosen
        for log in run.logs
        if log.rank is not None and log.ended_at is not None and not log.signal
    }
    # The group of all is the largest.
    groups = [channel.ranks for record in records.values() for channel in record.last]
    world_size = max((max(group, default=-1) + 1 for group in groups), default=0)
    job = flight.JobRanks(world_size, rankfile.topology(files), states)
    is_over = not any(run.is_running for run in chosen)
    # Of a run that went well nobody waits, whatever was not yet seen to be done.
    has_succeeded = all(run.exit_code == 0 for run in chosen)
    latest = math.inf if is_over else time.time() - flight.LATE_S
    until = -math.inf if has_succeeded else latest
    verdicts = flight.verdict(records, job, has_failed=is_over, until=until)
    shown = [
        record
        for rank, record in sorted(records.items())
        if ranks is None or f"trainer.{rank}" in ranks
    ]
    rows = []
    newest = [(record, call) for record in shown for call in record.collectives[-_MOST:]]
    for record, call in sorted(newest, key=lambda row: (row[1].issued_at, row[0].rank)):
        issued_at, done_at = call.issued_at, call.done_at
        state = "raised" if call.state == flightfile.RAISED else "open"
        file, line, function = call.site or ("", 0, "")
        row = (
            datetime.fromtimestamp(issued_at).astimezone().strftime("%H:%M:%S.%f")[:-3],
            str(record.rank),
            f"{call.operation} {call.sequence}",
            flight.of(call.channel, job).removeprefix("of "),
            call.tensor,
            state if done_at is None else f"{(done_at - issued_at) * 1e3:.1f} ms",
            f"{os.path.basename(file)}:{line} ({function})" if call.site else "",
        )
        rows.append(row)
    heads = ("called", "rank", "operation", "of", "tensor", "took", "line")
    table = tables.layout(rows, heads=heads, width=tables.width(), whole=(0,))
    sentences = (f"{sentence(verdict.text)}.\n" for verdict in verdicts)
    return visible_lines("".join((*sentences, table, "\n")))
