"""The head of a job by ssh: runs `fleetrun --ips=...` on each host, and shows what they print.

The launchers' own session decides how the job starts and ends: none starts before all that it
needs have come.
"""

from __future__ import annotations

import math
import queue
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from fleetrun.errors import EnvironmentFault, UsageError, shell_code
from fleetrun.host.probe import current_folder
from fleetrun.model import Request
from fleetrun.plan.hostfile import HostEntry
from fleetrun.remote import ssh, sshjob
from fleetrun.remote.ssh import HostOrder, SshConnection
from fleetrun.run.policy import POLITE
from fleetrun.rundir.folder import write_all
from fleetrun.rundir.variables import with_token
from fleetrun.text import visible

# Keys that stop or kill a process: without heartbeats, the hosts would end the job.
_KEYS = (signal.SIGTSTP, signal.SIGQUIT)
_BEAT_S = 1.0
# How long all hosts may take to answer.
_ANSWER_S = 60.0
# The most hosts to which we connect at once.
_MOST_CONNECTING = 32
# How long the other hosts may take, beyond --grace, once one has ended the job.
_TIMEOUT_S = 30.0


def launch(request: Request, environ: Mapping[str, str]) -> int:
    """Run the job of REQUEST on the hosts that it lists, and return its exit code."""
    hosts = sshjob.listed(request)
    if request.detach or request.dry_run is not None:
        raise UsageError(
            "--hosts and --hostfile cannot be used with --detach (write `nohup fleetrun ... &`) or "
            "--dry-run (--ips and --nproc_per_node plan the same job)."
        )
    words = ssh.words_of(request)
    # The token, which nobody has to set; ssh forwards it unseen.
    sent = sshjob.forwarded(with_token(environ))
    addresses = ssh.addresses(words, hosts)
    orders = [
        HostOrder(current_folder(), sent, sshjob.arguments(request, host, addresses, index))
        for index, host in enumerate(hosts)
    ]
    return Head(request, hosts, words, orders).run()


def log(text: str) -> None:
    """Print a line of the head's own."""
    with suppress(OSError):
        write_all(2, f"fleetrun: {visible(text)}\n".encode())


