"""Reads what ranks record of their collectives, tells the coordinator's host, and names a desync.

A rank whose collective stays open for some seconds may wait for one that has called another: its
host sends the record once, and the coordinator's compares those of all.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fleetrun.plan.visible import sentence
from fleetrun.postmortem import flight
from fleetrun.records import flightfile, names, rankfile, reading, variables
from fleetrun.run.events import Noticed
from fleetrun.session import codec
from fleetrun.session.exchange import PackedCollectives, rank_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fleetrun.postmortem.flight import FlightFinding, RankState
    from fleetrun.records.flightfile import FlightRecord
    from fleetrun.run.loop import Waiting
    from fleetrun.run.observers import ObservedJob
    from fleetrun.session.driver import Session


class FlightRecords:
    """The records of the ranks of JOB: those of this host, and what other hosts of SESSION tell."""

    def __init__(self, job: ObservedJob, session: Session | None) -> None:
        self._job = job
        self._session = session
        # By rank, of other hosts.
        self._told: dict[int, FlightRecord] = {}
        # What was sent last of each rank, and what was said.
        self._sent: dict[int, tuple[int, float]] = {}
        self._said: set[str] = set()

    def open(
        self, waiting: Waiting, *, period_s: float, declare: Callable[[Noticed], None]
    ) -> None:
        """Look from time to time for ranks that have called different collectives."""
        self._waiting, self._period_s, self._declare = waiting, period_s, declare
        if self._session is not None:
            self._session.hearers[PackedCollectives] = self._take
        if self._paths():
            self._wait()

    def restart(self) -> None:
        """Begin again: the ranks are new."""
        self._told.clear()
        self._sent.clear()

    def _wait(self) -> None:
        self._waiting.timer("collectives", time.monotonic() + self._period_s, self._look)

    def _look(self) -> None:
        self._wait()
        here = self._here()
        # Without names, for which all records are read.
        if flight.desyncs({**self._told, **here}, flight.JobRanks(0)):
            # What was being written when it was read may have made no sense.
            self._compare()
        now = time.time()
        for rank, record in here.items():
            late = next((one for one in record.collectives if one.is_open), None)
            if late is not None and now - late.issued_at > flight.LATE_S:
                mark = record.pid, late.issued_at
                if self._sent.get(rank) != mark:
                    self._sent[rank] = mark
                    self._send(rank)

    def send(self) -> None:
        """Tell the coordinator's host, if that is another one, what ranks here have recorded."""
        for rank in self._paths():
            self._send(rank)

    def verdict(self, states: Mapping[int, RankState]) -> tuple[FlightFinding, ...]:
        """Say why the ranks hang, as far as their records tell; STATES is what else is known."""
        return flight.verdict({**self._told, **self._here()}, self._job_of(states))

    # Records --------------------------------------------------------------------------------------

    def _paths(self) -> dict[int, tuple[str, int]]:
        """Return the file and the attempt of each rank of this host that records collectives."""
        return {
            one.rank.rank: (one.env[variables.FLIGHT_RECORDER], rankfile.restart_of(one))
            for one in self._job.plan.processes
            if one.rank is not None and variables.FLIGHT_RECORDER in one.env
        }

    def _here(self) -> dict[int, FlightRecord]:
        found = {rank: flightfile.read(*file) for rank, file in self._paths().items()}
        return {rank: one for rank, one in found.items() if one is not None}

    def _send(self, rank: int) -> None:
        plan, session = self._job.plan, self._session
        if session is None or plan.node_rank == 0:
            return
        spec = plan.processes[plan.trainers[rank]].rank
        assert spec is not None
        ring = reading.content(self._paths()[rank][0], flightfile.MOST_BYTES) or b""
        place = plan.ranks.index(spec)
        session.to_coordinator(PackedCollectives(plan.generation, place, codec.pack(ring)))

    def _take(self, node_rank: int, message: PackedCollectives) -> None:
        """Take what another host tells of a rank, if that is its own and of this generation."""
        spec = rank_of(message, node_rank, self._job.plan)
        ring = codec.unpack(message.packed, flightfile.MOST_BYTES)
        record = flightfile.parse(ring)
        if spec is None or record is None:
            return
        self._told[spec.rank] = record._replace(rank=spec.rank)
        try:
            name = names.collectives(names.rank_name(spec))
            self._job.folder.write(name, ring.decode(errors="surrogateescape"))
        except OSError:
            # A full disk hides no hang.
            pass
        self._compare()

    # What they say --------------------------------------------------------------------------------

    def _job_of(self, states: Mapping[int, RankState]) -> flight.JobRanks:
        plan = self._job.plan
        axes = rankfile.topology(map(rankfile.path_of, plan.processes))
        return flight.JobRanks(sum(spec.is_trainer for spec in plan.ranks), axes, states)

    def _compare(self) -> None:
        """Say once that ranks have called different collectives at one place."""
        for found in flight.desyncs({**self._told, **self._here()}, self._job_of({}))[:1]:
            if found.text not in self._said:
                self._said.add(found.text)
                self._job.log(f"{sentence(found.text)}.")
                labels = tuple(f"rank {rank}" for rank in found.ranks)
                self._declare(Noticed("desync", found.text, time.monotonic(), labels))
