"""What etcd stores about a job: its coordinator, and its last roster."""

# No `from __future__ import annotations`: the codec checks every field by its annotation.

from typing import NamedTuple

from fleetrun.session.codec import Codec, Malformed
from fleetrun.session.config import RendezvousConfig
from fleetrun.session.messages import Count, Name, Port


class StoreAddress(NamedTuple):
    """Where an etcd keeps job NAME: its members, asked in this order, over TLS if `is_secure`.

    Each answer is awaited for `timeout_s` seconds.
    """

    endpoints: tuple[tuple[str, int], ...]
    name: str
    timeout_s: float
    is_secure: bool = False


class LeaderRecord(NamedTuple):
    """The launcher that coordinates the job, and its endpoint.

    `job` is unique even among jobs of one name. `generation` is the next one to begin.
    """

    launcher: Name
    host: Name
    port: Port
    job: Name
    generation: Count


class RosterEntry(NamedTuple):
    """A host of the job; `launcher` is empty for one that has no place in the roster."""

    launcher: Name
    host: Name
    hostname: Name
    # How often it has failed the job.
    failure_count: Count = 0


class JobRecord(NamedTuple):
    """The roster of a job's last generation, as its coordinator has written it."""

    job: Name
    generation: Count
    restarts: Count
    coordinator: Name
    # Hosts in the order of their ranks, and others because of which the job has failed.
    entries: tuple[RosterEntry, ...]
    config: RendezvousConfig
    others: tuple[RosterEntry, ...] = ()

    def check(self) -> None:
        """Raise ValueError if no launcher can have written it."""
        if not self.entries:
            raise ValueError(self.entries)


def write(value: LeaderRecord | JobRecord) -> str:
    """Return VALUE as text for the store.

    >>> write(LeaderRecord("5f", "10.0.0.1", 6166, "a1", 0))
    '{"is":"LeaderRecord","launcher":"5f","host":"10.0.0.1","port":6166,"job":"a1","generation":0}'
    """
    return _CODEC.write(value).decode()


def read_leader(text: str) -> LeaderRecord | None:
    """Return the leader in TEXT; None if no launcher has written it.

    >>> read_leader(write(LeaderRecord("5f", "10.0.0.1", 6166, "a1", 0))).port, read_leader("[]")
    (6166, None)
    """
    record = _read(text)
    return record if isinstance(record, LeaderRecord) else None


def read_record(text: str) -> JobRecord | None:
    """Return the record in TEXT; None if no launcher has written it."""
    record = _read(text)
    return record if isinstance(record, JobRecord) else None


_CODEC = Codec(LeaderRecord, JobRecord)


def _read(text: str) -> object:
    try:
        return _CODEC.read(text.encode(errors="replace"))
    except Malformed:
        return None
