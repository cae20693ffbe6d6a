"""`--gather_logs`: copies the logs of other hosts' ranks to the coordinator's host at the end.

The coordinator's host requests one part at a time, at a bounded rate; the others answer, and end
when they are dismissed. Answers are untrusted: only bytes that were requested are written.
"""

from __future__ import annotations

import base64
import binascii
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from fleetrun.model import LaunchPlan
from fleetrun.run.loop import Waiting
from fleetrun.rundir import names
from fleetrun.rundir.folder import Closing, Folder, write_all
from fleetrun.session.exchange import LONGEST_PART, Dismissed, LogPart, SendLog

ALL, TAIL = "all", "tail"
# For all hosts together; leaves room on a network that others train over.
_BYTES_PER_S = 32 << 20
_AT_ONCE = 16
# A host that does not answer within this time and --grace is given up.
_TIMEOUT_S = 10.0
_LOOK_S = 0.5


class LogServer:
    """Serves the logs of this host's ranks, in PLAN, once they are complete."""

    def __init__(self, plan: LaunchPlan, send: Callable[[LogPart], None]) -> None:
        self.plan = plan
        self._send = send
        # The attempt of each generation on this host, which has fewer if it joined later.
        self._attempts = {plan.generation: 0}
        self._is_complete = False
        # At most one request is pending: the other side waits for each answer.
        self._asked: SendLog | None = None

    def take(self, plan: LaunchPlan, attempt: int) -> None:
        """Take the PLAN of another generation, which is ATTEMPT on this host."""
        self.plan = plan
        self._attempts[plan.generation] = attempt

    def asked(self, message: SendLog) -> None:
        """Answer MESSAGE, or keep it until the logs are complete."""
        if self._is_complete:
            self._send(self._part(message))
        else:
            self._asked = message

    def complete(self) -> None:
        """Answer the request that came while the logs grew; answer at once from now on."""
        self._is_complete = True
        if self._asked is not None:
            self._send(self._part(self._asked))
            self._asked = None

    def _part(self, request: SendLog) -> LogPart:
        path = self._path(request)
        size, offset, data = 0, 0, b""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with suppress(OSError), Closing(fd := os.open(path, flags)):
            size = os.fstat(fd).st_size
            offset = max(0, size - request.length) if request.offset < 0 else request.offset
            offset = min(offset, size)
            data = os.pread(fd, min(request.length, LONGEST_PART), offset)
        text = base64.b64encode(data).decode("ascii")
        return LogPart(request.process, request.attempt, offset, size, text, request.is_error_log)

    def _path(self, request: SendLog) -> str:
        """Return the path of the requested log; empty if it is not a log of this host."""
        ranks = self.plan.ranks
        attempt = self._attempts.get(request.attempt)
        if not 0 <= request.process < len(ranks) or attempt is None:
            return ""
        rank = ranks[request.process]
        for spec in self.plan.processes:
            if spec.rank == rank:
                paths = names.log_paths(self.plan, spec, attempt)
                return paths[request.is_error_log] if request.is_error_log < len(paths) else ""
        return ""


class _HostLogs:
    """The logs still to be copied from a host, and the position in the current one."""

    def __init__(self, logs: Sequence[tuple[int, int, bool]]) -> None:
        self.queue = deque(logs)
        # The next byte to request; None: the first part has not come.
        self.offset: int | None = None
        self.fd = -1


