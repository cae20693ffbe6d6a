"""Reading `collectives.RANK`, the ring in which a rank records its collectives.

`inject/flight_recorder.py` writes it while the rank runs, so the last of it may be half-written:
what makes no sense is left out.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from fleetrun.records import names, reading

MAGIC = b"FLTRING2"
HEADER = struct.Struct("<8s8IQ")
# The last sequence numbers of the first channels.
_HEADS = struct.Struct("<512Q")
HEADER_BYTES = 64
SLOT = struct.Struct("<QQQQqIHHBBHi6II")
PARTS, WORD = struct.Struct("<QI"), struct.Struct("<I")
PARTS_BYTES = 32 * 1024
# The end of the table.
FORKED_BYTES = 1024
FAILED, ENDED = 1, 2
BLOCKING, ASYNCHRONOUS, RAISED = 0, 1, 2
IN_STREAM = 4
# Operations, beside send and recv, that have channels of their own; the last begins the names of a
# rank's waits for keys of a store.
BACKWARD, NEW_GROUP, STORE = "backward", "new_group", "store"
# The largest size of a ring.
MOST_BYTES = 4 << 20
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

    @property
    def is_store(self) -> bool:
        """Whether a rank waits there alone, for what another one writes to a store."""
        return self.operation.startswith(f"{STORE}.")


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
    # How many elements an all_to_all sends to each rank of its group, then how many it receives
    # from each; empty: not known.
    parts: tuple[int, ...] = ()
    # Whether it runs in the stream of computation, after all that runs there: it may not be done,
    # whatever is recorded.
    is_in_stream: bool = False

    @property
    def is_open(self) -> bool:
        """Whether it has neither finished nor raised, as far as is known."""
        return self.done_at is None and self.state != RAISED

    @property
    def number(self) -> int:
        """Its number among those like it, from 1; of a new group, that of the call of new_group."""
        # A new group is the only one of its channel.
        is_group = self.channel.operation == NEW_GROUP
        return self.channel.number if is_group else self.sequence

    @property
    def tensor(self) -> str:
        """The dtype and shape: `float32 [4, 2]`."""
        return f"{self.dtype} {list(self.shape)}" if self.dtype else ""


class ForkedCall(NamedTuple):
    """A collective that a process which a rank has forked called on a group of the rank."""

    pid: int
    operation: str
    site: tuple[str, int, str] | None = None


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
    # The first call of a process that it has forked.
    forked: ForkedCall | None = None


def read(path: str, restart: int) -> FlightRecord | None:
    """Return the record of attempt RESTART in the file PATH, if any."""
    record = parse(reading.content(path, MOST_BYTES) if path else None)
    return record if record is not None and record.restart == restart else None


def of_folder(run_dir: str, restart: int) -> dict[int, FlightRecord]:
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
    heads = reading.piece(path, HEADER_BYTES, _HEADS.size) if path else b""
    return sum(_HEADS.unpack(heads)) if len(heads) == _HEADS.size else 0


def parse(ring: bytes | None) -> FlightRecord | None:
    """Return the record in RING; None if it is not a ring."""
    if ring is None or len(ring) < HEADER_BYTES:
        return None
    magic, slots, channels, table_bytes, used, state, pid, restart, rank, settled = (
        HEADER.unpack_from(ring)
    )
    table_at = HEADER_BYTES + 8 * channels
    slots_at = table_at + table_bytes
    parts_at = slots_at + slots * SLOT.size
    if magic != MAGIC or len(ring) < parts_at + PARTS_BYTES or not slots:
        return None
    names = _Names(ring[table_at : table_at + min(used, table_bytes)], rank, ring[parts_at:])
    heads = struct.unpack_from(f"<{channels}Q", ring, HEADER_BYTES)
    last = {channel: heads[n] for n, channel in names.channels.items() if n < channels and heads[n]}
    slots_in_order = sorted(
        fields
        for place, fields in enumerate(SLOT.iter_unpack(ring[slots_at:][: slots * SLOT.size]))
        if fields[0] and fields[0] % slots == place
    )
    return FlightRecord(
        rank=rank,
        pid=pid,
        restart=restart,
        collectives=_in_order(list(names.collectives(slots_in_order))),
        last=last,
        has_failed=state == FAILED,
        has_ended=state == ENDED,
        settled_at=settled / _NS,
        unrecorded=names.all_of("unrecorded"),
        forked=_forked(ring[max(table_at, slots_at - FORKED_BYTES) : slots_at]),
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


class _Names:
    """The names behind the numbers in a ring."""

    def __init__(self, table: bytes, rank: int, parts: bytes) -> None:
        self._parts = parts
        self._names: dict[tuple[str, int], Any] = {}
        groups: dict[int, tuple[tuple[int, ...], int]] = {}
        self.channels: dict[int, CollectiveChannel] = {}
        # A line that is being written has no end.
        for line in table.split(b"\n")[:-1]:
            entry = reading.parse(b'{"is": %s}' % line)
            match reading.items((entry or {}).get("is")):
                case ["group", int(number), [list(runs), int(made), _]]:
                    groups[number] = _ranks(runs), made
                case ["channel", int(number), [int(group), str(operation), int(peer)]]:
                    ranks, made = groups.get(group, ((), 0))
                    channel = CollectiveChannel(ranks, made)
                    if operation == NEW_GROUP:
                        channel = CollectiveChannel(ranks, peer, operation)
                    elif operation and peer < 0:
                        channel = CollectiveChannel(ranks, made, operation)
                    elif operation and peer < len(ranks):
                        pair = (rank, ranks[peer])
                        source, target = pair if operation == "send" else pair[::-1]
                        channel = CollectiveChannel(ranks, made, operation, source, target)
                    self.channels[number] = channel
                case [str(kind), int(number), value]:
                    self._names[kind, number] = value
                case _:
                    continue

    def all_of(self, kind: str) -> tuple[str, ...]:
        """Return all names of KIND, in order."""
        named = (name for (other, _), name in self._names.items() if other == kind)
        return tuple(name for name in named if isinstance(name, str))

    def collectives(self, slots: list[tuple[int, ...]]) -> Iterator[Collective]:
        """Yield the collectives in SLOTS."""
        for slot in slots:
            slot_number, sequence, issued, done, nbytes, site, channel, operation, *remaining = slot
            dtype, dimensions, state, peer, *shape, place = remaining
            known = self.channels.get(channel)
            name = self._names.get(("operation", operation))
            if known is None or not isinstance(name, str):
                continue
            is_rooted = not known.operation and 0 <= peer < len(known.ranks)
            yield Collective(
                channel=known,
                sequence=sequence,
                operation=name,
                issued_at=issued / _NS,
                done_at=done / _NS if done else None,
                shape=tuple(shape[:dimensions]),
                dtype=reading.text(self._names.get(("dtype", dtype))),
                nbytes=nbytes,
                root=known.ranks[peer] if is_rooted else -1,
                site=_site(self._names.get(("site", site))),
                state=state & ~IN_STREAM,
                is_in_stream=bool(state & IN_STREAM),
                parts=self._parts_of(slot_number, place - 1, len(known.ranks)) if place else (),
            )

    def _parts_of(self, slot_number: int, place: int, ranks: int) -> tuple[int, ...]:
        """Return the parts at PLACE; nothing if they have been overwritten."""
        size = 2 * ranks * WORD.size
        if place + PARTS.size + size > PARTS_BYTES:
            return ()
        if PARTS.unpack_from(self._parts, place) != (slot_number, ranks):
            return ()
        return struct.unpack_from(f"<{2 * ranks}I", self._parts, place + PARTS.size)


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


def _forked(line: bytes) -> ForkedCall | None:
    entry = reading.parse(b'{"is": %s}' % line.partition(b"\n")[0])
    match reading.items((entry or {}).get("is")):
        case [int(pid), str(operation), site]:
            return ForkedCall(pid, operation, _site(site))
        case _:
            return None


def _site(value: object) -> tuple[str, int, str] | None:
    match value:
        case [str(file), int(line), str(function)]:
            return file, line, function
        case _:
            return None
