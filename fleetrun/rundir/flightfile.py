"""Reading `collectives.RANK`, the ring in which a rank records its collectives.

`inject/flight_recorder.py` writes it while the rank runs, so the last of it may be half-written:
what makes no sense is left out.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fleetrun.rundir import names, reading

MAGIC = b"FLTRING3"
HEADER = struct.Struct("<8s4I8xQ")
HEADER_BYTES = 64
# The last sequence numbers of the channels.
HEADS = struct.Struct("<512Q")
TABLE_BYTES = 64 * 1024
SLOT, SLOT_BYTES, SLOTS = struct.Struct("<QQI"), 320, 1024
FAILED, ENDED = 1, 2
BLOCKING, ASYNCHRONOUS, RAISED = 0, 1, 2
NEW_GROUP = "new_group"
_TABLE_AT = HEADER_BYTES + HEADS.size
_SLOTS_AT = _TABLE_AT + TABLE_BYTES
# The size of a ring.
MOST_BYTES = _SLOTS_AT + SLOTS * SLOT_BYTES
_NS = 1e9


class CollectiveChannel(NamedTuple):
    """A sequence of collectives: those of a group, or the messages to one peer.

    RANKS are those of the whole job; NUMBER, from 1, tells groups of the same ranks apart, and of a
    new group the call that makes it.
    """

    ranks: tuple[int, ...]
    number: int = 1
    # Empty, or an operation with a channel of its own; and both ends of a send or recv.
    operation: str = ""
    source: int = -1
    target: int = -1

    @property
    def is_pair(self) -> bool:
        """Whether it goes from one rank to another."""
        return self.source >= 0


class Collective(NamedTuple):
    """A collective, or a send or recv: the SEQUENCE-th of its channel, from 1."""

    channel: CollectiveChannel
    sequence: int
    operation: str
    # Wall clock, in seconds; None: not known to be done.
    issued_at: float
    done_at: float | None = None
    shape: tuple[int, ...] = ()
    dtype: str = ""
    nbytes: int = 0
    # The root of a broadcast, reduce, scatter or gather, among the ranks of the job; else -1.
    root: int = -1
    # File, line and function of the script; none if it was not the script.
    site: tuple[str, int, str] | None = None
    state: int = BLOCKING

    @property
    def is_open(self) -> bool:
        """Whether it has neither finished nor raised, as far as is known."""
        return self.done_at is None and self.state != RAISED

    @property
    def number(self) -> int:
        """Its number among those like it, from 1; of a new group, that of the call of new_group."""
        is_group = self.channel.operation == NEW_GROUP
        return self.channel.number if is_group else self.sequence

    @property
    def tensor(self) -> str:
        """The dtype and shape: `float32 [4, 2]`."""
        return f"{self.dtype} {list(self.shape)}" if self.dtype else ""


class FlightRecord(NamedTuple):
    """What a rank has recorded: the newest collectives, the oldest first."""

    rank: int
    pid: int
    restart: int
    collectives: tuple[Collective, ...] = ()
    # The last sequence number of each channel, even if the ring has dropped that collective.
    last: Mapping[CollectiveChannel, int] = {}
    # Whether the recorder has failed, so that the rank may be anywhere.
    has_failed: bool = False
    # Whether its script has ended without an error.
    has_ended: bool = False
    # When the rank last looked which of its asynchronous collectives are done (wall clock); 0:
    # never.
    settled_at: float = 0.0
    # What it has used that calls collectives without a record, such as auto parallel.
    unrecorded: tuple[str, ...] = ()


def read(path: str, restart: int) -> FlightRecord | None:
    """Return the record of attempt RESTART in the file PATH, if any."""
    record = parse(reading.content(path, MOST_BYTES) if path else None)
    return record if record is not None and record.restart == restart else None


def in_folder(run_dir: str, restart: int) -> dict[int, FlightRecord]:
    """Return the trainers' records of attempt RESTART in RUN_DIR, by rank."""
    record_of = {}
    for name in os.listdir(run_dir):
        rank = name.removeprefix(names.collectives(""))
        if rank != name and rank.isdigit():
            record = read(os.path.join(run_dir, name), restart)
            if record is not None:
                record_of[int(rank)] = record._replace(rank=int(rank))
    return dict(sorted(record_of.items()))


def ranks_in(records: Iterable[FlightRecord]) -> int:
    """Return how many ranks the job of RECORDS has: the group of all is the largest."""
    return max(
        (max(last.ranks, default=-1) + 1 for record in records for last in record.last), default=0
    )


