"""The head of a job by ssh: inspects each host by a connection, then runs a launcher over it.

The output of the launchers is shown here. Their own session decides how the job ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from fleetrun.errors import (
    EnvironmentFault,
    MissingProgram,
    NotExecutable,
    RendezvousError,
    UsageError,
)
from fleetrun.model import Request
from fleetrun.probe import current_folder
from fleetrun.records.names import listed
from fleetrun.records.variables import with_token
from fleetrun.remote import protocol, sshjob
from fleetrun.remote.agentconnection import AgentConnection
from fleetrun.remote.detachedrun import HeadRun
from fleetrun.remote.fanout import Fanout
from fleetrun.remote.logreceiver import FetchedLogs
from fleetrun.remote.sshconnection import SSH_FAULT, ssh_command
from fleetrun.run import background
from fleetrun.run.loop import nothing

# How long a host may take to answer, from the start of its ssh on.
_CHECK_S = 60.0
# How often the hosts are named that have not answered yet.
_PROGRESS_S = 10.0
# How long it may take to report which hosts it reaches; longer than it tries.
_REACH_S = 20.0
# The exit codes of a launcher's own fault; the others only know that it is gone.
_OWN_FAULTS = tuple(
    fault.exit_code for fault in (UsageError, EnvironmentFault, NotExecutable, MissingProgram)
)
# The exit codes of a launcher that has not joined the others.
_NOT_BEGUN = (*_OWN_FAULTS, RendezvousError.exit_code)
# How long the other hosts may take, beyond --grace, once one has ended the job.
_TIMEOUT_S = 30.0
# How long an ssh may take to end once it has been hung up; beyond --grace, if a launcher runs.
_CLOSING_S = 10.0


def launch(request: Request, environ: Mapping[str, str]) -> int:
    """Run the job of REQUEST on the hosts that it lists, and return its exit code."""
    hosts = sshjob.listed(request)
    ssh = ssh_command(request)
    # The token, which nobody has to set; ssh forwards it unseen.
    sent = sshjob.forwarded(with_token(environ))
    inquiry = protocol.Inquiry(current_folder(), request.script.form, request.script.target, sent)
    logs: tuple[str, ...] = ()
    if request.gather_logs:
        logs = (request.log_dir, request.gather_logs, os.urandom(16).hex())
    records = None
    if request.detach:
        child = background.begin(os.path.abspath(request.log_dir))
        if isinstance(child, int):
            return child
        records = HeadRun(child, request)
    connections: list[AgentConnection] = []
    for host in hosts:
        host_inquiry = sshjob.with_ports(inquiry, request, host) if len(hosts) > 1 else inquiry
        host_inquiry = host_inquiry._replace(logs=() if connections else logs)
        connections.append(AgentConnection(host, ssh, host_inquiry))
    head = Head(connections, request, logs, records=records)
    head.run()
    return head.code or 0


class Head(Fanout[AgentConnection]):
    """The loop over the CONNECTIONS of a job; the first one provides the LOGS."""

    def __init__(
        self,
        connections: Sequence[AgentConnection],
        request: Request,
        logs: Sequence[str] = (),
        *,
        closing_s: float = _CLOSING_S,
        progress_s: float = _PROGRESS_S,
        records: HeadRun | None = None,
    ) -> None:
        super().__init__(connections, request.ssh_fanout)
        # An elastic job starts without unfit hosts.
        self._remotes = self._all
        self._least = sshjob.least(request, len(connections))
        self._request = request
        self._closing_s = closing_s
        self._progress_s = progress_s
        self._records = records
        self._is_looking = False
        self._is_going = False
        # The exit code of the job, once it is known.
        self.code: int | None = None
        # Whether it is that of a launcher that ended by itself.
        self._is_of_launcher = False
        self._is_stopping = False
        self._logs: FetchedLogs | None = None
        if logs:
            folder, _, nonce = logs
            first = connections[0]
            self._logs = FetchedLogs(folder, nonce, lambda word: first.send(word + b"\n"))
        self._tell_later()

    def _finish(self) -> None:
        if self._logs is not None and self._is_going and (result := self._logs.finish()):
            self._log(result)
        if self._records is not None:
            is_of_signal = self.signum is not None and self.code == 128 + self.signum
            self._records.end(self.code or 0, self.signum if is_of_signal else None)

    # Checking -----------------------------------------------------------------------------------

    def _tell_later(self) -> None:
        self._loop.timer("progress", time.monotonic() + self._progress_s, self._tell)

    def _tell(self) -> None:
        """Name the hosts that have not answered yet, until all have."""
        awaited = [connection.host.name for connection in self._remotes if connection.is_awaited]
        if awaited and self.code is None:
            self._log(f"Waiting for {listed(awaited)} to answer by ssh, {_CHECK_S:g} s at most.")
            self._tell_later()

    def _started(self, connection: AgentConnection) -> None:
        at = (connection.sent_at or time.monotonic()) + _CHECK_S
        self._loop.timer(connection, at, partial(self._give_up, connection))

    def _give_up(self, connection: AgentConnection) -> None:
        if connection.answer is None and time.monotonic() < connection.sent_at + _CHECK_S:
            # Its input is still being sent.
            self._started(connection)
        elif connection.answer is None:
            connection.give_up(f"it did not answer within {_CHECK_S:g} s.")
        elif connection.unreached is None:
            connection.give_up(f"it did not report within {_REACH_S:g} s which hosts it reaches.")

    def _heard(self, connection: AgentConnection, fd: int, part: bytes) -> None:
        is_first = connection is self._all[0]
        if self._is_going and fd == 2:
            self._show(connection, fd, part)
        elif self._is_going:
            if is_first and self._logs is not None:
                part = self._logs.take(part)
                if self._logs.is_arriving and self.code is not None and not self.signum:
                    self._hang_up_later()
            # The other hosts' first ranks print the same as the first host's.
            if part and (is_first or self._request.tee):
                self._put(connection, fd, part)
        elif fd == 2:
            connection.note(part)
        elif part and connection.answer is None:
            connection.receive(part)
            if connection.answer is not None:
                self._loop.timer(connection, None, nothing)
                self._release(connection)
                self._go_if_all_answered()
        elif part and self._is_looking:
            connection.receive(part)
            self._go_if_all_reached()

    def _go_if_all_answered(self) -> None:
        """When all have answered, start the launchers, or print all faults and end."""
        if self._is_going or self.code is not None:
            return
        if any(connection.is_awaited for connection in self._remotes):
            return
        answers = {connection.host.name: connection.outcome for connection in self._remotes}
        skews = {connection.host.name: connection.skew_s for connection in self._remotes}
        gpus = sshjob.gpus_wanted(self._request, [connection.host for connection in self._remotes])
        faults = protocol.faults(answers, skews, gpus)
        if faults and not self._can_do_without(faults):
            self._refuse(faults)
            return
        if self._is_looking:
            self._go_if_all_reached()
            return
        places = tuple(
            protocol.HostEndpoint(connection.host.name, connection.address, connection.answer.port)
            for connection in self._remotes
            # IPv4 only, like the ranks' endpoints.
            if connection.answer is not None
            and connection.answer.port
            and ":" not in connection.address
        )
        if len(self._remotes) == 1 or not places:
            self._go()
            return
        self._is_looking = True
        at = time.monotonic() + _REACH_S
        for connection in self._remotes:
            connection.send(protocol.line(protocol.HostOrder(hosts=places)))
            self._loop.timer(connection, at, partial(self._give_up, connection))

    def _go_if_all_reached(self) -> None:
        """Start the launchers if every host reaches all others; otherwise name the faults."""
        if self._is_going or any(connection.unreached is None for connection in self._remotes):
            return
        if self.code is not None:
            return
        excluded = sshjob.apart(
            {
                connection.host.name: [name for name, _ in connection.unreached or ()]
                for connection in self._remotes
            }
        )
        faults = [
            (connection.host.name, why)
            for connection in self._remotes
            for _, why in connection.unreached or ()
        ]
        if faults and not self._can_do_without(faults, excluded):
            self._refuse(faults)
        else:
            self._go()

    def _can_do_without(
        self, faults: Sequence[tuple[str, str]], names: Collection[str] | None = None
    ) -> bool:
        """Leave out the hosts NAMES (default: those with FAULTS) if enough are left.

        The first host has the session, so it is indispensable.
        """
        unfit = {name for name, _ in faults} if names is None else names
        remaining = tuple(
            connection for connection in self._remotes if connection.host.name not in unfit
        )
        if self._all[0] not in remaining or len(remaining) < self._least:
            return False
        self._list(faults)
        dropped = [connection for connection in self._remotes if connection not in remaining]
        self._remotes = remaining
        self._log(
            f"The job starts without {listed([connection.host.name for connection in dropped])}: "
            f"{self._least} of its hosts are enough."
        )
        for connection in dropped:
            self._loop.timer(connection, None, nothing)
            connection.hang_up()
        return True

    def _refuse(self, faults: Sequence[tuple[str, str]]) -> None:
        self.code = EnvironmentFault.exit_code
        self._list(faults)
        self._log("Nothing was started.")
        self._hang_up()

    def _list(self, faults: Sequence[tuple[str, str]]) -> None:
        """Print FAULTS in columns."""
        width = max(len(name) for name, _ in faults)
        for name, sentence in faults:
            self._log(f"{name:{width}}  {sentence}")

    def _go(self) -> None:
        addresses = [connection.address for connection in self._remotes]
        if self._records is not None:
            self._records.begin(self._log)
        self._is_going = True
        for index, connection in enumerate(self._remotes):
            self._loop.timer(connection, None, nothing)
            words = sshjob.arguments(self._request, connection.host, addresses, index)
            connection.send(protocol.line(protocol.HostOrder(words=words)))

    # Running ------------------------------------------------------------------------------------

    def _ended(self, connection: AgentConnection) -> None:
        """Handle the end of a connection; the first bad end is that of the job.

        That of the first host's launcher, which has the session, takes precedence: the others may
        have been cut off from it.
        """
        if connection not in self._remotes:
            return
        if not self._is_going:
            self._go_if_all_answered()
        elif self._is_elastic and connection is not self._all[0]:
            # The launchers agree on whether the job goes on without it, and the first one reports
            # it.
            if connection.status < 0 or connection.code == SSH_FAULT:
                self._log(f"The connection to {connection.host.name} was lost: {connection.why()}")
        else:
            self._judge(connection)

    def _judge(self, connection: AgentConnection) -> None:
        """Make the end of CONNECTION the job's end, unless that is known."""
        if connection.code and self.code is None:
            self.code = connection.code
            self._is_of_launcher = connection.status >= 0 and connection.code != SSH_FAULT
            if connection.status < 0:
                self._log(f"The connection to {connection.host.name} was lost: {connection.why()}")
            elif connection.code == SSH_FAULT:
                # A rank may also have ended with it: sys.exit(-1).
                self._log(
                    f"ssh to {connection.host.name} ended with 255: the connection was lost, or "
                    "that is what the job ended with there."
                )
            if connection.code in _NOT_BEGUN and self._logs is None:
                self._hang_up()
            else:
                # The launchers notify each other, and stop their ranks with grace.
                self._hang_up_later()
        elif self._is_elastic and not connection.code:
            # The job is done; a host that was cut off from the first one may not know.
            self._hang_up_later()
        elif (
            connection.code
            and connection is self._all[0]
            and self._is_of_launcher
            and connection.status >= 0
        ):
            self.code = self.code if self.code in _OWN_FAULTS else connection.code

    @property
    def _is_elastic(self) -> bool:
        return self._least < len(self._remotes)

    def _interrupted(self, number: int) -> None:
        """Forward a signal: the first one stops the job, the second one kills it."""
        if self.code is None:
            self.code = 128 + number
            self._is_of_launcher = False
        if not self._is_going:
            self._hang_up()
            for connection in self._remotes:
                connection.give_up("interrupted")
        elif not self._is_stopping:
            self._hang_up_later()
        for connection in self._remotes:
            connection.send(protocol.NOW if self._is_stopping else protocol.STOP)
        self._is_stopping = True

    def _hang_up_later(self) -> None:
        for connection in self._remotes:
            connection.send(protocol.END)
        at = time.monotonic() + self._request.grace_s + _TIMEOUT_S
        self._loop.timer("timeout", at, self._hang_up)

    def _hang_up(self) -> None:
        """Close every connection; kill those that are still open after a while."""
        self._unstarted.clear()
        # What ends from here on ends because of this.
        self._is_of_launcher = False
        grace_s = self._request.grace_s if self._is_going else 0.0
        at = time.monotonic() + grace_s + self._closing_s
        for connection in self._remotes:
            if connection.is_running:
                connection.hang_up()
                self._loop.timer(connection, at, partial(self._cut, connection))

    def _cut(self, connection: AgentConnection) -> None:
        self._log(f"ssh to {connection.host.name} does not exit, so it is killed.")
        connection.give_up("its ssh did not end")
