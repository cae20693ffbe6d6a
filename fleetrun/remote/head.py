"""The head of a job by ssh: runs `fleetrun --ips=...` on each host, and shows what they print.

The launchers' own session decides how the job starts and ends.
"""

from __future__ import annotations

import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType

from fleetrun.errors import EnvironmentFault, MissingProgram, NotExecutable, UsageError
from fleetrun.host.probe import current_folder
from fleetrun.model import Request
from fleetrun.plan.hostfile import HostEntry
from fleetrun.remote import logs, ssh, sshjob
from fleetrun.remote.detachedrun import HeadRun
from fleetrun.remote.ssh import HostOrder, SshConnection
from fleetrun.run import background
from fleetrun.run.descriptors import FileLimit
from fleetrun.rundir.folder import write_all
from fleetrun.rundir.names import listed
from fleetrun.rundir.variables import with_token
from fleetrun.text import visible

_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# How long a host may take to answer, once the first ones have been connected to.
_ANSWER_S = 60.0
# How often the hosts are named that have not answered yet.
_PROGRESS_S = 10.0
# The exit codes of a launcher's own fault; the others only know that it is gone.
_OWN_FAULTS = tuple(
    fault.exit_code for fault in (UsageError, EnvironmentFault, NotExecutable, MissingProgram)
)
# How long the other hosts may take, beyond --grace, once one has ended the job.
_TIMEOUT_S = 30.0
# How long an ssh may take to end once it has been hung up; beyond --grace, if a launcher runs.
_CLOSING_S = 10.0
# How many parts of output wait for a reader, and how long the last ones do at the end.
_MOST_PARTS, _DRAIN_S = 64, 2.0


def launch(request: Request, environ: Mapping[str, str]) -> int:
    """Run the job of REQUEST on the hosts that it lists, and return its exit code."""
    hosts = sshjob.listed(request)
    words = ssh.words_of(request)
    order = HostOrder(
        current_folder(),
        # The token, which nobody has to set; ssh forwards it unseen.
        sshjob.forwarded(with_token(environ)),
        log_dir=request.log_dir,
    )
    records = None
    if request.detach:
        begun = background.begin(request.log_dir)
        if isinstance(begun, int):
            return begun
        records = HeadRun(begun, request)
    addresses = ssh.addresses(words, hosts)
    orders = [
        order._replace(
            words=sshjob.arguments(request, host, addresses, index),
            logs=request.gather_logs or "" if not index else "",
        )
        for index, host in enumerate(hosts)
    ]
    files = FileLimit(len(hosts), per_process=ssh.FILES, label="hosts by ssh")
    head = Head(request, hosts, words, orders, records)
    try:
        code = head.run()
    finally:
        files.restore()
    if request.gather_logs and head.logs:
        first = order._replace(run=head.logs, logs=request.gather_logs)
        argv = ssh.command(words, hosts[0])
        head.log(logs.fetch(argv, ssh.line(first), head.logs, request.log_dir))
        head.drain()
    return code


