"""The user's own ssh: its options, what it starts on a host, and one connection.

What it starts there (`hostside`) gets an order as its first line of input, then a heartbeat every
few seconds. What a login shell prints ends with a line of MARK and the pid of fleetrun.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from fleetrun import __version__
from fleetrun.errors import EnvironmentFault, UsageError, shell_code
from fleetrun.model import Request
from fleetrun.plan.hostfile import HostEntry
from fleetrun.plan.hosts import is_address, is_host
from fleetrun.run.loop import WRITABLE, Loop

# Never wait for a password; notice a lost network; open no terminal, whose end would send signals
# to processes.
OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
# With -m the folder it is in would count as a place of modules, and a json.py there as Python's; -P
# is not older than Python 3.11.
_IMPORT = "from fleetrun.remote.hostside import run; run()"
HOSTSIDE = f"import sys; sys.path[:] = filter(None, sys.path); {_IMPORT}"
# The exit code of ssh's own faults, ssh(1).
SSH_FAULT = 255
# The exit codes of shells that cannot start a program.
_NO_PROGRAM = (126, 127)
# How many files each needs here while it starts: both ends of three pipes, and of one of Python's;
# and its pidfd.
FILES = 9
# Control characters: no shell greets with them.
MARK = b"\x1e\x02fleetrun "
STOP = b"stop\n"
# How often a heartbeat is sent, and the silence after which its sender counts as lost.
HEARTBEAT_S, SILENCE_S = 3.0, 15.0
# A longer line comes in parts.
_LONGEST_LINE = 1 << 16
# As much as a pipe holds.
_CHUNK = 1 << 20
# How much a login shell may print; it may greet, but not forever.
_MOST_CHATTER = 1 << 20
# How long `ssh -G` may take, which connects to nothing.
_NAME_S = 10.0


class HostOrder(NamedTuple):
    """The first line of input: run fleetrun with WORDS, or send the logs of the launcher PID."""

    cwd: str
    environ: Mapping[str, str] = {}
    words: tuple[str, ...] = ()
    log_dir: str = ""
    pid: int = 0
    version: str = __version__


def line(order: HostOrder) -> bytes:
    """Return ORDER as a line; texts may contain any bytes."""
    return json.dumps(order._asdict()).encode() + b"\n"


def read(text: bytes) -> HostOrder | None:
    """Return the order in TEXT; None if another version of fleetrun has written it.

    >>> read(line(HostOrder("/work", {"A": "b"}, ("train.py",))))[:3]
    ('/work', {'A': 'b'}, ('train.py',))
    >>> read(b'{"cwd": "/work", "pace": 1}')
    """
    try:
        fields = json.loads(text)
        return HostOrder(**{**fields, "words": tuple(fields["words"])})
    except (ValueError, TypeError, KeyError):
        # TEXT contains the token, and is not quoted.
        return None


def words_of(request: Request) -> list[str]:
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


def command(words: Sequence[str], host: HostEntry) -> list[str]:
    """Return the ssh by WORDS that starts our side on HOST."""
    python = shlex.join([sys.executable, "-c", HOSTSIDE])
    return [*words, *OPTIONS, host.target, f"exec {python}"]


def addresses(words: Sequence[str], hosts: Sequence[HostEntry]) -> list[str]:
    """Return the names by which HOSTS find each other: HostName of ssh's own configuration."""

    def address(host: HostEntry) -> str:
        if is_address(host.name):
            return host.name
        query = [*words, "-G", host.target]
        try:
            done = subprocess.run(
                query, capture_output=True, text=True, timeout=_NAME_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return host.name
        named = [text.partition(" ") for text in done.stdout.splitlines()]
        name = next((value for key, _, value in named if key == "hostname"), "")
        return name if is_host(name) else host.name

    # A program instead of ssh has no such option.
    if os.path.basename(words[0]) != "ssh" or len(hosts) == 1:
        return [host.name for host in hosts]
    with ThreadPoolExecutor(max_workers=16) as pool:
        return list(pool.map(address, hosts))


class SshConnection:
    """The ssh by ARGV to HOST, whose program gets ORDER, in the LOOP of its caller.

    OUTPUT takes what the program prints: the connection, the stream (1 or 2), and bytes of the
    first or a line of the second. CHANGED is called when the program runs, and when the connection
    has ended.
    """

    def __init__(
        self,
        loop: Loop,
        host: HostEntry,
        argv: Sequence[str],
        order: HostOrder,
        *,
        output: Callable[[SshConnection, int, bytes], None],
        changed: Callable[[SshConnection], None],
    ) -> None:
        self.host = host
        self._loop, self._argv = loop, argv
        self._output, self._changed = output, changed
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        # What has to be sent, and what was received and is not complete, by stream.
        self._unsent = line(order)
        self._received = {1: b"", 2: b""}
        self._chatter = 0
        # The fleetrun that runs on the host, once it does.
        self.pid: int | None = None
        # How ssh has ended: its exit code in Python's form, and a shell's.
        self.status = 0
        self.code: int | None = None
        # Why we have given it up, and the last line that is no output of fleetrun.
        self.fault = self.last = ""

    @property
    def is_up(self) -> bool:
        """Whether its program has begun on the host."""
        return self.pid is not None

    @property
    def is_lost(self) -> bool:
        """Whether ssh has ended by its own fault, or was killed."""
        return self.code is not None and (self.status < 0 or self.code == SSH_FAULT)

    @property
    def is_open(self) -> bool:
        """Whether ssh runs, and we have not hung up."""
        return self._fd(0) >= 0

    def open(self) -> None:
        """Start ssh, unless the connection was given up."""
        if self.code is not None:
            return
        try:
            process = subprocess.Popen(
                self._argv,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # We handle Ctrl-C, and tell the hosts.
                start_new_session=True,
            )
        except OSError as error:
            self.last = f"it cannot be started here ({error.strerror})"
            self._end(SSH_FAULT)
            return
        self._process, self._pidfd = process, os.pidfd_open(process.pid)
        for stream in (process.stdin, process.stdout, process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
        self._loop.watch(self._fd(0), self._send_order, WRITABLE)
        self._loop.watch(self._fd(2), lambda: self._read(2))
        self._loop.watch(self._pidfd, self._reap)
        self.hold(is_held=False)

    def _fd(self, number: int) -> int:
        if self._process is None:
            return -1
        stream = (self._process.stdin, self._process.stdout, self._process.stderr)[number]
        return -1 if stream is None or stream.closed else stream.fileno()

    def _send_order(self) -> None:
        with suppress(BlockingIOError):
            try:
                self._unsent = self._unsent[os.write(self._fd(0), self._unsent) :]
            except BrokenPipeError:
                self._unsent = b""
        if not self._unsent:
            self._loop.unwatch(self._fd(0))

    def _read(self, stream: int) -> None:
        """Take a part of STREAM, if there is one."""
        with suppress(BlockingIOError):
            data = os.read(self._fd(stream), _CHUNK)
            if not data:
                self._loop.unwatch(self._fd(stream))
            elif stream == 1 and self.is_up:
                self._output(self, 1, data)
            else:
                self._read_lines(stream, data)

    def _read_lines(self, stream: int, data: bytes) -> None:
        """Take the output of a login shell, and then the messages of fleetrun."""
        *lines, rest = (self._received[stream] + data).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        self._received[stream] = rest
        for at, text in enumerate(lines):
            if stream == 1 and text.startswith(MARK):
                self.pid = int(text.removeprefix(MARK))
                self._received[1] = b""
                self._changed(self)
                self._output(self, 1, b"\n".join([*lines[at + 1 :], rest]))
                return
            self.last = text.decode(errors="replace").strip() or self.last
            if self.is_up:
                self._output(self, 2, text + b"\n")
        self._chatter += len(data)
        if not self.is_up and self._chatter > _MOST_CHATTER:
            self.give_up(
                "its shell prints endlessly before fleetrun can answer: check its start-up files, "
                "such as ~/.bashrc."
            )

    def _reap(self) -> None:
        assert self._process is not None
        status = self._process.wait()
        self._loop.unwatch(self._pidfd)
        os.close(self._pidfd)
        for stream in (1, 2):
            # All that ssh wrote is in the pipe, which what it has started may keep open.
            self._read(stream)
            self._loop.unwatch(self._fd(stream))
        if self._received[2]:
            self._read_lines(2, b"\n")
        self.hang_up()
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()
        self._end(status)

    def _end(self, status: int) -> None:
        self.status, self.code = status, shell_code(status)
        self._changed(self)

    def hold(self, *, is_held: bool) -> None:
        """Read no more of the program's output while IS_HELD."""
        if is_held:
            self._loop.unwatch(self._fd(1))
        elif self._fd(1) >= 0:
            self._loop.watch(self._fd(1), lambda: self._read(1))

    def send(self, data: bytes) -> None:
        """Send DATA to the program, unless its pipe is full: then it will count as lost."""
        if self.is_up and self.is_open:
            with suppress(BrokenPipeError, BlockingIOError):
                os.write(self._fd(0), data)

    def hang_up(self) -> None:
        """Close the program's input, which ends it."""
        if self.is_open:
            assert self._process is not None
            assert self._process.stdin is not None
            self._loop.unwatch(self._fd(0))
            self._process.stdin.close()

    def give_up(self, fault: str) -> None:
        """Kill its ssh, because of FAULT, and what that has started: --ssh may be a script."""
        if self.code is not None:
            return
        self.fault = self.fault or fault
        if self._process is None:
            self._end(SSH_FAULT)
        else:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def why(self) -> str:
        """Return why it has ended or its program was never up."""
        if self.fault:
            return self.fault
        if self.code in _NO_PROGRAM and sys.executable in self.last:
            return (
                f"there is no {sys.executable} there ({self.last}): install fleetrun in the same "
                "place."
            )
        if "No module named" in self.last:
            return (
                f"fleetrun is not installed there for {sys.executable} ({self.last}): install it "
                "there."
            )
        if self.code == EnvironmentFault.exit_code and not self.is_up:
            return self.last
        last = self.last.removeprefix("ssh: ")
        return f"ssh: {last or f'it ended with exit code {self.code}'}"
