"""`--gather_logs`: at the end, each host sends the logs of its ranks to the coordinator's host.

It sends one part at a time, and the next one when the coordinator's host has written that. What
arrives is untrusted: it may only append to new files of the sender's ranks.
"""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from fleetrun.model import LaunchPlan
from fleetrun.run.loop import Waiting
from fleetrun.rundir import names, reading
from fleetrun.rundir.folder import Closing, Folder, write_all
from fleetrun.session.driver import Session
from fleetrun.session.exchange import LONGEST_PART, Dismissed, LogPart, LogsSent, LogTaken

# Whole logs, not only their ends.
ALL = "all"
# A host that sends nothing within this time and --grace is given up.
_TIMEOUT_S = 10.0
_LOOK_S = 0.5


class LogSender:
    """Sends the logs of this host's ranks through SESSION, with EVERYTHING whole ones."""

    def __init__(self, session: Session, *, everything: bool) -> None:
        self._session, self._everything = session, everything
        self._plan: LaunchPlan
        # The attempt of each generation on this host, which may have joined later.
        self._attempts: dict[int, int] = {}
        self._parts: Iterator[LogPart] = iter(())
        session.hearers[LogTaken] = lambda *_: self._send()

    def take(self, plan: LaunchPlan, attempt: int) -> None:
        """Take the PLAN of a generation, which is ATTEMPT on this host."""
        self._plan, self._attempts[plan.generation] = plan, attempt

    def begin(self) -> None:
        """Send the first part; the logs are complete."""
        self._parts = self._read()
        self._send()

    def _send(self) -> None:
        self._session.to_coordinator(next(self._parts, LogsSent()))

    def _read(self) -> Iterator[LogPart]:
        plan, attempts = self._plan, list(self._attempts.items())
        for spec in plan.processes:
            if spec.rank is None:
                continue
            place = plan.ranks.index(spec.rank)
            for generation, attempt in attempts if self._everything else attempts[-1:]:
                for is_error_log, path in enumerate(names.log_paths(plan, spec, attempt)):
                    with suppress(OSError), Closing(fd := os.open(path, reading.READING)):
                        size = os.fstat(fd).st_size
                        begin = 0 if self._everything else max(0, size - names.GATHERED_BYTES)
                        for offset in range(begin, size or 1, LONGEST_PART):
                            data = os.pread(fd, min(LONGEST_PART, size - offset), offset)
                            text = base64.b64encode(data).decode("ascii")
                            yield LogPart(place, generation, offset, size, text, bool(is_error_log))


class LogReceiver:
    """Writes the logs of other hosts' ranks into the folder `gathered` of FOLDER.

    When the job has ended, it waits for those that are connected to SESSION; LOG gets a summary.
    """

    def __init__(
        self,
        session: Session,
        folder: Folder,
        waiting: Waiting,
        *,
        log: Callable[[str], None],
        everything: bool,
    ) -> None:
        self._session, self._folder, self._waiting = session, folder, waiting
        self._log, self._everything = log, everything
        self._plan: LaunchPlan
        # The hosts that are awaited, each until a moment, and those that send no more.
        self._awaited: dict[int, float] = {}
        self._done: set[int] = set()
        self._had: dict[str, None] = {}
        # The next byte of each log: a new part begins there.
        self._offsets: dict[tuple[int, int, bool], int] = {}
        self._trouble = ""
        self.is_busy = False
        session.hearers[LogPart] = self._take
        session.hearers[LogsSent] = lambda node, _: self._leave(node)

    def take(self, plan: LaunchPlan, _: int) -> None:
        """Take the PLAN of a generation."""
        self._plan = plan

    def begin(self) -> None:
        """Wait for all hosts that are connected and do not share the log folder."""
        self.is_busy = True
        until = time.monotonic() + _TIMEOUT_S + self._plan.rules.grace_s
        awaited = set(self._session.connected()) - self._near() - self._done
        self._awaited = dict.fromkeys(awaited, until)
        self._look()

    def _near(self) -> set[int]:
        """Return the hosts whose logs are here already."""
        shared = self._plan.shared_logs
        return {self._plan.node_rank, *(() if shared is None else shared.folders)}

    def close(self) -> None:
        """Stop."""
        self.is_busy = False
        self._waiting.timer("logs", None, self._look)

    def _look(self) -> None:
        """Dismiss the hosts that are not awaited, and report when no more is to come."""
        now, connected = time.monotonic(), self._session.connected()
        self._awaited = {
            node: until
            for node, until in self._awaited.items()
            if until > now and node in connected
        }
        for node in set(connected) - self._awaited.keys():
            self._session.to_member(node, Dismissed())
        if not self._awaited and self.is_busy:
            self.is_busy = False
            self._log(self._summary())
        # Hosts may connect even now, and wait for their dismissal.
        self._waiting.timer("logs", now + _LOOK_S, self._look)

    def _leave(self, node: int) -> None:
        self._done.add(node)
        self._awaited.pop(node, None)
        if self.is_busy:
            self._look()

    def _take(self, node: int, part: LogPart) -> None:
        """Write the next PART of a log of the host NODE, and ask for more."""
        try:
            self._write(node, part)
        except (OSError, ValueError) as error:
            self._trouble = f" ({error.strerror})" if isinstance(error, OSError) else ""
            self._leave(node)
            return
        if node in self._awaited:
            self._awaited[node] = time.monotonic() + _TIMEOUT_S
        self._session.to_member(node, LogTaken())

    def _write(self, node: int, part: LogPart) -> None:
        """Write PART; raise ValueError if it is none that the host NODE may send."""
        ranks, generation = self._plan.ranks, self._plan.generation
        first = 0 if self._everything else generation
        if not (0 <= part.process < len(ranks) and first <= part.attempt <= generation):
            raise ValueError(part.process)
        spec = ranks[part.process]
        data = base64.b64decode(part.data, validate=True)
        key = part.process, part.attempt, part.is_error_log
        begin = 0 if self._everything else max(0, part.size - names.GATHERED_BYTES)
        is_next = part.offset == self._offsets.get(key, begin)
        is_within = part.offset + len(data) <= part.size and len(data) <= LONGEST_PART
        if spec.node_rank != node or not is_next or not is_within:
            raise ValueError(part.offset)
        log = names.shared_log(spec)
        name = names.log_name(names.error_log(log) if part.is_error_log else log, part.attempt)
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        flags |= os.O_APPEND if key in self._offsets else os.O_EXCL
        folder = os.path.join(self._folder.path, names.GATHERED)
        os.makedirs(folder, exist_ok=True)
        with Closing(fd := os.open(os.path.join(folder, name), flags, 0o666)):
            if part.offset and key not in self._offsets:
                write_all(fd, names.shortened(part.size, part.size - part.offset))
            write_all(fd, data)
        self._offsets[key] = part.offset + len(data)
        if self._offsets[key] >= part.size:
            self._had[names.spec_label(spec)] = None

    def _summary(self) -> str:
        near = self._near()
        others = [spec for spec in self._plan.ranks if spec.node_rank not in near]
        missed = [label for label in map(names.spec_label, others) if label not in self._had]
        summary = ""
        if self._had:
            where = os.path.join(self._folder.path, names.GATHERED)
            summary = f"The logs of {names.listed(list(self._had))} are in {where}."
        if missed:
            summary += f" Those of {names.listed(missed)} could not be gathered{self._trouble}."
        return summary.strip()
