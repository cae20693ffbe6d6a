"""Reads the ranks' records of collectives, sends them to the coordinator's host, and names desyncs.

A rank whose collective stays open for seconds may be waiting for a rank that has called another
one: its host sends the record once, and the coordinator's host compares all records.
"""

from __future__ import annotations

import base64
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from fleetrun.postmortem import flight
from fleetrun.postmortem.flight import FlightFinding, RankState
from fleetrun.run.events import Exited, Gathered, Happening, RunWarning, SignalAll, Started
from fleetrun.run.loop import Waiting
from fleetrun.run.observers import ObservedJob, Source
from fleetrun.rundir import flightfile, names, rankfile, reading, variables
from fleetrun.rundir.flightfile import FlightRecord
from fleetrun.text import sentence

if TYPE_CHECKING:
    # Only with other hosts.
    from fleetrun.session.driver import Session
    from fleetrun.session.messages import PackedCollectives

# How often to look at most; each look reads a file for each rank.
_PERIOD_S = 5.0


class FlightRecords(Source):
    """The records of the ranks of JOB: those of this host, and those that other hosts have sent."""

    name = "comparing collectives"

    def __init__(self, job: ObservedJob, session: Session | None) -> None:
        self._job, self._session = job, session
        self._period_s = min(job.plan.rules.hang_timeout_s / 4 or _PERIOD_S, _PERIOD_S)
        self._running: set[int] = set()
        self._begin()

    def open(self, waiting: Waiting) -> None:
        """Look periodically for ranks that have called different collectives."""
        super().open(waiting)
        if self._session is not None:
            from fleetrun.session.messages import PackedCollectives

            self._session.hearers[PackedCollectives] = self._take
        if self._paths():
            self._look()

    def on_event(self, happening: Happening) -> None:
        """Send all records before the coordinator's host hears that this one has ended."""
        match happening:
            case Gathered(attempt=attempt) if attempt:
                self._begin()
            case Started(process=process):
                self._running.add(process)
            case SignalAll() if happening.ends_ranks:
                self.send()
            case Exited(process=process):
                self._running.discard(process)
                if not self._running:
                    # Others may fail because these have ended; and a device may pair calls that
                    # differ, so that the job goes on.
                    self.send()
                    self._compare()

    def _begin(self) -> None:
        # From other hosts, by rank; the last late collective of each rank of this host that others
        # know; the ranks named so far.
        self._received: dict[int, FlightRecord] = {}
        self._sent: dict[int, tuple[int, float]] = {}
        self._reported: set[tuple[int, ...]] = set()

    def _look(self) -> None:
        self._waiting.timer("collectives", time.monotonic() + self._period_s, self._look)
        now = time.time()
        for rank, record in self._compare().items():
            late = next((call for call in record.collectives if call.is_open), None)
            if late is not None and now - late.issued_at > flight.LATE_S:
                mark = record.pid, late.issued_at
                if self._sent.get(rank) != mark:
                    self._sent[rank] = mark
                    self._send(rank)

    def send(self) -> None:
        """Send the records of this host's ranks to the coordinator's host, if that is another."""
        for rank in self._paths():
            self._send(rank)

    def verdict(self, states: Mapping[int, RankState]) -> tuple[FlightFinding, ...]:
        """Return why the ranks hang according to their records; STATES is what else is known."""
        return flight.verdict({**self._received, **self._here()}, self._job_of(states))

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

    def _send(self, rank: int) -> None:
        plan, session = self._job.plan, self._session
        if session is None or session.serves:
            return
        from fleetrun.session.codec import LONGEST_TEXT
        from fleetrun.session.messages import PackedCollectives

        content = reading.content(self._paths()[rank][0], flightfile.MOST_BYTES) or b""
        spec = plan.processes[plan.trainers[rank]].rank
        assert spec is not None
        place = plan.ranks.index(spec)
        packed = base64.b64encode(zlib.compress(content)).decode()[:LONGEST_TEXT]
        session.to_coordinator(PackedCollectives(plan.generation, place, packed))

    def _take(self, node_rank: int, message: PackedCollectives) -> None:
        """Take the record of another host's rank."""
        plan = self._job.plan
        ranks = plan.ranks if message.generation == plan.generation else ()
        spec = dict(enumerate(ranks)).get(message.process)
        ring, record = b"", None
        # One that is too long for a message, or is none.
        with suppress(ValueError, zlib.error):
            packed = base64.b64decode(message.packed, validate=True)
            ring = zlib.decompressobj().decompress(packed, flightfile.MOST_BYTES)
            record = flightfile.parse(ring)
        if spec is None or spec.node_rank != node_rank or record is None:
            return
        self._received[spec.rank] = record._replace(rank=spec.rank)
        name = names.collectives(names.rank_name(spec))
        # A full disk must not hide a hang.
        with suppress(OSError):
            self._job.folder.write(name, ring.decode(errors="surrogateescape"))
        self._compare()

    def _job_of(self, states: Mapping[int, RankState]) -> flight.JobRanks:
        plan = self._job.plan
        axes = rankfile.topology(map(rankfile.path_of, plan.processes))
        return flight.JobRanks(sum(spec.is_trainer for spec in plan.ranks), axes, states)

    def _compare(self) -> Mapping[int, FlightRecord]:
        """Report ranks that have called different collectives; return the records of this host."""
        own = self._here()
        # At first without names, which would need all records to be read.
        if not flight.desyncs({**self._received, **own}, flight.JobRanks(0)):
            return own
        # One that was being written when it was read may have made no sense.
        records = {**self._received, **self._here()}
        for finding in flight.desyncs(records, self._job_of({}), is_early=True)[:1]:
            # As other hosts send their records, more ranks prove the same ones wrong.
            if finding.ranks not in self._reported:
                self._reported.add(finding.ranks)
                self._job.log(f"{sentence(finding.text)}.")
                labels = tuple(f"rank {rank}" for rank in finding.ranks)
                self.declare(RunWarning("desync", finding.text, time.monotonic(), labels))
        return own
