"""What a store outside of the job keeps of it: who coordinates it, and its last roster."""

from __future__ import annotations

import json
from typing import NamedTuple

_LAST_PORT = 65535
# A name of DNS has 253 characters at most.
_LONGEST_NAME = 255


class LeaderRecord(NamedTuple):
    """The launcher that coordinates the job, and where it is called.

    `job` is another one for each job of the same name. `generation` is the next one to begin.
    """

    launcher: str
    host: str
    port: int
    job: str
    generation: int


class RosterEntry(NamedTuple):
    """A host of the roster, in the order of the ranks."""

    launcher: str
    host: str
    hostname: str
    # How often the job has failed because of it.
    strikes: int = 0


class HostStrikes(NamedTuple):
    """How often a job has failed because of a host that has no place in it now."""

    address: str
    hostname: str
    strikes: int


class JobRecord(NamedTuple):
    """The roster that a job last began a generation with, written by its coordinator."""

    job: str
    generation: int
    restarts: int
    coordinator: str
    entries: tuple[RosterEntry, ...]
    strikes: tuple[HostStrikes, ...] = ()


def write(value: LeaderRecord | JobRecord) -> str:
    """Return VALUE as text for the store.

    >>> write(LeaderRecord("5f", "10.0.0.1", 6166, "a1", 0))
    '["5f", "10.0.0.1", 6166, "a1", 0]'
    """
    return json.dumps(value)


def read_leader(text: str) -> LeaderRecord | None:
    """Return the leader that TEXT means; None where no launcher has written it.

    >>> read_leader('["5f", "10.0.0.1", 6166, "a1", 0]').port, read_leader("[]")
    (6166, None)
    """
    match _parsed(text):
        case [str(launcher), str(host), int(port), str(job), int(generation)] if (
            _are_names(launcher, host, job) and 1 <= port <= _LAST_PORT and generation >= 0
        ):
            return LeaderRecord(launcher, host, port, job, generation)
    return None


def read_record(text: str) -> JobRecord | None:
    """Return the record that TEXT means; None where no launcher has written it."""
    match _parsed(text):
        case [
            str(job),
            int(generation),
            int(restarts),
            str(coordinator),
            [*entries],
            [*counts],
        ] if _are_names(job, coordinator) and generation >= 0 and restarts >= 0:
            found = tuple(entry for entry in map(_entry, entries) if entry is not None)
            strikes = tuple(count for count in map(_strikes, counts) if count is not None)
            if found and (len(found), len(strikes)) == (len(entries), len(counts)):
                return JobRecord(job, generation, restarts, coordinator, found, strikes)
    return None


def _entry(value: object) -> RosterEntry | None:
    match value:
        case [str(launcher), str(host), str(hostname), int(strikes)] if (
            _are_names(launcher, host, hostname) and strikes >= 0
        ):
            return RosterEntry(launcher, host, hostname, strikes)
    return None


def _strikes(value: object) -> HostStrikes | None:
    match value:
        case [str(address), str(hostname), int(strikes)] if (
            _are_names(address, hostname) and strikes >= 0
        ):
            return HostStrikes(address, hostname, strikes)
    return None


def _are_names(*texts: str) -> bool:
    return all(len(text) <= _LONGEST_NAME and text.isprintable() for text in texts)


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
