"""The ssh connection to one host: its output, and its unsent input."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence

from fleetrun.errors import EnvironmentFault, UsageError, shell_code
from fleetrun.model import Request
from fleetrun.plan.hostfile import HostEntry
from fleetrun.run import children
from fleetrun.run.loop import WRITABLE, Loop

# Never wait for a password; notice a lost network; open no terminal, whose end would send signals
# to processes.
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
        words = shlex.split(request.ssh)
    except ValueError:
        raise UsageError(f"--ssh={request.ssh}: a quotation mark is not closed.") from None
    if request.ssh == "ssh" and shutil.which("ssh") is None:
        raise EnvironmentFault(
            "There is no ssh here, by which --hosts and --hostfile reach the hosts: install it "
            "(Debian: apt-get install openssh-client), or name another with --ssh."
        )
    if not words or shutil.which(words[0]) is None:
        raise EnvironmentFault(f"--ssh={request.ssh}: there is no such program here.")
    return words


class SshConnection:
    """An ssh to HOST by the words of SSH, which runs COMMAND there with the input BEGINNING."""

    def __init__(
        self, host: HostEntry, ssh: Sequence[str], command: str, beginning: Sequence[bytes] = ()
    ) -> None:
        self.host = host
        self._argv = [*ssh, *OPTIONS, host.target, f"exec {command}"]
        # All hosts share the memory of large parts.
        self._unsent = [memoryview(part) for part in beginning]
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
            # We handle Ctrl-C, and tell the hosts.
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

    def send(self, data: bytes) -> None:
        """Send DATA, as far as it fits into the pipe; the rest follows later."""
        if not self.is_open:
            return
        self._unsent.append(memoryview(data))
        if len(self._unsent) == 1:
            self._write()

    def beat(self) -> None:
        """Send a heartbeat, unless other input is yet to be written."""
        if not self._unsent:
            self.send(b"\n")

    def _write(self) -> None:
        stdin = self.stream(0)
        try:
            while self._unsent:
                count = os.write(stdin, self._unsent[0])
                if count > 1:
                    self.sent_at = time.monotonic()
                self._unsent[0] = self._unsent[0][count:]
                if not self._unsent[0]:
                    del self._unsent[0]
        except BlockingIOError:
            pass
        except OSError:
            # Its end is noticed elsewhere.
            self._unsent.clear()
        if self._unsent:
            self._loop.watch(stdin, self._write, WRITABLE)
        else:
            self._loop.unwatch(stdin)

    def hang_up(self) -> None:
        """Close its input, which ends the program there."""
        if self.is_open and self.process.stdin is not None:
            self.is_open = False
            self._loop.unwatch(self.stream(0))
            self.process.stdin.close()

    def give_up(self, fault: str) -> None:
        """Kill its ssh, because of FAULT, and what that has started: --ssh may be a script."""
        if self.is_running:
            self.fault = fault
            children.signal_groups([self.process.pid])

    def reap(self) -> None:
        """Take ssh's exit status."""
        self.status = self.process.wait()
        self.code = shell_code(self.status)
        os.close(self.pidfd)

    def close(self) -> None:
        """Close all its streams."""
        self.hang_up()
        for stream in (self.process.stdout, self.process.stderr) if self.pidfd >= 0 else ():
            assert stream is not None
            stream.close()

    def lines(self, fd: int, part: bytes) -> list[bytes]:
        """Return the lines that PART completes in stream FD; an empty part ends the last one."""
        *lines, partial_line = (self._rest[fd] + part).split(b"\n")
        if partial_line and (not part or len(partial_line) > _LONGEST_LINE):
            lines, partial_line = [*lines, partial_line], b""
        self._rest[fd] = partial_line
        if fd == 2 and lines:
            self.last = lines[-1].decode(errors="replace").strip() or self.last
        return lines

    def why(self) -> str:
        """Return why it has ended: our reason, or its last line."""
        last_line = self.last.removeprefix("ssh: ")
        return self.fault or f"ssh: {last_line or f'it ended with exit code {self.code}'}"