class LogCollector:
    """Writes the logs of other hosts into the folder `gathered` of FOLDER.

    ASK sends a message to the host of a node rank, which is connected if it IS_THERE; DONE is
    called with a summary when no more is to come. With EVERYTHING, whole logs of all attempts are
    copied, else the ends of the last attempt's.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        folder: Folder,
        *,
        waiting: Waiting,
        ask: Callable[[int, SendLog | Dismissed], None],
        is_there: Callable[[int], bool],
        done: Callable[[str], None],
        everything: bool = False,
    ) -> None:
        self.is_busy = False
        self.plan = plan
        self._folder = folder
        self._waiting = waiting
        self._ask = ask
        self._is_there = is_there
        self._done = done
        self._everything = everything
        self._attempts = range(1)
        self._hosts: dict[int, _HostLogs] = {}
        self._later: deque[int] = deque()
        self._had: list[str] = []
        self._missed: list[str] = []
        self._free_at = 0.0
        self._folder_fd = -1
        self._trouble = ""

    def begin(self, nodes: Sequence[int]) -> None:
        """Begin to copy the logs of the hosts NODES."""
        self.is_busy = True
        last = self.plan.generation
        self._attempts = range(0 if self._everything else last, last + 1)
        shared = self.plan.shared_logs
        at_hand = {self.plan.node_rank, *(() if shared is None else shared.folders)}
        try:
            with suppress(FileExistsError):
                os.mkdir(names.GATHERED, dir_fd=self._folder.fd)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            self._folder_fd = os.open(names.GATHERED, flags, dir_fd=self._folder.fd)
        except OSError as error:
            self._trouble = f" ({error.strerror})"
        for node in nodes:
            if node in at_hand or self._folder_fd < 0:
                self._ask(node, Dismissed())
            else:
                self._later.append(node)
        served = {*at_hand, *nodes}
        self._missed += [
            names.spec_label(spec) for spec in self.plan.ranks if spec.node_rank not in served
        ]
        self._go_on()

    def close(self) -> None:
        """Stop."""
        self.is_busy = False
        for node, host in self._hosts.items():
            self._waiting.timer(("log", node), None, self._go_on)
            _close(host)
        self._hosts.clear()
        if self._folder_fd >= 0:
            os.close(self._folder_fd)
            self._folder_fd = -1

    def _go_on(self) -> None:
        """Begin with further hosts if few are under way; report when all are done."""
        while self._later and len(self._hosts) < _AT_ONCE:
            node = self._later.popleft()
            has_error_logs = any(spec.error_log for spec in self.plan.processes)
            self._hosts[node] = _HostLogs(
                [
                    (process, attempt, is_error_log)
                    for process, spec in enumerate(self.plan.ranks)
                    if spec.node_rank == node
                    for attempt in self._attempts
                    for is_error_log in ((False, True) if has_error_logs else (False,))
                ]
            )
            self._next(node)
        if not self._hosts and not self._later and self.is_busy:
            self.close()
            self._done(self._summary())

    def _next(self, node: int) -> None:
        """Request the next part from NODE, or dismiss it if it has no more."""
        host = self._hosts[node]
        if not host.queue:
            self._leave(node)
            return
        process, attempt, is_error_log = host.queue[0]
        now = time.monotonic()
        pause_s = self._free_at - now
        if pause_s > 0:
            self._waiting.timer(("log", node), now + pause_s, partial(self._next, node))
            return
        if host.offset is None:
            offset = 0 if self._everything else -1
            length = LONGEST_PART if self._everything else names.GATHERED_BYTES
        else:
            offset, length = host.offset, LONGEST_PART
        request = SendLog(process, attempt, offset, length, is_error_log)
        # Its ranks may still be stopping.
        self._await(node, now + _TIMEOUT_S + self.plan.rules.grace_s)
        self._ask(node, request)

    def _await(self, node: int, until: float) -> None:
        """Give up the host NODE at UNTIL, or when its connection is lost."""
        now = time.monotonic()
        if now >= until or not self._is_there(node):
            self._give_up(node)
        else:
            at = min(until, now + _LOOK_S)
            self._waiting.timer(("log", node), at, partial(self._await, node, until))

    def take(self, node: int, part: LogPart) -> None:
        """Take the answer PART of the host NODE."""
        host = self._hosts.get(node)
        named = part.process, part.attempt, part.is_error_log
        if host is None or not host.queue or host.queue[0] != named:
            return
        try:
            data = base64.b64decode(part.data, validate=True)
        except (binascii.Error, ValueError):
            self._give_up(node)
            return
        is_first = host.offset is None
        if len(data) > LONGEST_PART or (not is_first and part.offset != host.offset):
            self._give_up(node)
            return
        try:
            self._write(host, part, data, is_first=is_first)
        except OSError as error:
            self._trouble = f" ({error.strerror})"
            self._give_up(node)
            return
        self._free_at = max(self._free_at, time.monotonic()) + len(data) / _BYTES_PER_S
        host.offset = part.offset + len(data)
        if not data or host.offset >= part.size:
            if host.fd >= 0:
                self._had.append(names.spec_label(self.plan.ranks[part.process]))
            host.queue.popleft()
            _close(host)
        self._next(node)

    def _write(self, host: _HostLogs, part: LogPart, data: bytes, *, is_first: bool) -> None:
        if is_first:
            spec = self.plan.ranks[part.process]
            if not data and (part.is_error_log or part.attempt != self._attempts[-1]):
                # It did not run then, or has one file.
                return
            log = names.shared_log(spec)
            log = names.error_log(log) if part.is_error_log else log
            name = names.log_name(log, part.attempt)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            host.fd = os.open(name, flags, 0o666, dir_fd=self._folder_fd)
            if part.offset:
                write_all(host.fd, names.shortened(part.size, part.size - part.offset))
        write_all(host.fd, data)

    def _give_up(self, node: int) -> None:
        """Leave out the remaining logs of NODE."""
        host = self._hosts[node]
        ranks = dict.fromkeys(process for process, *_ in host.queue)
        self._missed += [names.spec_label(self.plan.ranks[process]) for process in ranks]
        self._leave(node)

    def _leave(self, node: int) -> None:
        _close(self._hosts.pop(node))
        self._waiting.timer(("log", node), None, self._go_on)
        self._ask(node, Dismissed())
        self._go_on()

    def _summary(self) -> str:
        summary = ""
        if self._had:
            where = os.path.join(self._folder.path, names.GATHERED)
            summary = f"The logs of {names.listed(list(dict.fromkeys(self._had)))} are in {where}."
        if self._missed:
            missed = names.listed(list(dict.fromkeys(self._missed)))
            summary += f" Those of {missed} could not be gathered{self._trouble}."
        return summary.strip()


def _close(host: _HostLogs) -> None:
    if host.fd >= 0:
        os.close(host.fd)
    host.fd, host.offset = -1, None
