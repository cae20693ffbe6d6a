"""A command of fleetrun on several hosts at once, by their agents: `doctor` and `ps`."""

from __future__ import annotations

import signal
import time
from functools import partial
from typing import TYPE_CHECKING

from fleetrun.remote import protocol
from fleetrun.remote.agentconnection import AgentConnection
from fleetrun.remote.fanout import Fanout
from fleetrun.remote.sshconnection import SSH_FAULT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fleetrun.plan.hostfile import HostEntry

    # From the addresses of all hosts and the place of one to the words for it.
    Words = Callable[[Sequence[str], int], Sequence[str]]

# The most bytes of output; a command prints kilobytes.
_MOST = 1 << 22


class Everywhere(Fanout[AgentConnection]):
    """Runs fleetrun with WORDS on HOSTS by SSH in the folder that is ASKED for; keeps its output.

    A host that takes longer than LIMIT_S seconds is given up.
    """

    def __init__(
        self,
        hosts: Sequence[HostEntry],
        ssh: Sequence[str],
        asked: protocol.Inquiry,
        words: Words,
        limit_s: float,
    ) -> None:
        super().__init__([AgentConnection(host, ssh, asked) for host in hosts], len(hosts))
        self._words = words
        self._limit_s = limit_s
        self._is_going = False
        self._output = {one: bytearray() for one in self._all}

    def results(self) -> list[tuple[bytes, str]]:
        """Run it; return the output of each host, and why it failed (empty if it did not)."""
        self.run()
        if self.signum is not None:
            # End by the signal, as without the handler.
            signal.raise_signal(signal.Signals(self.signum))
        return [(bytes(self._output[one]), self._failure(one)) for one in self._all]

    def _failure(self, one: AgentConnection) -> str:
        fault = one.answer.fault if one.answer is not None else ""
        if not (one.code or fault or one.fault):
            return ""
        if fault:
            return f"fleetrun: {fault}"
        if one.answer is None or one.fault or one.status < 0 or one.code == SSH_FAULT:
            return f"ssh: {one.why().removeprefix('ssh: ')}"
        return f"fleetrun: {one.last or f'exit code {one.code}'}"

    def _started(self, one: AgentConnection) -> None:
        at = time.monotonic() + self._limit_s
        self._loop.timer(one, at, partial(one.give_up, f"no answer within {self._limit_s:g} s"))

    def _heard(self, one: AgentConnection, fd: int, part: bytes) -> None:
        if one.answer is None:
            (one.note if fd == 2 else one.hear)(part)
            self._go_if_all_answered()
        elif fd == 2:
            one.lines(fd, part)
        else:
            self._output[one] += part
            if len(self._output[one]) > _MOST:
                one.give_up("it says too much")

    def _ended(self, one: AgentConnection) -> None:  # noqa: ARG002 - whichever it is
        self._go_if_all_answered()

    def _go_if_all_answered(self) -> None:
        """Start the command on all hosts that have answered, once no other will."""
        if self._is_going or any(one.answer is None and one.code is None for one in self._all):
            return
        self._is_going = True
        addresses = [one.address for one in self._all]
        for me, one in enumerate(self._all):
            one.say(protocol.line(protocol.HostOrder(words=tuple(self._words(addresses, me)))))

    def _interrupted(self, number: int) -> None:
        for one in self._all:
            one.give_up(f"interrupted by signal {number}")
