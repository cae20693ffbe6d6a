"""`events.jsonl` in the run directory: what happened, one JSON object a line.

Schema 1. Every line has `schema`, `time` (wall clock, seconds since 1970), `monotonic` (seconds of
this host's steady clock; use it for differences) and `event`. Lines about a process have
`process` (its name), `rank` (null: none) and `attempt` (from 0). The `event`s, in the order in
which they usually come, and what else their lines have:

- `launched`: `job_id`, `mode`, `engine`, `generation`, `node_rank`, `processes` (how many are
  started here), `launcher_pid`. Always the first.
- `ready`: what a `process` of an `attempt` waited for before its start is there.
- `started`: `pid`, `log`, the file of the run directory that it writes to, and `error_log`, that of
  standard error (null: the same).
- `noticed`: `what` (stopped, continued, straggler, stacks, went on, ended, task lost), `who`
  (labels), `text`.
- `stacks wanted`: somebody sent SIGQUIT.
- `hung`: `seconds` of silence, the `odd` ones (labels), `places` (`who` stands `where`), `stacks`
  (the files), the `deadlocked` forked children (`child_of`, `pid`, `where`), and who does not reach
  which endpoint (`unreached`, sentences).
- `judged`: what became of the strategy, once the ranks' evidence tells: `verdicts` (each with `who`
  (labels), `name`, `asked`, `in_effect`, `status` (effective, no_effect, refused, script, no_word)
  and `why`), `silent` (labels without evidence), `ranks_equal` (null: not compared). It comes again
  when the evidence has changed.
- `refuted`: --strategy_strict ends the job; `faults` are sentences.
- `source failed`: the `source` of such lines can tell nothing any more, and `why`; one that
  `is_required` ends the job.
- `peer failed`: the job failed on another `host`: `what` happened, the culprit's `exit_code`, and
  whether that host is not going to start `attempt` again (`is_final`).
- `peers done`: the trainers of all other hosts are done with `attempt`.
- `stopped`: nothing of `attempt` runs here any more, and the other hosts are told so.
- `arbitrated`: all hosts have stopped: the failure that came first was on `host` (null: this one),
  `what` and `exit_code` say what it was (null: as here), `is_final` whether there is no other
  attempt, and `given_up` why (null: nothing to say).
- `cut off`: no word of the other hosts for so long that what runs here is killed.
- `exited`: `pid`, `code` (null: killed), `signal` (its name; null: none), `fault` (why it could not
  be started; null: it was), `peak_bytes` (the most memory it ever held; null: unknown).
- `examined`: all that failed have ended. The line is about the culprit (`process`), which failed
  first: `code` and `signal` as above, `failed_at` (monotonic, the moment of its exception, if it
  raised one, else of its end), and `failed`, the processes (names) that had failed before anybody
  was asked to end. The culprit is not always the first that `exited`.
- `interrupted`: the launcher got `signal`.
- `signalled`: every process that was alive was sent `signal`, but those (names) that were `spared`:
  they have raised an exception and end by themselves, or are sent it a little later.
- `elapsed`: a time that was set has passed, such as --grace.
- `restarting`: all are dead, and `attempt` begins.
- `gather failed`: `attempt` could not be planned, and `why`.
- `finished`: `exit_code`, `verdict` (a sentence), `attempts`, `given_up` (why there were no more;
  null: nothing to say), `stuck` (processes that even SIGKILL did not end). Always the last, unless
  the launcher was killed.

`schema` goes up when a key changes its meaning or goes away; keys and events may be added, so skip
what you do not know. Each line is written at once, so that the file is valid up to its last line
even if the launcher is killed; a last line without an end is none.
"""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from fleetrun.records import reading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import TypeAlias

    Value: TypeAlias = str | int | float | Sequence["Value"] | Mapping[str, "Value"] | None

SCHEMA = 1


class EventRecord(NamedTuple):
    """One line; `more` has what only this kind of event has, as it is in the file."""

    event: str
    # Wall clock, and this host's steady one, in seconds.
    time: float
    monotonic: float
    # Of a line about a process: its name, its rank, and the attempt, counted from 0.
    process: str
    rank: int | None
    attempt: int
    more: Mapping[str, Any]


class FieldVerdict(NamedTuple):
    """What became of a field of the strategy in the ranks `who`, by a line `judged`."""

    who: tuple[str, ...]
    name: str
    asked: str
    in_effect: str
    status: str
    why: str


def append(
    fd: int, event: str, at: float, more: Mapping[str, Value], hide: Callable[[str], str] = str
) -> None:
    """Append the line of EVENT, which was at the monotonic time AT, to the file FD."""
    import json  # the start is over when this runs

    from fleetrun.plan import secrets

    wall = time.time() - (time.monotonic() - at)
    record = {
        "schema": SCHEMA,
        "time": round(wall, 6),
        "monotonic": round(at, 6),
        "event": event,
        **more,
    }
    line = json.dumps(secrets.everywhere(record, hide)).encode() + b"\n"
    if (written := os.write(fd, line)) < len(line):
        # A full disk took half a line; half a line is none.
        os.ftruncate(fd, os.fstat(fd).st_size - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read(path: str) -> Iterator[EventRecord]:
    """Yield the lines of the file PATH that can be read, in their order."""
    for found in reading.lines(path):
        if found.get("schema") != SCHEMA:
            continue
        more = {key: value for key, value in found.items() if key not in _COMMON}
        yield EventRecord(
            event=reading.text(found.get("event")),
            time=reading.real(found.get("time")) or 0.0,
            monotonic=reading.real(found.get("monotonic")) or 0.0,
            process=reading.text(found.get("process")),
            rank=reading.whole(found.get("rank")),
            attempt=reading.whole(found.get("attempt")) or 0,
            more=more,
        )


_COMMON = frozenset(("schema", *EventRecord._fields))


def verdicts(judged: EventRecord) -> tuple[FieldVerdict, ...]:
    """Return what a line `judged` says of the strategy's fields."""
    return tuple(
        FieldVerdict(
            who=reading.texts(one.get("who")),
            name=reading.text(one.get("name")),
            asked=reading.text(one.get("asked")),
            in_effect=reading.text(one.get("in_effect")),
            status=reading.text(one.get("status")),
            why=reading.text(one.get("why")),
        )
        for one in reading.mappings(judged.more.get("verdicts"))
    )
