"""A command of fleetrun on several hosts at once, by agents: `doctor` and `ps`."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from functools import partial

from fleetrun.plan.hostfile import HostEntry
from fleetrun.remote import protocol
from fleetrun.remote.agentconnection import AgentConnection
from fleetrun.remote.fanout import Fanout
from fleetrun.remote.sshconnection import SSH_FAULT

# The words for one host, from the addresses of all hosts and its index.
Words = Callable[[Sequence[str], int], Sequence[str]]

# The most bytes of output; a command prints kilobytes.
_MOST = 1 << 22


class Everywhere(Fanout[AgentConnection]):
    """Runs fleetrun with WORDS on HOSTS by SSH, in INQUIRY's folder, and keeps its output.

    A host that takes longer than LIMIT_S seconds is given up.
    """

    def __init__(
        self,
        hosts: Sequence[HostEntry],
        ssh: Sequence[str],
        inquiry: protocol.Inquiry,
        words: Words,
        limit_s: float,
    ) -> None:
        super().__init__([AgentConnection(host, ssh, inquiry) for host in hosts], len(hosts))
        self._words = words
        self._limit_s = limit_s
        self._is_going = False
        self._output = {connection: bytearray() for connection in self._all}

    def results(self) -> list[tuple[bytes, str]]:
        """Run the command; return each host's output, and why it failed (empty if it did not)."""
        self.run()
        if self.signum is not None:
            # End by the signal, as without the handler.
            signal.raise_signal(signal.Signals(self.signum))
        return [
            (bytes(self._output[connection]), self._failure(connection)) for connection in self._all
        ]

    def _failure(self, connection: AgentConnection) -> str:
        fault = connection.answer.fault if connection.answer is not None else ""
        if not (connection.code or fault or connection.fault):
            return ""
        if fault:
            return f"fleetrun: {fault}"
        if (
            connection.answer is None
            or connection.fault
            or connection.status < 0
            or connection.code == SSH_FAULT
        ):
            return f"ssh: {connection.why().removeprefix('ssh: ')}"
        return f"fleetrun: {connection.last or f'exit code {connection.code}'}"

    def _started(self, connection: AgentConnection) -> None:
        at = time.monotonic() + self._limit_s
        self._loop.timer(
            connection, at, partial(connection.give_up, f"no answer within {self._limit_s:g} s")
        )

    def _heard(self, connection: AgentConnection, fd: int, part: bytes) -> None:
        if connection.answer is None:
            (connection.note if fd == 2 else connection.receive)(part)
            self._go_if_all_answered()
        elif fd == 2:
            connection.lines(fd, part)
        else:
            self._output[connection] += part
            if len(self._output[connection]) > _MOST:
                connection.give_up("it prints too much")

    def _ended(self, connection: AgentConnection) -> None:  # noqa: ARG002 - whichever it is
        self._go_if_all_answered()

    def _go_if_all_answered(self) -> None:
        """Start the command on all hosts that have answered, once no other will."""
        if self._is_going or any(connection.is_awaited for connection in self._all):
            return
        self._is_going = True
        addresses = [connection.address for connection in self._all]
        for me, connection in enumerate(self._all):
            connection.send(
                protocol.line(protocol.HostOrder(words=tuple(self._words(addresses, me))))
            )

    def _interrupted(self, number: int) -> None:
        for connection in self._all:
            connection.give_up(f"interrupted by signal {number}")