class OutputThread:
    """Stream FD of the head, written by a thread, so that a stuck reader holds nothing up."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._parts: queue.Queue[bytes] = queue.Queue(_MOST_PARTS)
        # If it was closed at the start, its number may now belong to any other file.
        self._is_open = (sys.__stdout__ if fd == 1 else sys.__stderr__) is not None
        threading.Thread(target=self._write, daemon=True).start()

    def put(self, part: bytes, *, may_wait: bool = True) -> None:
        """Write PART; if too much is unread, wait, or drop PART unless that MAY_WAIT."""
        with suppress(queue.Full):
            self._parts.put(part, block=may_wait)

    def _write(self) -> None:
        while True:
            part = self._parts.get()
            try:
                if self._is_open:
                    write_all(self._fd, part)
            except BrokenPipeError:
                self._is_open = False
            except OSError:
                # The disk is full, and there is nowhere else to report it.
                pass
            self._parts.task_done()

    def drain(self) -> None:
        """Wait briefly until all is written."""
        waiter = threading.Thread(target=self._parts.join, daemon=True)
        waiter.start()
        waiter.join(_DRAIN_S)


class Head:
    """The loop over the connections to HOSTS by WORDS, whose launchers get ORDERS."""

    def __init__(
        self,
        request: Request,
        hosts: Sequence[HostEntry],
        words: Sequence[str],
        orders: Sequence[HostOrder],
        records: HeadRun | None = None,
        *,
        closing_s: float = _CLOSING_S,
        progress_s: float = _PROGRESS_S,
    ) -> None:
        self._request = request
        self._records = records
        self._closing_s, self._progress_s = closing_s, progress_s
        self._events: queue.SimpleQueue[SshConnection | int] = queue.SimpleQueue()
        self._outlets = {fd: OutputThread(fd) for fd in (1, 2)}
        places = threading.Semaphore(request.ssh_fanout)
        self.connections = [
            SshConnection(
                host, words, ssh.line(order), show=self._show, events=self._events, places=places
            )
            for host, order in zip(hosts, orders, strict=True)
        ]
        # Those that take part; an elastic job starts without hosts that do not answer.
        self._remotes = list(self.connections)
        self._least = sshjob.least(request, len(hosts))
        # What is due when, by name.
        self._due: dict[object, tuple[float, Callable[[], None]]] = {}
        # The exit code of the job, once it is known, and whether a launcher has given it.
        self._code: int | None = None
        self._is_of_launcher = False
        self._is_refused = False
        self._has_begun = False
        self._signum: int | None = None
        # Where the first host's logs are, if they are wanted.
        self.logs = ""

    def run(self) -> int:
        """Run until all have ended, and return the exit code; signals are caught meanwhile."""

        def caught(number: int, _frame: FrameType | None) -> None:
            self._events.put(number)

        previous = {number: signal.signal(number, caught) for number in _CAUGHT}
        try:
            self._after("progress", self._progress_s, self._tell)
            self._after("answers", _ANSWER_S, self._give_up_silent)
            self._after("heartbeat", ssh.HEARTBEAT_S, self._beat)
            for connection in self.connections:
                connection.start()
            while any(connection.code is None for connection in self.connections):
                self._turn()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        self.logs = self.connections[0].note
        code = self._code or 0
        if self._records is not None:
            is_of_signal = self._signum is not None and code == 128 + self._signum
            self._records.end(code, self._signum if is_of_signal else None)
        self.drain()
        return code

    def drain(self) -> None:
        """Wait briefly for readers to take the last lines."""
        for outlet in self._outlets.values():
            outlet.drain()

    def _turn(self) -> None:
        """Handle an event, or what is due."""
        next_at = min((at for at, _ in self._due.values()), default=float("inf"))
        event: SshConnection | int | None = None
        with suppress(queue.Empty):
            event = self._events.get(timeout=max(0.0, next_at - time.monotonic()))
        if isinstance(event, int):
            self._interrupted(event)
        elif event is not None:
            if event.code is not None:
                self._due.pop(event, None)
                # Before the beginning, a launcher ends only with a fault of its own.
                is_own = event.is_up and not event.is_lost
                if event in self._remotes and (self._has_begun or is_own):
                    self._ended(event)
            self._begin_if_all_answered()
        for name, (at, call) in list(self._due.items()):
            if at <= time.monotonic():
                del self._due[name]
                call()

    def _after(self, name: object, seconds: float, call: Callable[[], None]) -> None:
        self._due[name] = time.monotonic() + seconds, call

    def _beat(self) -> None:
        for connection in self.connections:
            connection.send(b"\n")
        self._after("heartbeat", ssh.HEARTBEAT_S, self._beat)

    # Output -------------------------------------------------------------------------------------

    def log(self, text: str) -> None:
        """Print a line of the head's own."""
        self._outlets[2].put(f"fleetrun: {visible(text)}\n".encode(), may_wait=False)

    def _log_now(self, text: str) -> None:
        """Print a line before the process in front ends."""
        self.log(text)
        self.drain()

    def _show(self, connection: SshConnection, fd: int, part: bytes) -> None:
        """Print PART of the output of CONNECTION, in one of its threads."""
        if self._is_refused:
            return
        if fd == 2:
            end = b"" if part.endswith(b"\n") else b"\n"
            self._outlets[2].put(b"[%b] %b%b" % (connection.host.name.encode(), part, end))
        elif connection is self.connections[0] or self._request.tee:
            # The other hosts' first ranks print the same as the first host's.
            self._outlets[1].put(part)

    # Beginning ----------------------------------------------------------------------------------

    def _awaited(self) -> list[SshConnection]:
        """Return the connections that may still answer."""
        return [remote for remote in self._remotes if not remote.is_up and remote.code is None]

    def _tell(self) -> None:
        """Name the hosts that have not answered yet, until all have."""
        if not self._has_begun and self._code is None:
            names = listed([remote.host.name for remote in self._awaited()])
            self.log(f"Waiting for {names} to answer by ssh, {_ANSWER_S:g} s at most.")
            self._after("progress", self._progress_s, self._tell)

    def _give_up_silent(self) -> None:
        for remote in self._awaited():
            remote.give_up(f"it did not answer within {_ANSWER_S:g} s.")

    def _begin_if_all_answered(self) -> None:
        """Once each host has answered or failed, go on if enough have answered, or end."""
        if self._has_begun or self._code is not None or self._awaited():
            return
        remaining = [remote for remote in self._remotes if remote.is_up and not remote.is_lost]
        lost = [remote for remote in self._remotes if remote not in remaining]
        faults = [(remote.host.name, remote.why()) for remote in lost]
        width = max((len(name) for name, _ in faults), default=0)
        # The first host has the session, so it is indispensable.
        if faults and (self.connections[0] not in remaining or len(remaining) < self._least):
            self._code, self._is_refused = EnvironmentFault.exit_code, True
            faults.append(("", ""))
        for name, sentence in faults:
            self.log(f"{name:{width}}  {sentence}" if name else "Nothing was started.")
        if self._is_refused:
            self._hang_up()
            return
        if faults:
            names = listed([name for name, _ in faults])
            self.log(f"The job starts without {names}: {self._least} of its hosts are enough.")
        self._remotes, self._has_begun = remaining, True
        if self._records is not None:
            self._records.begin(self._log_now)

    # The end ------------------------------------------------------------------------------------

    @property
    def _is_elastic(self) -> bool:
        return self._least < len(self._remotes)

    def _ended(self, remote: SshConnection) -> None:
        """Handle the end of a launcher; the first bad end is that of the job.

        That of the first host's launcher, which has the session, takes precedence: the others may
        have been cut off from it.
        """
        is_first = remote is self.connections[0]
        if self._is_elastic and not is_first:
            # The launchers agree on whether the job goes on without it, and the first one reports
            # it.
            if remote.is_lost and self._code is None:
                self.log(f"The connection to {remote.host.name} was lost: {remote.why()}")
        elif remote.code and self._code is None:
            self._code, self._is_of_launcher = remote.code, not remote.is_lost
            if remote.status < 0:
                self.log(f"The connection to {remote.host.name} was lost: {remote.why()}")
            elif remote.is_lost:
                # A rank may also have ended with it: sys.exit(-1).
                self.log(
                    f"ssh to {remote.host.name} ended with 255: the connection was lost, or that "
                    "is what the job ended with there."
                )
            if remote.code == UsageError.exit_code and not self._request.gather_logs:
                # It has not joined the others, which would wait for it.
                self._hang_up()
            else:
                # The launchers notify each other, and stop their ranks with grace.
                self._hang_up_later()
        elif self._is_elastic and not remote.code:
            # The job is done; a host that was cut off from the first one may not know.
            self._hang_up_later()
        elif remote.code and is_first and self._is_of_launcher and remote.status >= 0:
            self._code = self._code if self._code in _OWN_FAULTS else remote.code

    def _interrupted(self, number: int) -> None:
        """Forward a signal: the first one stops the job, the second one kills it."""
        if self._code is None:
            self._code, self._is_of_launcher = 128 + number, False
        for remote in self._awaited():
            remote.give_up("interrupted")
        for remote in self._remotes:
            remote.send(ssh.STOP)
        if self._signum is None:
            self._signum = number
            self._hang_up_later()

    def _hang_up_later(self) -> None:
        self._after("timeout", self._request.grace_s + _TIMEOUT_S, self._hang_up)

    def _hang_up(self) -> None:
        """Close every connection; kill those that are still open after a while."""
        # What ends from here on ends because of this.
        self._is_of_launcher = False
        grace_s = self._request.grace_s if self._has_begun else 0.0
        for connection in self.connections:
            if not connection.is_up:
                connection.give_up("the job has ended")
            elif connection.code is None:
                connection.hang_up()
                self._after(connection, grace_s + self._closing_s, partial(self._cut, connection))

    def _cut(self, connection: SshConnection) -> None:
        self.log(f"ssh to {connection.host.name} does not exit, so it is killed.")
        connection.give_up("its ssh did not end")
