"""The ssh connection to an agent: its answer, or why there is none."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence

from fleetrun.plan.hostfile import HostEntry
from fleetrun.remote import protocol
from fleetrun.remote.protocol import Answer, Inquiry
from fleetrun.remote.sshconnection import SshConnection
from fleetrun.run.loop import Loop

# The exit codes of shells that cannot start a program.
_NO_PROGRAM = (126, 127)
# The most bytes before the answer: a login shell may greet, but not print forever.
_MOST_CHATTER = 1 << 20
# How many of those bytes are kept.
_KEPT = 1 << 16


class AgentConnection(SshConnection):
    """The ssh to the agent on HOST, to which it sends INQUIRY."""

    def __init__(self, host: HostEntry, ssh: Sequence[str], inquiry: Inquiry) -> None:
        words = [sys.executable, "-c", protocol.start("agent")]
        super().__init__(host, ssh, shlex.join(words), [protocol.line(inquiry)])
        self.answer: Answer | None = None
        # The hosts that it does not reach, with reasons, once known.
        self.unreached: tuple[tuple[str, str], ...] | None = None
        # By how many seconds its clock is ahead of ours.
        self.skew_s = 0.0
        self._greeting = b""
        self._line = b""
        self._chatter = 0

    def start(self, loop: Loop) -> None:
        """Start the ssh."""
        self._asked_at = time.time()
        super().start(loop)

    @property
    def address(self) -> str:
        """The address at which other hosts reach this one; the listed one if it is numeric."""
        name = self.host.name
        if self.answer is None or not self.answer.address or name.replace(".", "").isdigit():
            return name
        return self.answer.address

    @property
    def is_awaited(self) -> bool:
        """Whether it may still answer."""
        return self.answer is None and self.code is None

    @property
    def outcome(self) -> Answer:
        """The host's answer; a fault if there is none or it is gone since."""
        if self.answer is None or (self.code is not None and not self.answer.fault):
            return protocol.Answer(fault=self.why())
        return self.answer

    def receive(self, part: bytes) -> None:
        """Find the answer in PART of its output."""
        *lines, self._line = (self._line + part).split(b"\n")
        for line in lines:
            if line.startswith(protocol.MARK):
                self._greeting = b""
                self._take(line[len(protocol.MARK) :])
                return
        self.note(b"\n".join((*lines, b"")))
        if len(self._line) > _MOST_CHATTER:
            self.note(self._line)
            self._line = b""

    def _take(self, text: bytes) -> None:
        try:
            if self.answer is None:
                self.answer = protocol.read(text, protocol.Answer)
                self.skew_s = protocol.skew(self.answer.time, self._asked_at, time.time())
            else:
                self.unreached = protocol.read(text, protocol.Unreached).hosts
        except ValueError:
            fault = "another fleetrun answers there."
            if self.answer is None:
                self.answer = protocol.Answer(fault=fault)
            else:
                self.unreached = ((self.host.name, fault),)

    def note(self, part: bytes) -> None:
        """Keep PART, which may explain a missing answer or an early end."""
        if self.answer is not None:
            self._rest[2] = (self._rest[2] + part)[-_KEPT:]
            return
        self._greeting = (self._greeting + part)[-_KEPT:]
        self._chatter += len(part)
        if self._chatter > _MOST_CHATTER:
            self.give_up(
                "its shell prints endlessly before fleetrun can answer: check its start-up "
                "files, such as ~/.bashrc."
            )

    def why(self) -> str:
        """Return why there is no answer: the last line of ssh or of what it has started."""
        text = (self._greeting + self._line + self._rest[2]).decode(errors="replace")
        last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
        self.last = last or self.last
        if not self.fault and "No module named" in last:
            return (
                f"fleetrun is not installed there for {sys.executable} ({last}): install it there."
            )
        if not self.fault and self.code in _NO_PROGRAM and sys.executable in last:
            return (
                f"there is no {sys.executable} there ({last}): install fleetrun in the same place."
            )
        return super().why()