def issued(path: str) -> int:
    """Return a number that changes with each collective in the ring PATH; 0 if there is none."""
    heads = reading.piece(path, HEADER_BYTES, HEADS.size) if path else b""
    return sum(HEADS.unpack(heads)) if len(heads) == HEADS.size else 0


def parse(ring: bytes | None) -> FlightRecord | None:
    """Return the record in RING; None if it is not a ring."""
    if ring is None or len(ring) < MOST_BYTES or not ring.startswith(MAGIC):
        return None
    _, state, pid, restart, rank, settled = HEADER.unpack_from(ring)
    heads = HEADS.unpack_from(ring, HEADER_BYTES)
    channels: dict[int, CollectiveChannel] = {}
    unrecorded = []
    for line in ring[_TABLE_AT:_SLOTS_AT].partition(b"\0")[0].split(b"\n"):
        match _json(line):
            case ["unrecorded", str(what)]:
                unrecorded.append(what)
            case ["channel", int(number), list(runs), int(made), str(operation), int(peer)]:
                if 0 <= number < len(heads) and (ranks := _ranks(runs)):
                    channels[number] = _channel(ranks, made, operation, peer, rank)
            case _:
                continue
    slots = []
    for place in range(SLOTS):
        at = _SLOTS_AT + place * SLOT_BYTES
        number, done, call_state = SLOT.unpack_from(ring, at)
        text = ring[at + SLOT.size : at + SLOT_BYTES].rstrip(b"\0")
        call = _collective(text, channels) if number and number % SLOTS == place else None
        if call is not None:
            done_at = done / _NS if done else None
            slots.append((number, call._replace(done_at=done_at, state=call_state)))
    return FlightRecord(
        *(rank, pid, restart),
        _in_order([call for _, call in sorted(slots, key=lambda slot: slot[0])]),
        {channel: heads[number] for number, channel in channels.items() if heads[number]},
        has_failed=state == FAILED,
        has_ended=state == ENDED,
        settled_at=settled / _NS,
        unrecorded=tuple(unrecorded),
    )


def _in_order(collectives: list[Collective]) -> tuple[Collective, ...]:
    """Return COLLECTIVES, done where a later one of the channel is: a device runs them in order."""
    done: dict[CollectiveChannel, float] = {}
    for place in reversed(range(len(collectives))):
        collective = collectives[place]
        if collective.done_at is not None:
            done[collective.channel] = collective.done_at
        elif collective.state == ASYNCHRONOUS and collective.channel in done:
            collectives[place] = collective._replace(done_at=done[collective.channel])
    return tuple(collectives)


def _channel(
    ranks: tuple[int, ...], made: int, operation: str, peer: int, rank: int
) -> CollectiveChannel:
    if not operation or not 0 <= peer < len(ranks):
        return CollectiveChannel(ranks, made, operation)
    pair = (rank, ranks[peer])
    return CollectiveChannel(ranks, made, operation, *(pair if operation == "send" else pair[::-1]))


def _collective(text: bytes, channels: Mapping[int, CollectiveChannel]) -> Collective | None:
    match _json(text):
        case [
            int(number), int(sequence), int(issued_ns),
            str(operation), str(dtype), list(shape), int(nbytes), int(peer), site,
        ] if number in channels:  # fmt: skip
            channel = channels[number]
            is_rooted = not channel.operation and 0 <= peer < len(channel.ranks)
            return Collective(
                *(channel, sequence, operation, issued_ns / _NS),
                shape=tuple(length for length in shape if isinstance(length, int)),
                dtype=dtype,
                nbytes=nbytes,
                root=channel.ranks[peer] if is_rooted else -1,
                site=_site(site),
            )
        case _:
            return None


def _json(text: bytes) -> list[object]:
    """Return the list in TEXT; nothing if it is none, as in a line that is being written."""
    entry = reading.parse(b'{"is": %s}' % text) if text else None
    return list(reading.items((entry or {}).get("is")))


def _ranks(runs: list[object]) -> tuple[int, ...]:
    """Return the ranks in RUNS.

    >>> _ranks([[0, 2], [5, 5]])
    (0, 1, 2, 5)
    """
    ranks: list[int] = []
    for run in runs:
        match run:
            case [int(first), int(final)] if 0 <= first <= final < first + (1 << 20):
                ranks += range(first, final + 1)
            case _:
                return ()
    return tuple(ranks)


def _site(value: object) -> tuple[str, int, str] | None:
    match value:
        case [str(file), int(line), str(function)]:
            return file, line, function
        case _:
            return None
