"""How each host of a job has ended, as the coordinator knows it; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetrun.records.hostsfile import HostEnd

if TYPE_CHECKING:
    from fleetrun.session.state import State

WELL, STOPPED, UNKNOWN = "its ranks succeeded", "its ranks were stopped", "its end is unknown"


def of_hosts(state: State) -> tuple[HostEnd, ...]:
    """Return how the hosts of the generation that STATE is in, or ended with, have ended."""
    found: list[HostEnd] = []
    reports = {report.launcher: report.failure for report in state.reports.values()}
    verdict = state.verdict
    is_well = verdict is not None and verdict.failure is None
    for node_rank, entry in enumerate(() if state.roster is None else state.roster.entries):
        failure, host = reports.get(entry.launcher), state.hosts.get(entry.launcher)
        what, code = UNKNOWN, 1
        if failure is not None:
            what, code = failure.what, failure.exit_code
        elif is_well or (host is not None and host.is_done):
            what, code = WELL, 0
        elif host is not None and host.is_stopped:
            what, code = STOPPED, 0
        found.append(
            HostEnd(
                node_rank,
                entry.host,
                entry.hostname,
                len(entry.ports),
                what,
                code,
                is_first=verdict is not None and verdict.launcher == entry.launcher,
                is_victim=failure is not None and failure.is_victim,
            )
        )
    return tuple(found)
