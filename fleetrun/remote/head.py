"""The head of a job by ssh: a connection to each host inspects it, waits, and runs the launcher.

What the launchers say is shown here. They have a session of their own, which says how a job ends.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING

from fleetrun.errors import EnvironmentFault, UsageError, shell_code
from fleetrun.plan.visible import visible
from fleetrun.probe import current_folder
from fleetrun.records.names import listed
from fleetrun.records.variables import with_token
from fleetrun.remote import protocol, sshjob
from fleetrun.remote.fetched import FetchedLogs
from fleetrun.remote.outlets import Outlets
from fleetrun.remote.sshconnection import FILES, SSH_FAULT, SshConnection, ssh_command
from fleetrun.run.descriptors import FileLimit
from fleetrun.run.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from types import FrameType

    from fleetrun.model import Request
    from fleetrun.remote.headrun import HeadRun
    from fleetrun.remote.protocol import Answer

# How long a host may take to answer, from the start of its ssh on.
_CHECK_S = 60.0
# How long it may take to say which of the others it reaches: more than it tries that.
_REACH_S = 20.0
_CHUNK = 1 << 16
# Those of a launcher by its own fault, of which the others know only that it is gone.
_OWN_FAULTS = (2, 3)
# The exit codes of a launcher that has not joined the others: usage, its host, no rendezvous.
_NOT_BEGUN = (2, 3, 4)
# How long the other hosts may take, beyond --grace, once one has ended the job.
_TIMEOUT_S = 30.0
# How long an ssh may take to end once it has been hung up; beyond --grace, if a launcher runs.
_CLOSING_S = 10.0


def launch(request: Request, environ: Mapping[str, str]) -> int:
    """Run the job of REQUEST on the hosts that it lists, and return its exit code."""
    hosts = sshjob.listed(request)
    ssh = ssh_command(request)
    shipment = b""
    if request.ship:
        request, shipment = _shipped(request)
    # What nobody has to set: ssh takes it to the hosts unseen.
    sent = sshjob.forwarded(with_token(environ))
    asked = protocol.Inquiry(current_folder(), request.script.form, request.script.target, sent)
    if request.gather_logs:
        wanted = (request.log_dir, request.gather_logs, os.urandom(16).hex())
        asked = asked._replace(logs=wanted)
    records = None
    if request.detach:
        from fleetrun.remote.headrun import HeadRun  # most jobs stay in front
        from fleetrun.run import background

        begun = background.begin(os.path.abspath(request.log_dir))
        if isinstance(begun, int):
            return begun
        records = HeadRun(begun, request)
    files = FileLimit(len(hosts), each=FILES, what="hosts by ssh")
    try:
        remotes = [SshConnection(host, ssh, shipment) for host in hosts]
        return Head(remotes, request, asked, records=records).run()
    finally:
        files.restore()


def _shipped(request: Request) -> tuple[Request, bytes]:
    """Return REQUEST as it is for hosts that get all from here, and what is sent to them."""
    from fleetrun.remote import shipment  # only with --ship

    if request.preflight:
        raise UsageError(
            "--preflight does not go with --ship, as it needs what fleetrun is installed with: "
            "leave it out, or install fleetrun on the hosts."
        )
    data = shipment.pack(current_folder(), request.script, request.log_dir)
    # What is there of the job is removed at its end.
    return request._replace(gather_logs=request.gather_logs or "all"), data


class Head:
    """The loop over all REMOTES of a job."""

    def __init__(
        self,
        remotes: Sequence[SshConnection],
        request: Request,
        asked: protocol.Inquiry,
        closing_s: float = _CLOSING_S,
        *,
        records: HeadRun | None = None,
    ) -> None:
        self._remotes = remotes
        # Those that are not fit for an elastic job, which begins without them.
        self._left_out: list[SshConnection] = []
        self._least = sshjob.least(request, len(remotes))
        self._request = request
        self._asked = asked
        self._closing_s = closing_s
        self._records = records
        self._loop = Loop()
        self._outlets = Outlets(self._loop)
        self._unstarted = list(remotes)
        self._connecting = 0
        self._is_looking = False
        self._is_going = False
        # The exit code of the job, once it is known.
        self._code: int | None = None
        # Whether it is that of a launcher, which has ended by itself.
        self._is_of_launcher = False
        self._signals = 0
        # The first one.
        self._signum: int | None = None
        self._logs: FetchedLogs | None = None
        if asked.logs:
            folder, _, nonce = asked.logs
            self._logs = FetchedLogs(folder, nonce, lambda word: remotes[0].say(word + b"\n"))

    def run(self) -> int:
        """Run until nothing is left anywhere, and return the exit code."""
        caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        previous_fd = signal.set_wakeup_fd(write_fd)
        previous = {one: signal.signal(one, _nothing) for one in caught}
        self._loop.watch(read_fd, lambda: self._interrupted(read_fd))
        try:
            self._connect()
            self._go_if_all_answered()
            self._beat()
            while self._unstarted or any(one.code is None for one in self._all()):
                self._loop.turn()
            if self._logs is not None and self._is_going and (said := self._logs.finish()):
                self._say(said)
            self._outlets.drain()
            if self._records is not None:
                self._records.end(self._code or 0, self._signum)
        finally:
            for one in self._all():
                one.close()
            self._loop.close()
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous_fd)
            os.close(read_fd)
            os.close(write_fd)
        return self._code or 0

    # Checking -----------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Start as many connections as may shake hands at once."""
        while self._unstarted and self._connecting < self._request.ssh_fanout:
            one = self._unstarted.pop(0)
            if self._code is not None:
                one.code = SSH_FAULT
                continue
            try:
                asked = self._asked
                if len(self._remotes) > 1:
                    asked = sshjob.with_ports(asked, self._request, one.host)
                if one is not self._remotes[0]:
                    asked = asked._replace(logs=())
                one.start(self._loop, asked)
            except OSError as error:
                one.note(f"it cannot be started here ({error.strerror})".encode())
                one.code = SSH_FAULT
                continue
            self._connecting += 1
            out, err = one.streams
            self._loop.watch(out, lambda one=one: self._read_out(one))  # type: ignore[misc]
            self._loop.watch(err, lambda one=one: self._read_err(one))  # type: ignore[misc]
            self._loop.watch(one.pidfd, lambda one=one: self._ended(one))  # type: ignore[misc]
            self._await_answer(one)

    def _await_answer(self, one: SshConnection) -> None:
        at = (one.sent_at or time.monotonic()) + _CHECK_S
        self._loop.alarm(one, at, lambda: self._give_up(one))

    def _give_up(self, one: SshConnection) -> None:
        if one.answer is None and time.monotonic() < one.sent_at + _CHECK_S:
            # A large folder over a slow network.
            self._await_answer(one)
        elif one.answer is None:
            one.give_up(f"it gave no answer within {_CHECK_S:g} s.")
        elif one.unreached is None:
            one.give_up(f"it did not say within {_REACH_S:g} s which hosts it reaches.")

    def _read_out(self, one: SshConnection) -> None:
        out, _ = one.streams
        part = _part(out)
        if not part:
            self._loop.unwatch(out)
        if self._is_going:
            if one is self._remotes[0] and self._logs is not None:
                part = self._logs.take(part)
                if self._logs.is_arriving and self._code is not None and not self._signals:
                    self._hang_up_later()
            # The others' first ranks say what the first host's says.
            if part and (one is self._remotes[0] or self._request.tee):
                self._outlets.put(1, part, out, lambda: self._read_out(one))
        elif part and (one.answer is None or self._is_looking):
            is_first = one.answer is None
            one.hear(part)
            if one.fault:
                self._loop.unwatch(out)
            elif is_first and one.answer is not None:
                self._answered(one)
            else:
                self._go_if_all_reached()

    def _answered(self, one: SshConnection) -> None:
        self._loop.alarm(one, None, _no_call)
        self._connecting -= 1
        self._connect()
        self._go_if_all_answered()

    def _go_if_all_answered(self) -> None:
        """When all have answered, send the order to go, or print all that is wrong and end."""
        if self._is_going or self._code is not None:
            return
        if any(one.answer is None and one.code is None for one in self._remotes):
            return
        answers = {one.host.name: _heard(one) for one in self._remotes}
        skews = {one.host.name: one.skew_s for one in self._remotes}
        gpus = sshjob.gpus_wanted(self._request, [one.host for one in self._remotes])
        found = protocol.faults(answers, skews, gpus)
        if found and not self._can_do_without(found):
            self._refuse(found)
            return
        if self._is_looking:
            self._go_if_all_reached()
            return
        places = [
            protocol.HostEndpoint(one.host.name, _address(one), one.answer.port)
            for one in self._remotes
            # What is tried is IPv4, as the ranks' endpoints are.
            if one.answer is not None and one.answer.port and ":" not in _address(one)
        ]
        if len(self._remotes) == 1 or not places:
            self._go()
            return
        self._is_looking = True
        at = time.monotonic() + _REACH_S
        for one in self._remotes:
            one.say(protocol.line(places))
            self._loop.alarm(one, at, lambda one=one: self._give_up(one))  # type: ignore[misc]

    def _go_if_all_reached(self) -> None:
        """Say go when each host reaches all others; name those that do not, and end."""
        if self._is_going or any(one.unreached is None for one in self._remotes):
            return
        if self._code is not None:
            return
        apart = sshjob.apart(
            {one.host.name: [name for name, _ in one.unreached or ()] for one in self._remotes}
        )
        found = [(one.host.name, why) for one in self._remotes for _, why in one.unreached or ()]
        if found and not self._can_do_without(found, apart):
            self._refuse(found)
        else:
            self._go()

    def _can_do_without(
        self, found: Sequence[tuple[str, str]], names: Collection[str] | None = None
    ) -> bool:
        """Leave out the hosts NAMES, by default those that are FOUND not fit, if enough are left.

        The first one has the session, so that it has to be there.
        """
        unfit = {name for name, _ in found} if names is None else names
        left = [one for one in self._remotes if one.host.name not in unfit]
        if self._remotes[0] not in left or len(left) < self._least:
            return False
        self._list(found)
        out = [one for one in self._remotes if one not in left]
        self._left_out += out
        self._remotes = left
        self._say(
            f"The job begins without {listed([one.host.name for one in out])}: "
            f"{self._least} of its hosts are enough."
        )
        for one in out:
            self._loop.alarm(one, None, _no_call)
            one.hang_up()
        return True

    def _refuse(self, found: Sequence[tuple[str, str]]) -> None:
        self._code = EnvironmentFault.exit_code
        self._list(found)
        self._say("Nothing was started.")
        self._hang_up()

    def _list(self, found: Sequence[tuple[str, str]]) -> None:
        """Print what is FOUND, in columns."""
        width = max(len(name) for name, _ in found)
        for name, sentence in found:
            self._say(f"{name:{width}}  {sentence}")

    def _all(self) -> tuple[SshConnection, ...]:
        return (*self._remotes, *self._left_out)

    def _go(self) -> None:
        addresses = [_address(one) for one in self._remotes]
        if self._records is not None:
            self._records.begin(self._say)
        self._is_going = True
        for me, one in enumerate(self._remotes):
            self._loop.alarm(one, None, _no_call)
            one.say(protocol.line(sshjob.arguments(self._request, one.host, addresses, me)))

    # Running ------------------------------------------------------------------------------------

    def _beat(self) -> None:
        for one in self._remotes:
            one.beat()
        self._loop.alarm("heartbeat", time.monotonic() + protocol.HEARTBEAT_S, self._beat)

    def _read_err(self, one: SshConnection) -> None:
        _, err = one.streams
        part = _part(err)
        if not part:
            self._loop.unwatch(err)
        if not self._is_going:
            one.note(part)
            return
        lines = one.lines(part)
        name = one.host.name.encode()
        shown = b"".join(b"[" + name + b"] " + line + b"\n" for line in lines)
        if shown:
            self._outlets.put(2, shown, err if part else -1, lambda: self._read_err(one))

    def _ended(self, one: SshConnection) -> None:
        """Hear that the connection to a host has ended; the first bad end is that of the job.

        That of the first host's launcher, which has the session, counts before that of others: they
        may have been cut off from it.
        """
        self._loop.unwatch(one.pidfd)
        self._loop.alarm(one, None, _no_call)
        one.hang_up()
        # What it said last is still in the pipes.
        for read, fd in zip((self._read_out, self._read_err), one.streams, strict=True):
            while not one.fault and _has_more(fd):
                read(one)
            self._loop.unwatch(fd)
        status = one.process.wait()
        one.code = shell_code(status)
        os.close(one.pidfd)
        if one.answer is None:
            self._connecting -= 1
            self._connect()
        if one in self._left_out:
            return
        if not self._is_going:
            self._go_if_all_answered()
        elif self._is_elastic and one is not self._remotes[0]:
            # Whether the job goes on without it the launchers agree, and the first one's says.
            if status < 0 or one.code == SSH_FAULT:
                self._say(f"The connection to {one.host.name} was lost: {one.why()}")
        else:
            self._judge(one, status)

    def _judge(self, one: SshConnection, status: int) -> None:
        """Take STATUS, with which ssh to ONE has ended, for the job's end unless that is known."""
        if one.code and self._code is None:
            self._code = one.code
            self._is_of_launcher = status >= 0 and one.code != SSH_FAULT
            if status < 0:
                self._say(f"The connection to {one.host.name} was lost: {one.why()}")
            elif one.code == SSH_FAULT:
                # A rank may have ended with it, too: sys.exit(-1).
                self._say(
                    f"ssh to {one.host.name} ended with 255: the connection was lost, or that is "
                    "what the job ended with there."
                )
            if one.code in _NOT_BEGUN and self._logs is None:
                self._hang_up()
            else:
                # The launchers notify each other, and stop their ranks with grace.
                self._hang_up_later()
        elif self._is_elastic and not one.code:
            # The job is done; a host that was cut off from the first one may not know.
            self._hang_up_later()
        elif one.code and one is self._remotes[0] and self._is_of_launcher and status >= 0:
            self._code = self._code if self._code in _OWN_FAULTS else one.code

    @property
    def _is_elastic(self) -> bool:
        return self._least < len(self._remotes)

    def _interrupted(self, fd: int) -> None:
        """Pass on what was asked of the head: the first time to stop, then to kill."""
        for number in os.read(fd, 64):
            self._signals += 1
            if self._code is None:
                self._code, self._signum = 128 + number, number
                self._is_of_launcher = False
            if not self._is_going:
                self._hang_up()
                for one in self._remotes:
                    one.give_up("interrupted")
            elif self._signals == 1:
                self._hang_up_later()
            for one in self._remotes:
                one.say(protocol.STOP if self._signals == 1 else protocol.NOW)

    def _hang_up_later(self) -> None:
        for one in self._remotes:
            one.say(protocol.END)
        at = time.monotonic() + self._request.grace_s + _TIMEOUT_S
        self._loop.alarm("timeout", at, self._hang_up)

    def _hang_up(self) -> None:
        """End every connection, at the latest a while after the launchers were asked to end."""
        self._unstarted.clear()
        # What ends from here on ends of this.
        self._is_of_launcher = False
        grace_s = self._request.grace_s if self._is_going else 0.0
        at = time.monotonic() + grace_s + self._closing_s
        for one in self._remotes:
            if one.pidfd < 0:
                one.code = SSH_FAULT
            elif one.is_running:
                one.hang_up()
                self._loop.alarm(one, at, lambda one=one: self._cut(one))  # type: ignore[misc]

    def _cut(self, one: SshConnection) -> None:
        self._say(f"ssh to {one.host.name} does not end by itself, and is killed.")
        one.give_up("its ssh did not end")

    def _say(self, text: str) -> None:
        self._outlets.put(2, f"fleetrun: {visible(text)}\n".encode(), -1, _no_call)


def _address(one: SshConnection) -> str:
    """Return where the other hosts reach this one: as listed, if that is an address."""
    name = one.host.name
    if one.answer is None or not one.answer.address or name.replace(".", "").isdigit():
        return name
    return one.answer.address


def _heard(one: SshConnection) -> Answer:
    """Return what this host has answered; a fault if it has not, or is gone since."""
    if one.answer is None or (one.code is not None and not one.answer.fault):
        return protocol.Answer(fault=one.why())
    return one.answer


def _part(fd: int) -> bytes:
    try:
        return os.read(fd, _CHUNK)
    except OSError:
        return b""


def _has_more(fd: int) -> bool:
    """Whether FD has unread input."""
    import fcntl  # only at an end
    import termios

    count = fcntl.ioctl(fd, termios.FIONREAD, b"\0" * 4)
    return bool(int.from_bytes(count, sys.byteorder))


def _nothing(_signum: int, _frame: FrameType | None) -> None:
    """Let the signal come as a byte."""


def _no_call() -> None:
    """Stand in where nothing is called."""
