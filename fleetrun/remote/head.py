"""The head of a job by ssh: runs `fleetrun --ips=...` on each host, and shows what they print.

The launchers' own session decides how the job starts and ends: none starts before all that it
needs have come.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.host.probe import current_folder
from fleetrun.model import Request
from fleetrun.plan.hostfile import HostEntry
from fleetrun.remote import ssh, sshjob
from fleetrun.remote.ssh import HostOrder, SshConnection
from fleetrun.run.loop import Loop
from fleetrun.rundir.names import listed
from fleetrun.rundir.variables import with_token
from fleetrun.sinks.writer import Writer
from fleetrun.text import visible

_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# How long all hosts may take to answer.
_ANSWER_S = 60.0
# How long the other hosts may take, beyond --grace, once one has ended the job.
_TIMEOUT_S = 30.0
# How long an ssh may take to end once it has been hung up; beyond --grace, if a launcher runs.
_CLOSING_S = 10.0
# The most messages that wait for a reader of standard error, and how long the last ones do.
_MOST_LINES, _DRAIN_S = 4096, 2.0


def launch(request: Request, environ: Mapping[str, str]) -> int:
    """Run the job of REQUEST on the hosts that it lists, and return its exit code."""
    hosts = sshjob.listed(request)
    if request.detach:
        raise UsageError(
            "--detach cannot be used with --hosts or --hostfile: write `nohup fleetrun ... &`, or "
            "start it on each host with --detach and --ips."
        )
    words = ssh.words_of(request)
    # The token, which nobody has to set; ssh forwards it unseen.
    order = HostOrder(current_folder(), sshjob.forwarded(with_token(environ)))
    addresses = ssh.addresses(words, hosts)
    orders = [
        order._replace(words=sshjob.arguments(request, host, addresses, index))
        for index, host in enumerate(hosts)
    ]
    return Head(request, hosts, words, orders).run()


class Head:
    """The connections to HOSTS by WORDS, whose launchers get ORDERS."""

    def __init__(
        self,
        request: Request,
        hosts: Sequence[HostEntry],
        words: Sequence[str],
        orders: Sequence[HostOrder],
        *,
        closing_s: float = _CLOSING_S,
    ) -> None:
        self._request, self._closing_s = request, closing_s
        self._loop = Loop()
        self._err = Writer(2, _MOST_LINES)
        self.connections = [
            SshConnection(
                self._loop,
                host,
                ssh.command(words, host),
                order,
                # The other hosts' first ranks print the same as the first host's.
                stdout=None if request.tee or not index else subprocess.DEVNULL,
                report=self._show,
                changed=self._changed,
            )
            for index, (host, order) in enumerate(zip(hosts, orders, strict=True))
        ]
        # Those that wait for a place (--ssh_fanout).
        self._queue = deque(self.connections)
        self._least = sshjob.least(request, len(hosts))
        # The exit code of the job, once it is known.
        self._code: int | None = None
        self._is_interrupted = False
        # Whether we have ended the job, or a lost connection has, not a launcher.
        self._is_ours = False
        # Whether all hosts that the job needs have answered, or it does not start.
        self._has_begun = self._is_refused = False

    def run(self) -> int:
        """Run until all have ended, and return the exit code; signals are caught meanwhile."""
        read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # nohup has SIGHUP ignored.
        is_kept = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        caught = _CAUGHT[:-1] if is_kept else _CAUGHT
        before = {number: signal.signal(number, _do_nothing) for number in caught}
        signal.set_wakeup_fd(write_fd)
        self._loop.watch(read_fd, lambda: self._interrupted(os.read(read_fd, 1)[0]))
        self._err.open(self._loop)
        self._after("answers", _ANSWER_S, self._give_up_silent)
        self._beat()
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
        self._err.finish(_DRAIN_S)
        while self._err.is_busy:
            self._loop.turn()
        self._loop.close()
        return self._code or 0

    def _after(self, name: object, seconds: float, call: Callable[[], None]) -> None:
        self._loop.timer(name, time.monotonic() + seconds, call)

    def _beat(self) -> None:
        for connection in self.connections:
            connection.send(b"\n")
        self._after("heartbeat", ssh.HEARTBEAT_S, self._beat)

    def log(self, text: str) -> None:
        """Print a line of the head's own."""
        self._err.put(f"fleetrun: {visible(text)}\n".encode())

    def _show(self, connection: SshConnection, line: bytes) -> None:
        if not self._is_refused:
            self._err.put(b"[%b] %b\n" % (connection.host.name.encode(), line))

    # Beginning ----------------------------------------------------------------------------------

    def _awaited(self) -> list[SshConnection]:
        """Return the connections that may still answer."""
        return [remote for remote in self.connections if not remote.is_up and remote.code is None]

    def _open_next(self) -> None:
        """Open as many connections as have a place."""
        while self._queue and (
            sum(remote.is_open for remote in self._awaited()) < self._request.ssh_fanout
        ):
            self._queue.popleft().open()

    def _give_up_silent(self) -> None:
        for remote in self._awaited():
            remote.give_up(f"it did not answer within {_ANSWER_S:g} s.")

    def _changed(self, remote: SshConnection) -> None:
        """Go on once a host has answered, or its ssh has ended."""
        if remote.code is not None:
            self._loop.timer(remote, None, _do_nothing)
            if remote.is_up:
                self._ended(remote)
        self._open_next()
        if not (self._has_begun or self._code is not None or self._awaited()):
            self._begin()

    def _begin(self) -> None:
        """Go on if enough hosts have answered, or end."""
        faults = {remote.host.name: remote.why() for remote in self.connections if not remote.is_up}
        width = max((len(name) for name in faults), default=0)
        for name, sentence in faults.items():
            self.log(f"{name:{width}}  {sentence}")
        # The first host has the session, so it is indispensable.
        if not self.connections[0].is_up or len(self.connections) - len(faults) < self._least:
            self.log("Nothing was started.")
            self._code, self._is_refused = EnvironmentFault.exit_code, True
            self._hang_up()
            return
        if faults:
            names = listed(list(faults))
            self.log(f"The job starts without {names}: {self._least} of its hosts are enough.")
        self._has_begun = True

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
            self.log(f"The connection to {remote.host.name} was lost{or_ended}.")
        if not is_first and (not remote.code or self._least < len(self.connections)):
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
        for remote in self.connections:
            remote.send(ssh.STOP)
        self._is_ours = True
        if not self._is_interrupted:
            self._is_interrupted = True
            self._hang_up_later()

    def _hang_up_later(self) -> None:
        self._after("timeout", self._request.grace_s + _TIMEOUT_S, self._hang_up)

    def _hang_up(self) -> None:
        """Close every connection; kill those that are still open after a while."""
        self._is_ours = True
        self._queue.clear()
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


def _do_nothing(*_: object) -> None:
    """Do nothing: the loop reads what was caught."""
