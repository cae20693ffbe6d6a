"""`--hang_timeout`: a job hangs when no host shows any sign of life.

Each host reports to the coordinator's host when its ranks are silent, with their stacks. Once all
are, the coordinator's host compares these: hosts that wait for one that stands still are not the
cause. A host without a session judges alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from fleetrun.postmortem import stack_groups
from fleetrun.postmortem.flight import UNKNOWN, RankState
from fleetrun.run.events import Hung
from fleetrun.run.observers import ObservedJob
from fleetrun.rundir import names
from fleetrun.session.driver import Session
from fleetrun.session.exchange import EndedRank, RankStack, SilentHost
from fleetrun.text import visible
from fleetrun.watch.flightrecords import FlightRecords

# The most frames of a rank and of a host, and the most characters in one. No path of Paddle is
# longer below the folder of packages, by which its code is told from the script's.
_MOST_FRAMES, _MOST_OF_HOST, _LONGEST_FUNCTION, _LONGEST_FILE = 40, 750, 80, 120


class _Silence(NamedTuple):
    """The last report of a silent host, and when it came; the first one has its stacks."""

    report: SilentHost
    at: float


class HangJudge:
    """Agrees with the other hosts of SESSION that JOB hangs, and names the ranks that differ."""

    def __init__(
        self,
        job: ObservedJob,
        session: Session | None,
        *,
        records: FlightRecords | None = None,
        declare: Callable[[Hung], None],
    ) -> None:
        self._job, self._session, self._records = job, session, records
        self._declare = declare
        # By node rank.
        self._reported: dict[int, _Silence] = {}
        # Whether this host's last report was of silence.
        self.has_reported = False
        if session is not None:
            session.hearers[SilentHost] = self._receive

    def restart(self) -> None:
        """Start over: the ranks are new, or are ending."""
        self._reported.clear()
        self.has_reported = False

    # From the watch of this host ------------------------------------------------------------------

    def report(
        self,
        seconds: float | None,
        stacks: Mapping[int, Sequence[tuple[str, str, int]]] = MappingProxyType({}),
        *,
        sign: str = "life",
        ended: Mapping[int, float] = MappingProxyType({}),
    ) -> None:
        """Report how long the ranks here have been silent; 0: they show life; None: none runs.

        By process of the plan, STACKS of the ranks come with the first report, and ENDED says when
        processes succeeded.
        """
        if seconds == 0.0 and not self.has_reported:
            return
        plan, now = self._job.plan, time.monotonic()
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
            sign,
            tuple(
                EndedRank(places[process], max(now - at, 0.0))
                for process, at in ended.items()
                if process in places
            ),
        )
        if self._records is not None and seconds and not self.has_reported:
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
        before = self._reported.get(node_rank)
        if before is not None and before.report.has_ranks == message.has_ranks:
            message = before.report._replace(seconds=message.seconds, ended=message.ended)
        self._reported[node_rank] = _Silence(message, now)
        nodes = {plan.node_rank, *(() if session is None else session.connected())}
        if session is not None and len(nodes) < len(plan.nodes):
            # A host that is cut off for a moment may be alive.
            return
        # A host says at once that it is alive again, so all have been silent for the timeout.
        silent_s = [
            silence.report.seconds + now - silence.at
            for silence in self._reported.values()
            if silence.report.has_ranks
        ]
        if silent_s and nodes <= self._reported.keys():
            self._conclude(min(silent_s))

    def _conclude(self, silent_s: float) -> None:
        """Declare that nothing has happened for SILENT_S seconds."""
        reported = sorted(self._reported.items())
        self._reported.clear()
        plan = self._job.plan
        ranks = plan.ranks
        stacks: dict[int, stack_groups.Stack] = {}
        ended: dict[int, float] = {}
        for node_rank, (report, _) in reported:
            own_processes = {n for n, spec in enumerate(ranks) if spec.node_rank == node_rank}
            stacks |= {
                stack.process: tuple(
                    stack_groups.Frame(visible(function), visible(file), line)
                    for function, file, line in stack.frames
                )
                for stack in report.stacks
                if stack.process in own_processes
            }
            ended |= {
                process: seconds for process, seconds in report.ended if process in own_processes
            }
        self._write(stacks)
        states = self._states(stacks, ended)
        culprits = () if self._records is None else self._records.verdict(states)
        collectives = tuple(
            (tuple(f"rank {rank}" for rank in culprit.ranks), culprit.text) for culprit in culprits
        )
        may_wait = () if self._records is None else self._records.may_wait(states)
        finding = stack_groups.compare(
            stacks,
            {
                process
                for process, spec in enumerate(ranks)
                if spec.is_trainer and spec.rank in may_wait
            },
        )
        # A rank that is late for a collective is better evidence than one that stands elsewhere.
        # Records without a culprit blame the network, unless something is not recorded.
        is_complete = any(culprit.kind != UNKNOWN for culprit in culprits)
        ended_labels = tuple(self._label(process) for process in sorted(ended))
        odd = tuple(self._label(process) for process in finding.odd)
        if not odd or all(place.is_meeting for place in finding.places):
            odd = ended_labels or odd
        odd = next((labels for labels, _ in collectives if labels or is_complete), odd)
        if ended:
            departure = (ended_labels, _departure(ended_labels, min(ended.values())))
            names_living = any(set(labels) - set(ended_labels) for labels, _ in collectives)
            collectives = (*collectives, departure) if names_living else (departure, *collectives)
        has_steps = any(silence.report.sign == "steps" for _, silence in reported)
        self._declare(
            Hung(
                seconds=silent_s,
                at=time.monotonic(),
                places=tuple(
                    (tuple(self._label(process) for process in place.ranks), str(place))
                    for place in finding.places
                ),
                odd=odd,
                stacks=names.run_path(plan, names.stacks(self._only(stacks) or "*")),
                sign="steps" if has_steps else "life",
                collectives=collectives,
            )
        )

    def _states(
        self, stacks: Mapping[int, stack_groups.Stack], ended: Container[int]
    ) -> dict[int, RankState]:
        """Return where each trainer stands; those of ENDED do no more."""
        return {
            spec.rank: RankState(
                place=_users(stacks.get(process, ())),
                has_ended=process in ended,
                is_outside_paddle=bool(stacks.get(process))
                and not stack_groups.is_in_paddle(stacks[process]),
            )
            for process, spec in enumerate(self._job.plan.ranks)
            if spec.is_trainer
        }

    def _label(self, process: int) -> str:
        return names.spec_label(self._job.plan.ranks[process])

    def _only(self, stacks: Mapping[int, object]) -> str:
        """Return the name in files of the only rank of STACKS; empty if there are several."""
        ranks = self._job.plan.ranks
        return names.rank_name(ranks[next(iter(stacks))]) if len(stacks) == 1 else ""

    def _write(self, stacks: Mapping[int, Sequence[tuple[str, str, int]]]) -> None:
        """Write the stacks of other hosts' ranks beside those of ours."""
        for process, frames in sorted(stacks.items()):
            spec = self._job.plan.ranks[process]
            if spec.node_rank == self._job.plan.node_rank:
                continue
            host = self._job.plan.nodes[spec.node_rank]
            lines = [f"# {names.spec_label(spec)} on {visible(host)}: its main thread"]
            lines += [
                f'  File "{file}", line {line} in {function}' for function, file, line in frames
            ]
            try:
                self._job.folder.write(names.stacks(names.rank_name(spec)), "\n".join(lines) + "\n")
            except OSError:
                # A full disk must not hide a hang.
                return


def _short(frame: tuple[str, str, int]) -> tuple[str, str, int]:
    function, file, line = frame
    return function[:_LONGEST_FUNCTION], file[-_LONGEST_FILE:], line


def _departure(labels: Sequence[str], seconds: float) -> str:
    """Say when the ranks LABELS, for which others may wait, exited: the last one SECONDS ago."""
    at = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
    who = names.listed(labels)
    if len(labels) == 1:
        return f"{who} has ended: it exited with 0 at {at}; the others may wait for it"
    return f"{who} have ended: they exited with 0, the last at {at}; the others may wait for them"


def _users(stack: stack_groups.Stack) -> str:
    """Name the innermost line of the script in STACK: `data.py:88 (next)`."""
    frame = next((frame for frame in stack if frame.is_users), None)
    return (
        "" if frame is None else f"{frame.file.rpartition('/')[2]}:{frame.line} ({frame.function})"
    )
