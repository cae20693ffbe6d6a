"""The ssh connection to one host: its output, and input that is yet to be written."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from typing import TYPE_CHECKING

from fleetrun.errors import EnvironmentFault, UsageError, shell_code
from fleetrun.run.loop import WRITABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fleetrun.model import Request
    from fleetrun.plan.hostfile import HostEntry
    from fleetrun.run.loop import Loop

# It never waits for a password, notices a lost network, and opens no terminal, whose end would
# send signals to processes.
OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
# The exit code of ssh's own faults, ssh(1).
SSH_FAULT = 255
# How many files each needs here: three pipes and the pidfd.
FILES = 4
_LONGEST_LINE = 1 << 16


def ssh_command(request: Request) -> list[str]:
    """Return the words of --ssh.

    Raises UsageError for an unclosed quotation mark, and EnvironmentFault if there is no such
    program.
    """
    try:
        found = shlex.split(request.ssh)
    except ValueError:
        raise UsageError(f"--ssh={request.ssh}: a quotation mark is not closed.") from None
    if request.ssh == "ssh" and shutil.which("ssh") is None:
        raise EnvironmentFault(
            "There is no ssh here, by which --hosts and --hostfile reach the hosts: install it "
            "(Debian: apt-get install openssh-client), or name another with --ssh."
        )
    if not found or shutil.which(found[0]) is None:
        raise EnvironmentFault(f"--ssh={request.ssh}: there is no such program here.")
    return found


class SshConnection:
    """An ssh to HOST by the words of SSH, which runs COMMAND there with the input BEGINNING."""

    def __init__(
        self, host: HostEntry, ssh: Sequence[str], command: str, beginning: Sequence[bytes] = ()
    ) -> None:
        self.host = host
        self._argv = [*ssh, *OPTIONS, host.target, f"exec {command}"]
        # Unwritten input; large parts are shared by all hosts.
        self._wanted = [memoryview(part) for part in beginning]
        # When more than a heartbeat was last written.
        self.sent_at = 0.0
        self.is_open = False
        self.pidfd = -1
        # How ssh has ended, as a wait status and as an exit code.
        self.status = 0
        self.code: int | None = None
        # Why we have given it up.
        self.fault = ""
        # The last line of its errors.
        self.last = ""
        self._rest = {1: b"", 2: b""}

    def start(self, loop: Loop) -> None:
        """Start the ssh."""
        self._loop = loop
        self.process = subprocess.Popen(
            self._argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C is for us; we tell the hosts.
            start_new_session=True,
        )
        try:
            self.pidfd = os.pidfd_open(self.process.pid)
        except OSError:
            self.process.kill()
            self.process.wait()
            raise
        self.is_open = True
        for fd in range(3):
            os.set_blocking(self.stream(fd), False)
        self._write()

    @property
    def is_running(self) -> bool:
        """Whether its ssh has been started and has not ended."""
        return self.pidfd >= 0 and self.code is None

    def stream(self, fd: int) -> int:
        """Return our end of its standard input, output or errors: FD 0, 1 or 2."""
        pipe = (self.process.stdin, self.process.stdout, self.process.stderr)[fd]
        assert pipe is not None
        return pipe.fileno()

    def say(self, data: bytes) -> None:
        """Send DATA, as far as it fits into the pipe; the rest follows later."""
        if not self.is_open:
            return
        self._wanted.append(memoryview(data))
        if len(self._wanted) == 1:
            self._write()

    def beat(self) -> None:
        """Send a heartbeat, unless other input is yet to be written."""
        if not self._wanted:
            self.say(b"\n")

    def _write(self) -> None:
        stdin = self.stream(0)
        try:
            while self._wanted:
                count = os.write(stdin, self._wanted[0])
                if count > 1:
                    self.sent_at = time.monotonic()
                self._wanted[0] = self._wanted[0][count:]
                if not self._wanted[0]:
                    del self._wanted[0]
        except BlockingIOError:
            pass
        except OSError:
            # Its end is noticed elsewhere.
            self._wanted.clear()
        if self._wanted:
            self._loop.watch(stdin, self._write, WRITABLE)
        else:
            self._loop.unwatch(stdin)

    def hang_up(self) -> None:
        """Close its input, which ends what runs there."""
        if self.is_open and self.process.stdin is not None:
            self.is_open = False
            self._loop.unwatch(self.stream(0))
            self.process.stdin.close()

    def give_up(self, fault: str) -> None:
        """Kill its ssh, because of FAULT."""
        if self.is_running:
            self.fault = fault
            self.process.kill()

    def reap(self) -> None:
        """Take its exit code."""
        self.status = self.process.wait()
        self.code = shell_code(self.status)
        os.close(self.pidfd)

    def close(self) -> None:
        """Close all that is open of it."""
        self.hang_up()
        for stream in (self.process.stdout, self.process.stderr) if self.pidfd >= 0 else ():
            assert stream is not None
            stream.close()

    def lines(self, fd: int, part: bytes) -> list[bytes]:
        """Return the lines that PART completes in stream FD; an empty part ends the last one."""
        *lines, rest = (self._rest[fd] + part).split(b"\n")
        if rest and (not part or len(rest) > _LONGEST_LINE):
            lines, rest = [*lines, rest], b""
        self._rest[fd] = rest
        if fd == 2 and lines:
            self.last = lines[-1].decode(errors="replace").strip() or self.last
        return lines

    def why(self) -> str:
        """Return why it has ended: our reason, else its last line."""
        said = self.last.removeprefix("ssh: ")
        return self.fault or f"ssh: {said or f'it ended with exit code {self.code}'}"
