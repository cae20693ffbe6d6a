"""The user's own ssh: its options, what it starts on a host, and one connection.

What it starts there (`hostside`) gets an order as its first line of input, then a heartbeat every
few seconds. It writes MARK to standard error when fleetrun is about to run.
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
# The exit code of ssh's own faults, ssh(1), and those of shells that cannot start a program.
SSH_FAULT, _NO_PROGRAM = 255, (126, 127)
# Control characters: no shell greets with them.
MARK = b"\x1e\x02fleetrun"
STOP = b"stop\n"
# How often a heartbeat is sent, and the silence after which its sender counts as lost.
HEARTBEAT_S, SILENCE_S = 3.0, 15.0
# A longer line comes in parts.
_LONGEST_LINE = 1 << 16


class HostOrder(NamedTuple):
    """The first line of input: run fleetrun with WORDS, as long as the input lives if ATTENDED."""

    cwd: str
    environ: Mapping[str, str] = {}
    words: tuple[str, ...] = ()
    attended: bool = True
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
    if not words or shutil.which(words[0]) is None:
        raise EnvironmentFault(
            f"--ssh={request.ssh}: there is no such program here, by which --hosts and --hostfile "
            "reach the hosts (Debian: apt-get install openssh-client)."
        )
    return words


def command(words: Sequence[str], host: HostEntry) -> list[str]:
    """Return the ssh by WORDS that starts our side on HOST."""
    python = shlex.join([sys.executable, "-c", HOSTSIDE])
    return [*words, *OPTIONS, host.target, f"exec {python}"]


def why(code: int, last: str) -> str:
    """Return why an ssh that has printed LAST at its end and ended with CODE ran no fleetrun."""
    if code in _NO_PROGRAM or "No module named" in last:
        return f"fleetrun is not installed there for {sys.executable} ({last}): install it there."
    if code == EnvironmentFault.exit_code:
        return last
    return f"ssh: {last.removeprefix('ssh: ') or f'it ended with exit code {code}'}"


def addresses(words: Sequence[str], hosts: Sequence[HostEntry]) -> list[str]:
    """Return the names by which HOSTS find each other: HostName of ssh's configuration."""

    def address(host: HostEntry) -> str:
        try:
            done = subprocess.run(
                [*words, "-G", host.target],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError:
            return host.name
        named = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
        return named.get("hostname", host.name)

    # A program in the place of ssh has no such option.
    if os.path.basename(words[0]) != "ssh":
        return [host.name for host in hosts]
    with ThreadPoolExecutor(max_workers=16) as pool:
        return list(pool.map(address, hosts))


class SshConnection:
    """The ssh by ARGV to HOST, whose program gets ORDER, in the LOOP of its caller.

    Its output goes to the descriptor STDOUT; REPORT takes each line of standard error. CHANGED is
    called when the program is about to run, and when the connection has ended.
    """

    def __init__(
        self,
        loop: Loop,
        host: HostEntry,
        argv: Sequence[str],
        order: HostOrder,
        *,
        stdout: int | None,
        report: Callable[[SshConnection, bytes], None],
        changed: Callable[[SshConnection], None],
    ) -> None:
        self.host = host
        self._loop, self._argv, self._stdout = loop, argv, stdout
        self._report, self._changed = report, changed
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = self._input = self._errors = -1
        # What has to be sent, and the incomplete line that was received.
        self._unsent, self._received = line(order), b""
        # Whether fleetrun is about to run, or has.
        self.is_up = False
        # How ssh has ended: its exit code in Python's form, and a shell's.
        self.status = 0
        self.code: int | None = None
        # Why we have given it up, and the last line that is not of fleetrun.
        self._fault = self._last = ""

    @property
    def is_lost(self) -> bool:
        """Whether ssh has ended by its own fault, or was killed."""
        return self.code is not None and (self.status < 0 or self.code == SSH_FAULT)

    @property
    def is_open(self) -> bool:
        """Whether ssh runs, and we have not hung up."""
        return self._input >= 0

    def open(self) -> None:
        """Start ssh, unless the connection was given up."""
        if self.code is not None:
            return
        try:
            process = subprocess.Popen(
                self._argv,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=self._stdout,
                stderr=subprocess.PIPE,
                # We handle Ctrl-C, and tell the hosts.
                start_new_session=True,
            )
        except OSError as error:
            self._last = f"it cannot be started here ({error.strerror})"
            self._end(SSH_FAULT)
            return
        assert process.stdin is not None
        assert process.stderr is not None
        self._process, self._pidfd = process, os.pidfd_open(process.pid)
        self._input, self._errors = process.stdin.fileno(), process.stderr.fileno()
        os.set_blocking(self._input, False)
        os.set_blocking(self._errors, False)
        self._loop.watch(self._errors, self._read)
        self._loop.watch(self._pidfd, self._reap)
        self._flush()

    def send(self, data: bytes) -> None:
        """Send DATA to the program, as soon as ssh takes it."""
        if self.is_open:
            self._unsent += data
            self._flush()

    def _flush(self) -> None:
        with suppress(BlockingIOError):
            try:
                self._unsent = self._unsent[os.write(self._input, self._unsent) :]
            except BrokenPipeError:
                self._unsent = b""
        if self._unsent:
            self._loop.watch(self._input, self._flush, WRITABLE)
        else:
            self._loop.unwatch(self._input)

    def _read(self) -> None:
        """Take a part of standard error, if there is one."""
        try:
            data = os.read(self._errors, _LONGEST_LINE)
        except BlockingIOError:
            return
        if not data:
            self._loop.unwatch(self._errors)
        *lines, self._received = (self._received + data).split(b"\n")
        if self._received and (not data or len(self._received) > _LONGEST_LINE):
            lines, self._received = [*lines, self._received], b""
        for text in lines:
            if self.is_up:
                self._report(self, text)
            elif text == MARK:
                self.is_up = True
                self._changed(self)
            else:
                self._last = text.decode(errors="replace").strip() or self._last

    def _reap(self) -> None:
        assert self._process is not None
        status = self._process.wait()
        # All that ssh wrote is in the pipe, which what it has started may keep open.
        self._read()
        if self._received and self.is_up:
            self._report(self, self._received)
        for fd in (self._pidfd, self._errors):
            self._loop.unwatch(fd)
        os.close(self._pidfd)
        self.hang_up()
        assert self._process.stderr is not None
        self._process.stderr.close()
        self._end(status)

    def _end(self, status: int) -> None:
        self.status, self.code = status, shell_code(status)
        self._changed(self)

    def hang_up(self) -> None:
        """Close the program's input, which ends it."""
        if self._process is not None and self._process.stdin is not None and self.is_open:
            self._loop.unwatch(self._input)
            self._input = -1
            self._process.stdin.close()

    def give_up(self, fault: str) -> None:
        """Kill its ssh, because of FAULT, and what that has started: --ssh may be a script."""
        if self.code is not None:
            return
        self._fault = self._fault or fault
        if self._process is None:
            self._end(SSH_FAULT)
        else:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def why(self) -> str:
        """Return why it has ended or its program was never up."""
        return self._fault or why(self.code or 0, self._last)
