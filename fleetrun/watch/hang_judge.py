"""`--hang_timeout`: a job hangs when no host shows any sign of life.

Each host reports to the coordinator's host when its ranks are silent, with their stacks. Once all
are, the coordinator's host compares these: hosts that wait for one that stands still are not the
cause. A host without a session judges alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from fleetrun.postmortem import stack_groups
from fleetrun.postmortem.flight import RankState
from fleetrun.run.events import Hung
from fleetrun.run.observers import ObservedJob
from fleetrun.rundir import names
from fleetrun.session.driver import Session
from fleetrun.session.messages import RankStack, SilentHost
from fleetrun.text import visible
from fleetrun.watch.flightrecords import FlightRecords

# The most frames of a rank and of a host, and the most characters in one. No path of Paddle is
# longer below the folder of packages, by which its code is told from the script's.
_MOST_FRAMES, _MOST_OF_HOST, _LONGEST_FUNCTION, _LONGEST_FILE = 40, 750, 80, 120


class HangJudge:
    """Agrees with the other hosts of SESSION that JOB hangs, and names the ranks that differ."""

    def __init__(
        self,
        job: ObservedJob,
        session: Session | None,
        records: FlightRecords,
        declare: Callable[[Hung], None],
    ) -> None:
        self._job, self._session, self._records = job, session, records
        self._declare = declare
        # By node rank: the last report, with the stacks of the first one, and when it came.
        self._reported: dict[int, tuple[SilentHost, float]] = {}
        # Whether this host's last report was of silence.
        self.has_reported = False
        if session is not None:
            session.hearers[SilentHost] = self._receive

    def restart(self) -> None:
        """Start over: the ranks are new, or are ending."""
        self._reported.clear()
        self.has_reported = False

    def report(
        self,
        seconds: float | None,
        stacks: Mapping[int, Sequence[tuple[str, str, int]]],
    ) -> None:
        """Report how long the ranks here have been silent; 0: they show life; None: none runs.

        By process of the plan, STACKS of the ranks come with the first report.
        """
        if seconds == 0.0 and not self.has_reported:
            return
        plan = self._job.plan
        # Messages name processes by their places among all ranks of the job.
        places = {
            process: plan.ranks.index(spec.rank)
            for process, spec in enumerate(plan.processes)
            if spec.rank is not None
        }
        # All must fit into one message.
        most = min(_MOST_FRAMES, max(2, _MOST_OF_HOST // max(1, len(stacks))))
        message = SilentHost(
            plan.generation,
            seconds or 0.0,
            seconds is not None,
            tuple(
                RankStack(places[process], tuple(map(_short, frames[:most])))
                for process, frames in stacks.items()
                if process in places
            ),
        )
        if seconds and not self.has_reported:
            # Send them first: the report of the last host ends the wait.
            self._records.send()
        self.has_reported = seconds != 0.0
        if self._session is None:
            self._receive(plan.node_rank, message)
        else:
            self._session.to_coordinator(message)

    # On the coordinator's host --------------------------------------------------------------------

    def _receive(self, node_rank: int, message: SilentHost) -> None:
        plan, session, now = self._job.plan, self._session, time.monotonic()
        if message.generation != plan.generation:
            return
        if message.has_ranks and not message.seconds:
            self._reported.pop(node_rank, None)
            return
        before, _ = self._reported.get(node_rank, (message, now))
        if before.has_ranks == message.has_ranks:
            message = before._replace(seconds=message.seconds)
        self._reported[node_rank] = message, now
        nodes = {plan.node_rank, *(() if session is None else session.connected())}
        if session is not None and len(nodes) < len(plan.nodes):
            # A host that is cut off for a moment may be alive.
            return
        # A host says at once that it is alive again, so all have been silent for the timeout.
        silent_s = [
            report.seconds + now - at for report, at in self._reported.values() if report.has_ranks
        ]
        if silent_s and nodes <= self._reported.keys():
            self._conclude(min(silent_s))

    def _conclude(self, silent_s: float) -> None:
        """Declare that nothing has happened for SILENT_S seconds."""
        plan, ranks = self._job.plan, self._job.plan.ranks
        stacks: dict[int, stack_groups.Stack] = {}
        for node_rank, (report, _) in sorted(self._reported.items()):
            own = {n for n, spec in enumerate(ranks) if spec.node_rank == node_rank}
            stacks |= {
                process: tuple(
                    stack_groups.Frame(visible(function), visible(file), line)
                    for function, file, line in frames
                )
                for process, frames in report.stacks
                if process in own
            }
        self._reported.clear()
        states = {
            spec.rank: RankState(place=stack_groups.users_line(stacks.get(process, ())))
            for process, spec in enumerate(ranks)
            if spec.is_trainer
        }
        culprits = self._records.verdict(states)
        collectives = tuple(
            (tuple(f"rank {rank}" for rank in culprit.ranks), culprit.text) for culprit in culprits
        )
        finding = stack_groups.compare(stacks)
        # A rank that is late for a collective is better evidence than one that stands elsewhere.
        # Records without a culprit blame the network.
        odd = tuple(names.spec_label(ranks[process]) for process in finding.odd)
        odd = next((labels for labels, _ in collectives), odd)
        self._declare(
            Hung(
                seconds=silent_s,
                at=time.monotonic(),
                places=tuple(
                    (tuple(names.spec_label(ranks[n]) for n in place.ranks), str(place))
                    for place in finding.places
                ),
                odd=odd,
                stacks=names.run_path(plan, names.stacks("*")),
                collectives=collectives,
            )
        )


def _short(frame: tuple[str, str, int]) -> tuple[str, str, int]:
    function, file, line = frame
    return function[:_LONGEST_FUNCTION], file[-_LONGEST_FILE:], line
