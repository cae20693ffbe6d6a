"""The head of a job by ssh: a connection to each host inspects it, waits, and runs the launcher.

What the launchers say is shown here. They have a session of their own, which says how a job ends.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING

from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.probe import current_folder
from fleetrun.records.names import listed
from fleetrun.records.variables import with_token
from fleetrun.remote import protocol, sshjob
from fleetrun.remote.agentconnection import AgentConnection
from fleetrun.remote.fanout import Fanout
from fleetrun.remote.logreceiver import FetchedLogs
from fleetrun.remote.sshconnection import SSH_FAULT, ssh_command
from fleetrun.run.loop import nothing

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from fleetrun.model import Request
    from fleetrun.remote.detachedrun import HeadRun

# How long a host may take to answer, from the start of its ssh on.
_CHECK_S = 60.0
# How long it may take to say which of the others it reaches: more than it tries that.
_REACH_S = 20.0
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
    logs: tuple[str, ...] = ()
    if request.gather_logs:
        logs = (request.log_dir, request.gather_logs, os.urandom(16).hex())
    records = None
    if request.detach:
        from fleetrun.remote.detachedrun import HeadRun  # most jobs stay in front
        from fleetrun.run import background

        begun = background.begin(os.path.abspath(request.log_dir))
        if isinstance(begun, int):
            return begun
        records = HeadRun(begun, request)
    connections: list[AgentConnection] = []
    for host in hosts:
        own = sshjob.with_ports(asked, request, host) if len(hosts) > 1 else asked
        own = own._replace(logs=() if connections else logs)
        connections.append(AgentConnection(host, ssh, own, shipment))
    head = Head(connections, request, logs, records=records)
    head.run()
    return head.code or 0


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


class Head(Fanout[AgentConnection]):
    """The loop over the CONNECTIONS of a job, whose first one has the LOGS that are wanted."""

    def __init__(
        self,
        connections: Sequence[AgentConnection],
        request: Request,
        logs: Sequence[str] = (),
        *,
        closing_s: float = _CLOSING_S,
        records: HeadRun | None = None,
    ) -> None:
        super().__init__(connections, request.ssh_fanout)
        # An elastic job begins without those that are not fit.
        self._remotes = self._all
        self._least = sshjob.least(request, len(connections))
        self._request = request
        self._closing_s = closing_s
        self._records = records
        self._is_looking = False
        self._is_going = False
        # The exit code of the job, once it is known.
        self.code: int | None = None
        # Whether it is that of a launcher, which has ended by itself.
        self._is_of_launcher = False
        self._is_stopping = False
        self._logs: FetchedLogs | None = None
        if logs:
            folder, _, nonce = logs
            first = connections[0]
            self._logs = FetchedLogs(folder, nonce, lambda word: first.say(word + b"\n"))

    def _finish(self) -> None:
        if self._logs is not None and self._is_going and (said := self._logs.finish()):
            self._say(said)
        if self._records is not None:
            is_of_signal = self.signum is not None and self.code == 128 + self.signum
            self._records.end(self.code or 0, self.signum if is_of_signal else None)

    # Checking -----------------------------------------------------------------------------------

    def _started(self, one: AgentConnection) -> None:
        at = (one.sent_at or time.monotonic()) + _CHECK_S
        self._loop.timer(one, at, partial(self._give_up, one))

    def _give_up(self, one: AgentConnection) -> None:
        if one.answer is None and time.monotonic() < one.sent_at + _CHECK_S:
            # A large folder over a slow network.
            self._started(one)
        elif one.answer is None:
            one.give_up(f"it did not answer within {_CHECK_S:g} s.")
        elif one.unreached is None:
            one.give_up(f"it did not say within {_REACH_S:g} s which hosts it reaches.")

    def _heard(self, one: AgentConnection, fd: int, part: bytes) -> None:
        is_first = one is self._all[0]
        if self._is_going and fd == 2:
            self._show(one, fd, part)
        elif self._is_going:
            if is_first and self._logs is not None:
                part = self._logs.take(part)
                if self._logs.is_arriving and self.code is not None and not self.signum:
                    self._hang_up_later()
            # The others' first ranks say what the first host's says.
            if part and (is_first or self._request.tee):
                self._put(one, fd, part)
        elif fd == 2:
            one.note(part)
        elif part and one.answer is None:
            one.hear(part)
            if one.answer is not None:
                self._loop.timer(one, None, nothing)
                self._release(one)
                self._go_if_all_answered()
        elif part and self._is_looking:
            one.hear(part)
            self._go_if_all_reached()

    def _go_if_all_answered(self) -> None:
        """When all have answered, send the order to go, or print all that is wrong and end."""
        if self._is_going or self.code is not None:
            return
        if any(one.answer is None and one.code is None for one in self._remotes):
            return
        answers = {one.host.name: one.outcome for one in self._remotes}
        skews = {one.host.name: one.skew_s for one in self._remotes}
        gpus = sshjob.gpus_wanted(self._request, [one.host for one in self._remotes])
        found = protocol.faults(answers, skews, gpus)
        if found and not self._can_do_without(found):
            self._refuse(found)
            return
        if self._is_looking:
            self._go_if_all_reached()
            return
        places = tuple(
            protocol.HostEndpoint(one.host.name, one.address, one.answer.port)
            for one in self._remotes
            # What is tried is IPv4, as the ranks' endpoints are.
            if one.answer is not None and one.answer.port and ":" not in one.address
        )
        if len(self._remotes) == 1 or not places:
            self._go()
            return
        self._is_looking = True
        at = time.monotonic() + _REACH_S
        for one in self._remotes:
            one.say(protocol.line(protocol.HostOrder(hosts=places)))
            self._loop.timer(one, at, partial(self._give_up, one))

    def _go_if_all_reached(self) -> None:
        """Say go when each host reaches all others; name those that do not, and end."""
        if self._is_going or any(one.unreached is None for one in self._remotes):
            return
        if self.code is not None:
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
        left = tuple(one for one in self._remotes if one.host.name not in unfit)
        if self._all[0] not in left or len(left) < self._least:
            return False
        self._list(found)
        out = [one for one in self._remotes if one not in left]
        self._remotes = left
        self._say(
            f"The job starts without {listed([one.host.name for one in out])}: "
            f"{self._least} of its hosts are enough."
        )
        for one in out:
            self._loop.timer(one, None, nothing)
            one.hang_up()
        return True

    def _refuse(self, found: Sequence[tuple[str, str]]) -> None:
        self.code = EnvironmentFault.exit_code
        self._list(found)
        self._say("Nothing was started.")
        self._hang_up()

    def _list(self, found: Sequence[tuple[str, str]]) -> None:
        """Print what is FOUND, in columns."""
        width = max(len(name) for name, _ in found)
        for name, sentence in found:
            self._say(f"{name:{width}}  {sentence}")

    def _go(self) -> None:
        addresses = [one.address for one in self._remotes]
        if self._records is not None:
            self._records.begin(self._say)
        self._is_going = True
        for me, one in enumerate(self._remotes):
            self._loop.timer(one, None, nothing)
            words = sshjob.arguments(self._request, one.host, addresses, me)
            one.say(protocol.line(protocol.HostOrder(words=words)))

    # Running ------------------------------------------------------------------------------------

    def _ended(self, one: AgentConnection) -> None:
        """Hear that the connection to a host has ended; the first bad end is that of the job.

        That of the first host's launcher, which has the session, counts before that of others: they
        may have been cut off from it.
        """
        if one not in self._remotes:
            return
        if not self._is_going:
            self._go_if_all_answered()
        elif self._is_elastic and one is not self._all[0]:
            # Whether the job goes on without it the launchers agree, and the first one's says.
            if one.status < 0 or one.code == SSH_FAULT:
                self._say(f"The connection to {one.host.name} was lost: {one.why()}")
        else:
            self._judge(one)

    def _judge(self, one: AgentConnection) -> None:
        """Take how ssh to ONE has ended for the job's end unless that is known."""
        if one.code and self.code is None:
            self.code = one.code
            self._is_of_launcher = one.status >= 0 and one.code != SSH_FAULT
            if one.status < 0:
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
        elif one.code and one is self._all[0] and self._is_of_launcher and one.status >= 0:
            self.code = self.code if self.code in _OWN_FAULTS else one.code

    @property
    def _is_elastic(self) -> bool:
        return self._least < len(self._remotes)

    def _interrupted(self, number: int) -> None:
        """Pass on what was asked of the head: the first time to stop, then to kill."""
        if self.code is None:
            self.code = 128 + number
            self._is_of_launcher = False
        if not self._is_going:
            self._hang_up()
            for one in self._remotes:
                one.give_up("interrupted")
        elif not self._is_stopping:
            self._hang_up_later()
        for one in self._remotes:
            one.say(protocol.NOW if self._is_stopping else protocol.STOP)
        self._is_stopping = True

    def _hang_up_later(self) -> None:
        for one in self._remotes:
            one.say(protocol.END)
        at = time.monotonic() + self._request.grace_s + _TIMEOUT_S
        self._loop.timer("timeout", at, self._hang_up)

    def _hang_up(self) -> None:
        """End every connection, at the latest a while after the launchers were asked to end."""
        self._unstarted.clear()
        # What ends from here on ends of this.
        self._is_of_launcher = False
        grace_s = self._request.grace_s if self._is_going else 0.0
        at = time.monotonic() + grace_s + self._closing_s
        for one in self._remotes:
            if one.is_running:
                one.hang_up()
                self._loop.timer(one, at, partial(self._cut, one))

    def _cut(self, one: AgentConnection) -> None:
        self._say(f"ssh to {one.host.name} does not exit, so it is killed.")
        one.give_up("its ssh did not end")
