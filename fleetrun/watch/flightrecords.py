"""Reads the ranks' records of collectives, sends them to the coordinator's host, and names desyncs.

A rank whose collective stays open for seconds may be waiting for a rank that has called another
one: its host sends the record once, and the coordinator's host compares all records.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from fleetrun.postmortem import flight
from fleetrun.postmortem.flight import FlightFinding, RankState
from fleetrun.run.events import RunWarning
from fleetrun.run.loop import Waiting
from fleetrun.run.observers import ObservedJob
from fleetrun.rundir import flightfile, names, rankfile, reading, variables
from fleetrun.rundir.flightfile import FlightRecord
from fleetrun.text import sentence

if TYPE_CHECKING:
    # Only with other hosts.
    from fleetrun.session.driver import Session
    from fleetrun.session.exchange import PackedCollectives


class FlightRecords:
    """The records of the ranks of JOB: those of this host, and those that other hosts have sent."""

    def __init__(self, job: ObservedJob, session: Session | None) -> None:
        self._job = job
        self._session = session
        # From other hosts, by rank.
        self._received: dict[int, FlightRecord] = {}
        # The last collective for which each rank's record was sent, and the ranks named so far.
        self._sent: dict[int, tuple[int, float]] = {}
        self._reported: set[tuple[int, ...]] = set()
        # The attempt on this host, by which its logs are named.
        self._attempt = 0

    def open(
        self, waiting: Waiting, *, period_s: float, declare: Callable[[RunWarning], None]
    ) -> None:
        """Look every PERIOD_S seconds for ranks that have called different collectives."""
        self._waiting, self._period_s, self._declare = waiting, period_s, declare
        if self._session is not None:
            from fleetrun.session.exchange import PackedCollectives

            self._session.hearers[PackedCollectives] = self._take
        if self._paths():
            self._wait()

    def restart(self) -> None:
        """Start over: the ranks are new."""
        self._attempt += 1
        self._received.clear()
        self._sent.clear()
        self._reported.clear()

    def _wait(self) -> None:
        self._waiting.timer("collectives", time.monotonic() + self._period_s, self._look)

    def _look(self) -> None:
        self._wait()
        now = time.time()
        for rank, record in self.look().items():
            late = next(
                (collective for collective in record.collectives if collective.is_open), None
            )
            if late is not None and now - late.issued_at > flight.LATE_S:
                mark = record.pid, late.issued_at
                if self._sent.get(rank) != mark:
                    self._sent[rank] = mark
                    self._send(rank)

    def look(self) -> Mapping[int, FlightRecord]:
        """Report ranks that have called different collectives; return the records of this host."""
        own = self._here()
        # Without names, which would need all records to be read.
        if flight.desyncs({**self._received, **own}, flight.JobRanks(0)):
            # A record that was being written when it was read may have made no sense.
            self._compare()
        return own

    def send(self) -> None:
        """Send the records of this host's ranks to the coordinator's host, if that is another."""
        for rank in self._paths():
            self._send(rank)

    def verdict(self, states: Mapping[int, RankState]) -> tuple[FlightFinding, ...]:
        """Return why the ranks hang according to their records; STATES is what else is known."""
        return flight.verdict(self._all(), self._job_of(states))

    def may_wait(self, states: Mapping[int, RankState]) -> set[int]:
        """Return the ranks that may wait in collectives that are not recorded."""
        job = self._job_of(states)
        return {
            rank
            for rank, record in self._all().items()
            if flight.may_wait(record._replace(rank=rank), job)
        }

    # Records --------------------------------------------------------------------------------------

    def _paths(self) -> dict[int, tuple[str, int]]:
        """Return the file and the attempt of each rank of this host that records collectives."""
        return {
            spec.rank.rank: (spec.env[variables.FLIGHT_RECORDER], rankfile.restart_of(spec))
            for spec in self._job.plan.processes
            if spec.rank is not None and variables.FLIGHT_RECORDER in spec.env
        }

    def _here(self) -> dict[int, FlightRecord]:
        records = {rank: flightfile.read(*file) for rank, file in self._paths().items()}
        return {rank: record for rank, record in records.items() if record is not None}

    def _all(self) -> dict[int, FlightRecord]:
        return {**self._received, **self._here()}

    def _send(self, rank: int) -> None:
        content = reading.content(self._paths()[rank][0], flightfile.MOST_BYTES) or b""
        plan, session = self._job.plan, self._session
        if session is None or session.serves:
            return
        spec = plan.processes[plan.trainers[rank]].rank
        assert spec is not None
        place = plan.ranks.index(spec)
        from fleetrun.session import codec
        from fleetrun.session.exchange import PackedCollectives

        session.to_coordinator(PackedCollectives(plan.generation, place, codec.pack(content)))

    def _take(self, node_rank: int, message: PackedCollectives) -> None:
        """Take the record of another host's rank."""
        from fleetrun.session import codec
        from fleetrun.session.exchange import rank_of

        spec = rank_of(message, node_rank, self._job.plan)
        ring = codec.unpack(message.packed, flightfile.MOST_BYTES)
        record = flightfile.parse(ring)
        if spec is None or record is None:
            return
        self._received[spec.rank] = record._replace(rank=spec.rank)
        try:
            name = names.collectives(names.rank_name(spec))
            self._job.folder.write(name, ring.decode(errors="surrogateescape"))
        except OSError:
            # A full disk must not hide a hang.
            pass
        self._compare()

    # Findings -------------------------------------------------------------------------------------

    def _job_of(self, states: Mapping[int, RankState]) -> flight.JobRanks:
        plan = self._job.plan
        axes = rankfile.topology(map(rankfile.path_of, plan.processes))
        return flight.JobRanks(sum(spec.is_trainer for spec in plan.ranks), axes, states)

    def _compare(self) -> None:
        """Report once that ranks have called different collectives at one place."""
        for finding in flight.desyncs(self._all(), self._job_of({}), is_early=True)[:1]:
            # As other hosts send their records, more ranks prove the same ones wrong.
            if finding.ranks not in self._reported:
                self._reported.add(finding.ranks)
                self._job.log(f"{sentence(finding.text)}.")
                labels = tuple(f"rank {rank}" for rank in finding.ranks)
                self._declare(RunWarning("desync", finding.text, time.monotonic(), labels))
