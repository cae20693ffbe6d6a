"""Reading `collectives.RANK`, the ring in which a rank records its collectives.

`inject/flight_recorder.py` writes it while the rank runs, so the last of it may be half-written:
what makes no sense is left out.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from fleetrun.rundir import names, reading

MAGIC = b"FLTRING3"
HEADER = struct.Struct("<8s4I8xQ")
HEADER_BYTES = 64
# The last sequence numbers of the channels.
HEADS = struct.Struct("<512Q")
TABLE_BYTES = 64 * 1024
SLOT, SLOT_BYTES, SLOTS = struct.Struct("<QQI"), 320, 1024
FAILED = 1
BLOCKING, ASYNCHRONOUS, RAISED = 0, 1, 2
_TABLE_AT = HEADER_BYTES + HEADS.size
_SLOTS_AT = _TABLE_AT + TABLE_BYTES
# The size of a ring.
MOST_BYTES = _SLOTS_AT + SLOTS * SLOT_BYTES
_NS = 1e9


class CollectiveChannel(NamedTuple):
    """A sequence of collectives: those of a group, or the messages to one peer.

    RANKS are those of the whole job; NUMBER, from 1, tells groups of the same ranks apart.
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
    # When the rank last looked which of its asynchronous collectives are done (wall clock); 0:
    # never.
    settled_at: float = 0.0


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
    for line in ring[_TABLE_AT:_SLOTS_AT].partition(b"\0")[0].split(b"\n"):
        match _list(line):
            case ["channel", int(number), list(runs), int(made), str(operation), int(peer)]:
                ranks = tuple(rank for first, last in runs for rank in range(first, last + 1))
                pair = (-1, -1)
                if operation and 0 <= peer < len(ranks):
                    pair = (rank, ranks[peer]) if operation == "send" else (ranks[peer], rank)
                channels[number] = CollectiveChannel(ranks, made, operation, *pair)
            case _:
                continue
    slots = []
    for at in range(_SLOTS_AT, MOST_BYTES, SLOT_BYTES):
        number, done, call_state = SLOT.unpack_from(ring, at)
        if number:
            text = ring[at + SLOT.size : at + SLOT_BYTES].rstrip(b"\0")
            call = _collective(text, channels, done / _NS if done else None, call_state)
            slots += [(number, call)] if call is not None else []
    slots.sort(key=lambda slot: slot[0])
    return FlightRecord(
        *(rank, pid, restart),
        _in_order([call for _, call in slots]),
        {channel: heads[number] for number, channel in channels.items() if heads[number]},
        has_failed=state == FAILED,
        settled_at=settled / _NS,
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


def _collective(
    text: bytes, channels: Mapping[int, CollectiveChannel], done_at: float | None, state: int
) -> Collective | None:
    match _list(text):
        case [number, sequence, issued, operation, dtype, shape, nbytes, peer, site] if (
            number in channels
        ):
            ranks = channels[number].ranks
            is_rooted = not channels[number].operation and 0 <= peer < len(ranks)
            return Collective(
                *(channels[number], sequence, operation, issued / _NS, done_at, tuple(shape)),
                *(dtype, nbytes, ranks[peer] if is_rooted else -1),
                tuple(site) if site else None,
                state,
            )
        case _:
            return None


def _list(text: bytes) -> list[Any]:
    """Return the list in TEXT; nothing if it is none, as in a line that is being written."""
    try:
        entry = json.loads(text)
    except ValueError:
        return []
    return entry if isinstance(entry, list) else []