class Head:
    """The connections to HOSTS by WORDS, whose launchers get ORDERS.

    Threads wait for the connections; what they see is handled one after the other, in run().
    """

    def __init__(
        self,
        request: Request,
        hosts: Sequence[HostEntry],
        words: Sequence[str],
        orders: Sequence[HostOrder],
    ) -> None:
        # Signals; connections that are up (None), or have ended with a status.
        self._events = queue.SimpleQueue[int | tuple[SshConnection, int | None]]()
        self._connections = [
            SshConnection(
                host,
                ssh.command(words, host),
                order,
                # The other hosts' first ranks print the same as the first host's.
                stdout=None if request.tee or host is hosts[0] else subprocess.DEVNULL,
                show=self._show,
                changed=lambda remote, status: self._events.put((remote, status)),
            )
            for host, order in zip(hosts, orders, strict=True)
        ]
        self._unopened = list(self._connections)
        self._least = sshjob.least(request, len(hosts))
        # The exit code of the job, once it is known.
        self._code: int | None = None
        # Whether we have ended the job, or a lost connection has, not a launcher.
        self._is_ours = False
        # Whether too few hosts have answered, so that it does not start.
        self._is_refused = False
        # When those that have not answered are killed, and those that have not ended.
        self._answer_at = self._end_at = math.inf
        self._timeout_s = request.grace_s + _TIMEOUT_S

    def run(self) -> int:
        """Run until all have ended, and return the exit code; signals are caught meanwhile."""
        # nohup has SIGHUP ignored.
        before = {
            number: signal.signal(number, lambda signum, _: self._events.put(signum))
            for number in (*POLITE, *_KEYS)
            if signal.getsignal(number) != signal.SIG_IGN or number != signal.SIGHUP
        }
        beat_at = time.monotonic() + _BEAT_S
        self._answer_at = beat_at + _ANSWER_S
        self._open_next()
        while any(remote.status is None for remote in self._connections):
            with suppress(queue.Empty):
                match self._events.get(timeout=max(0.0, beat_at - time.monotonic())):
                    case (remote, None):
                        remote.is_up = True
                        self._answered()
                    case (remote, int(status)):
                        self._ended(remote, status)
                    case signal.SIGTSTP | signal.SIGQUIT:
                        log("Ctrl-Z and Ctrl-\\ have no effect here. Ctrl-C ends the job.")
                    case int(number):
                        self._interrupted(number)
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + _BEAT_S
                self._beat()
        for number, handler in before.items():
            signal.signal(number, handler)
        return self._code or 0

    def _show(self, host: HostEntry, line: bytes) -> None:
        """Print a line of HOST, in its thread: a stuck terminal must not delay heartbeats."""
        if not self._is_refused:
            with suppress(OSError):
                write_all(2, b"[%b] %b\n" % (host.name.encode(), line))

    def _beat(self) -> None:
        for remote in self._connections:
            if remote.is_up and remote.status is None:
                remote.send(ssh.HEARTBEAT)
        now = time.monotonic()
        if now >= self._answer_at:
            self._kill(self._awaited(), f"it did not answer within {_ANSWER_S:g} s.")
        if now >= self._end_at:
            log("Some hosts do not end, so their ssh is killed.")
            self._kill_all()

    def _awaited(self) -> list[SshConnection]:
        """Return the connections that may still answer."""
        return [it for it in self._connections if not it.is_up and it.status is None]

    def _kill(self, remotes: Sequence[SshConnection], why: str) -> None:
        self._unopened.clear()
        self._answer_at = math.inf
        for remote in remotes:
            remote.kill(why)

    def _kill_all(self) -> None:
        """Kill every ssh; launchers end when their input ends."""
        self._is_ours, self._end_at = True, math.inf
        self._kill([it for it in self._connections if it.status is None], "the job has ended")

    def _open_next(self) -> None:
        """Open as many connections as have a place."""
        while self._unopened and len(self._awaited()) - len(self._unopened) < _MOST_CONNECTING:
            self._unopened.pop(0).open()

    def _answered(self) -> None:
        """Go on once a host has answered, or its ssh has ended; end if too few have come."""
        self._open_next()
        if self._code is not None or self._awaited():
            return
        up = [remote.is_up for remote in self._connections]
        # The first host has the session, so it is indispensable.
        if not up[0] or sum(up) < self._least:
            log("Nothing was started.")
            self._code, self._is_refused = EnvironmentFault.exit_code, True
            self._kill_all()

    def _ended(self, remote: SshConnection, status: int) -> None:
        """Handle the end of an ssh; the first bad end of a launcher is that of the job.

        That of the first host's launcher, which has the session, takes precedence unless we or a
        lost connection have ended it: the others may have been cut off from it, and after its
        success need no connection. The launchers of an elastic job agree whether one may leave.
        """
        remote.status, code = status, shell_code(status)
        if not remote.is_up:
            if self._code is None:
                log(f"{remote.host.name}  {remote.why()}")
            self._answered()
            return
        is_first = remote is self._connections[0]
        is_lost = status < 0 or status == ssh.SSH_FAULT
        if is_lost and self._code is None:
            # A rank may also have ended with it: sys.exit(-1).
            or_ended = "" if status < 0 else ", or the job has ended with 255 there"
            log(f"The connection to {remote.host.name} was lost{or_ended}.")
        is_late = is_lost and self._connections[0].status == 0
        if not is_first and (not code or is_late or self._least < len(self._connections)):
            return
        if code and (self._code is None or (is_first and not self._is_ours)):
            self._code = code
        self._is_ours = self._is_ours or is_lost
        # The launchers notify each other, and stop their ranks with grace.
        self._end_at = min(self._end_at, time.monotonic() + self._timeout_s)

    def _interrupted(self, number: int) -> None:
        """Forward a signal: the first one stops the job, the second one kills it."""
        self._code = self._code or 128 + number
        self._is_ours = True
        self._kill(self._awaited(), "interrupted")
        for remote in self._connections:
            if remote.is_up:
                remote.send(ssh.STOP)
        self._end_at = min(self._end_at, time.monotonic() + self._timeout_s)
