"""The head of a job by ssh: runs `fleetrun --ips=...` on each host, and shows what they print.

The launchers' own session decides how the job starts and ends.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from fleetrun.errors import EnvironmentFault
from fleetrun.host.probe import current_folder
from fleetrun.model import Request
from fleetrun.plan.hostfile import HostEntry
from fleetrun.remote import logs, ssh, sshjob
from fleetrun.remote.detachedrun import HeadRun
from fleetrun.remote.ssh import HostOrder, SshConnection
from fleetrun.run import background
from fleetrun.run.descriptors import FileLimit
from fleetrun.run.loop import Loop
from fleetrun.rundir.names import listed
from fleetrun.rundir.variables import with_token
from fleetrun.sinks.writer import Writer
from fleetrun.text import visible

_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# How long a host may take to answer, once the first ones have been connected to.
_ANSWER_S = 60.0
# How often the hosts are named that have not answered yet.
_PROGRESS_S = 10.0
# How long the other hosts may take, beyond --grace, once one has ended the job.
_TIMEOUT_S = 30.0
# How long an ssh may take to end once it has been hung up; beyond --grace, if a launcher runs.
_CLOSING_S = 10.0
# The most messages that wait for a reader of standard error, and how long the last output does.
_MOST_LINES, _DRAIN_S = 4096, 2.0


def launch(request: Request, environ: Mapping[str, str]) -> int:
    """Run the job of REQUEST on the hosts that it lists, and return its exit code."""
    hosts = sshjob.listed(request)
    words = ssh.words_of(request)
    # The token, which nobody has to set; ssh forwards it unseen.
    forwarded = sshjob.forwarded(with_token(environ))
    order = HostOrder(current_folder(), forwarded, log_dir=request.log_dir)
    records = None
    if request.detach:
        begun = background.begin(request.log_dir)
        if isinstance(begun, int):
            return begun
        records = HeadRun(begun, request)
    addresses = ssh.addresses(words, hosts)
    orders = [
        order._replace(words=sshjob.arguments(request, host, addresses, index))
        for index, host in enumerate(hosts)
    ]
    files = FileLimit(len(hosts), per_process=ssh.FILES, label="hosts by ssh")
    head = Head(request, hosts, words, orders, records)
    try:
        code = head.run()
        pid = head.connections[0].pid
        if request.gather_logs and pid is not None and head.has_begun:
            argv = ssh.command(words, hosts[0])
            head.log(logs.fetch(argv, ssh.line(order._replace(pid=pid)), request.log_dir))
        head.drain()
        return code
    finally:
        files.restore()


class Head:
    """The connections to HOSTS by WORDS, whose launchers get ORDERS."""

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
        self._loop = Loop()
        self._out, self._err = Writer(1), Writer(2, _MOST_LINES)
        self.connections = [
            SshConnection(
                self._loop,
                host,
                ssh.command(words, host),
                order,
                output=self._show,
                changed=self._changed,
            )
            for host, order in zip(hosts, orders, strict=True)
        ]
        # Those that wait for a place (--ssh_fanout), and those that take part: an elastic job
        # starts without hosts that do not answer.
        self._queue = deque(self.connections)
        self._remotes = list(self.connections)
        self._least = sshjob.least(request, len(hosts))
        # The exit code of the job, once it is known, and the signal that has stopped it.
        self._code: int | None = None
        self._signum: int | None = None
        # Whether we have ended the job, or a lost connection has, not a launcher.
        self._is_ours = False
        # Whether all hosts take part, or nothing is started.
        self.has_begun = self._is_refused = False

    def run(self) -> int:
        """Run until all have ended, and return the exit code; signals are caught meanwhile."""
        read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        before = {number: signal.signal(number, _do_nothing) for number in _CAUGHT}
        signal.set_wakeup_fd(write_fd)
        self._loop.watch(read_fd, lambda: self._interrupted(os.read(read_fd, 1)[0]))
        self._out.open(self._loop, partial(self._hold, is_held=False))
        self._err.open(self._loop)
        self._after("progress", self._progress_s, self._tell)
        self._after("answers", _ANSWER_S, self._give_up_silent)
        self._after("heartbeat", ssh.HEARTBEAT_S, self._beat)
        try:
            self._open_next()
            while any(connection.code is None for connection in self.connections):
                self._loop.turn()
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._loop.unwatch(read_fd)
            os.close(read_fd)
            os.close(write_fd)
        code = self._code or 0
        if self._records is not None:
            is_of_signal = self._signum is not None and code == 128 + self._signum
            self._records.end(code, self._signum if is_of_signal else None)
        return code

    def drain(self) -> None:
        """Wait briefly for readers to take the last lines, and end."""
        for writer in (self._out, self._err):
            writer.finish(_DRAIN_S)
        while self._out.is_busy or self._err.is_busy:
            self._loop.turn()
        self._loop.close()

    def _after(self, name: object, seconds: float, call: Callable[[], None]) -> None:
        self._loop.timer(name, time.monotonic() + seconds, call)

    def _beat(self) -> None:
        for connection in self.connections:
            connection.send(b"\n")
        self._after("heartbeat", ssh.HEARTBEAT_S, self._beat)

    # Output -------------------------------------------------------------------------------------

    def log(self, text: str) -> None:
        """Print a line of the head's own."""
        self._err.put(f"fleetrun: {visible(text)}\n".encode())

    def _show(self, connection: SshConnection, fd: int, part: bytes) -> None:
        """Print PART of the output of CONNECTION."""
        if self._is_refused:
            return
        if fd == 2:
            self._err.put(b"[%b] %b" % (connection.host.name.encode(), part))
        elif connection is self.connections[0] or self._request.tee:
            # The other hosts' first ranks print the same as the first host's.
            self._out.put(part)
            if self._out.is_busy:
                self._hold(is_held=True)

    def _hold(self, *, is_held: bool) -> None:
        """Read no output from the hosts while our reader takes none; heartbeats go on."""
        for connection in self.connections:
            connection.hold(is_held=is_held)

    # Beginning ----------------------------------------------------------------------------------

    def _awaited(self) -> list[SshConnection]:
        """Return the connections that may still answer."""
        return [remote for remote in self._remotes if not remote.is_up and remote.code is None]

    def _open_next(self) -> None:
        """Open as many connections as have a place."""
        while self._queue and (
            sum(remote.is_open for remote in self._awaited()) < self._request.ssh_fanout
        ):
            self._queue.popleft().open()

    def _tell(self) -> None:
        """Name the hosts that have not answered yet, until all have."""
        if not self.has_begun and self._code is None:
            names = listed([remote.host.name for remote in self._awaited()])
            self.log(f"Waiting for {names} to answer by ssh, {_ANSWER_S:g} s at most.")
            self._after("progress", self._progress_s, self._tell)

    def _give_up_silent(self) -> None:
        for remote in self._awaited():
            remote.give_up(f"it did not answer within {_ANSWER_S:g} s.")

    def _changed(self, remote: SshConnection) -> None:
        """Go on once a host has answered, or its ssh has ended."""
        if remote.code is not None:
            self._loop.timer(remote, None, self._hang_up)
            # Before the beginning, a launcher ends only with a fault of its own.
            if remote in self._remotes and (
                self.has_begun or (remote.is_up and not remote.is_lost)
            ):
                self._ended(remote)
        self._open_next()
        if not (self.has_begun or self._code is not None or self._awaited()):
            self._begin()

    def _begin(self) -> None:
        """Go on if enough hosts have answered, or end."""
        remaining = [remote for remote in self._remotes if remote.is_up and not remote.is_lost]
        faults = {
            remote.host.name: remote.why() for remote in self._remotes if remote not in remaining
        }
        # The first host has the session, so it is indispensable.
        is_enough = self.connections[0] in remaining and len(remaining) >= self._least
        width = max((len(name) for name in faults), default=0)
        for name, sentence in faults.items():
            self.log(f"{name:{width}}  {sentence}")
        if not is_enough:
            self.log("Nothing was started.")
            self._code, self._is_refused = EnvironmentFault.exit_code, True
            self._hang_up()
            return
        if faults:
            self.log(
                f"The job starts without {listed(list(faults))}: {self._least} of its hosts are "
                "enough."
            )
        self._remotes, self.has_begun = remaining, True
        if self._records is not None:
            self._records.begin(self.log)

    # The end ------------------------------------------------------------------------------------

    def _ended(self, remote: SshConnection) -> None:
        """Handle the end of a launcher; the first bad end is that of the job.

        That of the first host's launcher, which has the session, takes precedence unless we or a
        lost connection have ended it: the others may have been cut off from it. The launchers of
        an elastic job agree on whether it goes on without one of the others.
        """
        is_first = remote is self.connections[0]
        if remote.is_lost and self._code is None:
            # A rank may also have ended with it: sys.exit(-1).
            or_ended = "" if remote.status < 0 else ", or the job has ended with 255 there"
            self.log(f"The connection to {remote.host.name} was lost{or_ended}: {remote.why()}")
        if not is_first and (not remote.code or self._least < len(self._remotes)):
            return
        if remote.code and (self._code is None or (is_first and not self._is_ours)):
            self._code = remote.code
        self._is_ours = self._is_ours or remote.is_lost
        # The launchers notify each other, and stop their ranks with grace.
        self._hang_up_later()

    def _interrupted(self, number: int) -> None:
        """Forward a signal: the first one stops the job, the second one kills it."""
        if self._code is None:
            self._code = 128 + number
        self._queue.clear()
        for remote in self._awaited():
            remote.give_up("interrupted")
        for remote in self._remotes:
            remote.send(ssh.STOP)
        self._is_ours = True
        if self._signum is None:
            self._signum = number
            self._hang_up_later()

    def _hang_up_later(self) -> None:
        self._after("timeout", self._request.grace_s + _TIMEOUT_S, self._hang_up)

    def _hang_up(self) -> None:
        """Close every connection; kill those that are still open after a while."""
        self._is_ours = True
        self._queue.clear()
        grace_s = self._request.grace_s if self.has_begun else 0.0
        for connection in self.connections:
            if not connection.is_up:
                connection.give_up("the job has ended")
            elif connection.code is None:
                connection.hang_up()
                self._after(connection, grace_s + self._closing_s, partial(self._cut, connection))

    def _cut(self, connection: SshConnection) -> None:
        self.log(f"ssh to {connection.host.name} does not exit, so it is killed.")
        connection.give_up("its ssh did not end")


def _do_nothing(*_: object) -> None:
    """Do nothing: the loop reads what was caught."""
