"""One host of a job by ssh: the ssh to it, what it has said, and what it is still to be told."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.remote import protocol
from fleetrun.run.loop import WRITABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fleetrun.model import Request
    from fleetrun.plan.hostfile import HostEntry
    from fleetrun.remote.protocol import Answer
    from fleetrun.run.loop import Loop

# It never waits for a password, notices a lost network, and opens no terminal, at whose end
# processes would get signals that they do not expect.
OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
# What ssh exits with by its own fault, ssh(1).
SSH_FAULT = 255
# Runs code by the Python that is here, too, or by another.
_ANY_PYTHON = '[ -x "$1" ] || set -- python3 "$2"; exec "$1" -c "$2"'
# What shells end with that cannot start a program.
_NO_PROGRAM = (126, 127)
# So many files of ours are open for each: three pipes, and the handle of the process.
FILES = 4
# A login shell may greet, but not print for ever: bytes before the answer, that included.
_MOST_CHATTER = 1 << 20
# Of what is no answer, and of a line that does not end, so many bytes are kept.
_KEPT = 1 << 16


def ssh_command(request: Request) -> list[str]:
    """Return the words of --ssh.

    Raises UsageError for a quotation mark without its other, and EnvironmentFault where there is no
    such program.
    """
    try:
        found = shlex.split(request.ssh)
    except ValueError:
        raise UsageError(f"--ssh={request.ssh}: a quotation mark in it has no other.") from None
    if request.ssh == "ssh" and shutil.which("ssh") is None:
        raise EnvironmentFault(
            "There is no ssh here, by which --hosts and --hostfile reach the hosts: install it "
            "(Debian: apt-get install openssh-client), or name another with --ssh."
        )
    if not found or shutil.which(found[0]) is None:
        raise EnvironmentFault(f"--ssh={request.ssh}: there is no such program here.")
    return found


class SshConnection:
    """One host, and the ssh to it."""

    def __init__(self, host: HostEntry, ssh: Sequence[str], shipment: bytes = b"") -> None:
        self.host = host
        self._shipment = shipment
        command = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(protocol.start('agent'))}"
        if shipment:
            words = ("sh", "-c", _ANY_PYTHON, "sh", sys.executable, protocol.RECEIVE)
            command = f"exec {shlex.join(words)}"
        self._argv = [*ssh, *OPTIONS, host.target, command]
        self.answer: Answer | None = None
        # What it says of the others: the host, and why that is not reached.
        self.unreached: tuple[tuple[str, str], ...] | None = None
        self.code: int | None = None
        # Why it cannot take part, where we are the ones who say so.
        self.fault = ""
        # By how many seconds its clock differs from the one here.
        self.skew_s = 0.0
        self.is_open = False
        self.pidfd = -1
        self._said = b""
        self._line = b""
        self._chatter = 0
        # What is still to be written; large things are the same for all hosts.
        self._wanted: list[memoryview] = []
        # When more than a heartbeat of it was taken.
        self.sent_at = 0.0

    def start(self, loop: Loop, asked: protocol.Inquiry) -> None:
        """Start the ssh, and let it ask what was ASKED."""
        self._loop = loop
        self._asked_at = time.time()
        self.process = subprocess.Popen(
            self._argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C is for the head, which tells them.
            start_new_session=True,
        )
        try:
            self.pidfd = os.pidfd_open(self.process.pid)
        except OSError:
            self.process.kill()
            self.process.wait()
            raise
        self.is_open = True
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
        if self._shipment:
            self.say(self._shipment)
        self.say(protocol.line(asked))

    @property
    def is_running(self) -> bool:
        """Whether its ssh has been started and has not ended."""
        return self.pidfd >= 0 and self.code is None

    @property
    def streams(self) -> tuple[int, int]:
        """Its standard output and error."""
        out, err = self.process.stdout, self.process.stderr
        assert out is not None
        assert err is not None
        return out.fileno(), err.fileno()

    # What it is told ----------------------------------------------------------------------------

    def say(self, line: bytes) -> None:
        """Send LINE; what does not fit into the pipe goes later."""
        if not self.is_open:
            return
        self._wanted.append(memoryview(line))
        if len(self._wanted) == 1:
            self._write()

    def beat(self) -> None:
        """Show that the head is there, unless that is still to be sent."""
        if not self._wanted:
            self.say(b"\n")

    def _write(self) -> None:
        stdin = self.process.stdin
        assert stdin is not None
        try:
            while self._wanted:
                count = os.write(stdin.fileno(), self._wanted[0])
                if count > 1:
                    self.sent_at = time.monotonic()
                self._wanted[0] = self._wanted[0][count:]
                if not self._wanted[0]:
                    del self._wanted[0]
        except BlockingIOError:
            pass
        except OSError:
            # Its end will be heard of.
            self._wanted.clear()
        if self._wanted:
            self._loop.watch(stdin.fileno(), self._write, WRITABLE)
        else:
            self._loop.unwatch(stdin.fileno())

    def hang_up(self) -> None:
        """End its input, which ends whatever runs there."""
        if self.is_open and self.process.stdin is not None:
            self.is_open = False
            self._loop.unwatch(self.process.stdin.fileno())
            self.process.stdin.close()

    def close(self) -> None:
        """Close all that is open of it."""
        self.hang_up()
        for stream in (self.process.stdout, self.process.stderr) if self.pidfd >= 0 else ():
            assert stream is not None
            stream.close()

    def give_up(self, fault: str) -> None:
        """Kill its ssh, because of FAULT."""
        if self.is_running:
            self.fault = fault
            self.process.kill()

    # What it says -------------------------------------------------------------------------------

    def hear(self, part: bytes) -> None:
        """Take PART of its output for the answer, or for what comes before that."""
        *lines, self._line = (self._line + part).split(b"\n")
        for line in lines:
            if line.startswith(protocol.MARK):
                self._said = b""
                self._take(line[len(protocol.MARK) :])
                return
        self.note(b"\n".join((*lines, b"")))
        if len(self._line) > _MOST_CHATTER:
            self.note(self._line)
            self._line = b""

    def _take(self, text: bytes) -> None:
        try:
            if self.answer is None:
                self.answer = protocol.answer(text)
                self.skew_s = protocol.skew(self.answer.time, self._asked_at, time.time())
            else:
                self.unreached = protocol.unreached(text)
        except ValueError:
            fault = "another fleetrun answers there."
            if self.answer is None:
                self.answer = protocol.Answer(fault=fault)
            else:
                self.unreached = ((self.host.name, fault),)

    def note(self, part: bytes) -> None:
        """Keep PART, as it may say why there is no answer."""
        self._said = (self._said + part)[-_KEPT:]
        self._chatter += len(part)
        if self._chatter > _MOST_CHATTER and self.answer is None:
            self.give_up(
                "it prints without end before fleetrun can answer: see what its shell does at a "
                "start, as in ~/.bashrc."
            )

    def lines(self, part: bytes) -> list[bytes]:
        """Return the lines that PART of its errors ends; an empty part ends the last one."""
        *lines, self._said = (self._said + part).split(b"\n")
        if self._said and (not part or len(self._said) > _KEPT):
            lines, self._said = [*lines, self._said], b""
        return lines

    def why(self) -> str:
        """Return why there is no answer: the last that ssh, or what it has started, said."""
        if self.fault:
            return self.fault
        text = (self._said + self._line).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines()]
        said = next((line for line in reversed(lines) if line), "")
        if "No module named" in said:
            return (
                f"fleetrun is not installed there for {sys.executable} ({said}): install it there, "
                "or send it along with --ship."
            )
        if self.code in _NO_PROGRAM and sys.executable in said:
            return (
                f"there is no {sys.executable} there ({said}): install fleetrun in the same place, "
                "or send it along with --ship."
            )
        said = said.removeprefix("ssh: ")
        return f"ssh: {said or f'it ended with exit code {self.code}'}"
