"""`fleetrun logs --collectives`: what the ranks of a run have recorded of their collectives."""

from __future__ import annotations

import math
import os
import time
from datetime import datetime
from typing import TYPE_CHECKING

from fleetrun.errors import EnvironmentFault
from fleetrun.plan.visible import sentence, visible_lines
from fleetrun.postmortem import flight
from fleetrun.records import flightfile, names, rankfile, runs

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from fleetrun.records.flightfile import Collective, FlightRecord

# Of each rank.
_MOST = 12


def text(found: Sequence[runs.Run], wanted: Container[str] | None) -> str:
    """Return what the records of the runs FOUND say, and the newest collectives of those WANTED.

    Raises EnvironmentFault if there are no records.
    """
    from fleetrun.commands import tables  # rich takes as long as a million lines

    records = {
        rank: record
        for run in found
        for rank, record in flightfile.of_folder(run.path, run.attempt).items()
    }
    if not any(one.last for one in records.values()):
        raise EnvironmentFault(
            f"No collectives were recorded in {found[0].path}: launch with --flight_recorder or "
            "--hang_timeout."
        )
    # The group of all ranks is the largest.
    total = max(max(one.ranks) + 1 for each in records.values() for one in each.last)
    files = [
        os.path.join(run.path, names.rank_records(str(rank))) for run in found for rank in records
    ]
    states = {
        log.rank: flight.RankState(has_ended=True)
        for run in found
        for log in run.logs
        if log.rank is not None and log.ended_at is not None and not log.signal
    }
    job = flight.JobRanks(total, rankfile.topology(files), states)
    is_over = not any(runs.is_running(run.path) for run in found)
    until = math.inf if is_over else time.time() - flight.LATE_S
    said = flight.verdict(records, job, has_failed=is_over, until=until)
    shown = [
        one
        for rank, one in sorted(records.items())
        if wanted is None or f"trainer.{rank}" in wanted
    ]
    rows = [_row(record, one, job) for record, one in flight.table(shown, _MOST)]
    heads = ("called", "rank", "operation", "of", "tensor", "took", "line")
    table = tables.layout(rows, heads=heads, width=tables.width(), whole=(0,))
    return visible_lines("".join((*(f"{sentence(one.text)}.\n" for one in said), table, "\n")))


def _row(record: FlightRecord, one: Collective, job: flight.JobRanks) -> list[str]:
    state = "raised" if one.state == flightfile.RAISED else "open"
    return [
        datetime.fromtimestamp(one.issued_at).astimezone().strftime("%H:%M:%S.%f")[:-3],
        str(record.rank),
        f"{one.operation} {one.sequence}",
        flight.of(one.channel, job).removeprefix("of "),
        one.tensor,
        state if one.done_at is None else f"{(one.done_at - one.issued_at) * 1e3:.1f} ms",
        _line(one.site),
    ]


def _line(site: tuple[str, int, str] | None) -> str:
    if site is None:
        return ""
    file, line, function = site
    return f"{os.path.basename(file)}:{line} ({function})"
