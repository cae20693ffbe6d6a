"""The user's own ssh: its options, what it starts on a host, and one connection.

What it starts there (`hostside`) gets an order as its first line of input, then a heartbeat every
few seconds. Whatever a login shell prints ends with a line that begins with MARK.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BufferedReader
from queue import SimpleQueue
from typing import NamedTuple

from fleetrun import __version__
from fleetrun.errors import EnvironmentFault, UsageError, shell_code
from fleetrun.model import Request
from fleetrun.plan.hostfile import HostEntry
from fleetrun.plan.hosts import is_address, is_host
from fleetrun.rundir.folder import write_all

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
# How many files each needs here while it starts: both ends of three pipes, and of one of Python's.
FILES = 8
# Control characters: no shell greets with them.
MARK = b"\x1e\x02fleetrun "
STOP = b"stop\n"
# How often a heartbeat is sent, and the silence after which its sender counts as lost.
HEARTBEAT_S, SILENCE_S = 3.0, 15.0
# A longer line comes in parts.
_LONGEST_LINE = 1 << 16
_CHUNK = 1 << 16
# How much a login shell may print; it may greet, but not forever.
_MOST_CHATTER = 1 << 20
# How long an ssh's last output is waited for once it has ended: a shared connection of the user's
# (ControlPersist) keeps its streams.
_LAST_OUTPUT_S = 2.0
# How long `ssh -G` may take, which connects to nothing.
_NAME_S = 10.0


class HostOrder(NamedTuple):
    """The first line of input: run fleetrun with WORDS, or send the logs in RUN."""

    cwd: str
    environ: Mapping[str, str] = {}
    words: tuple[str, ...] = ()
    # The log folder, and how much of the logs is wanted: `tail`, `all` or nothing.
    log_dir: str = ""
    logs: str = ""
    run: str = ""
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
    """The ssh to HOST by WORDS, whose program gets ORDER.

    SHOW takes its output: the connection, the stream (1 or 2), and a part of the output or a line
    of the errors. The connection is put into EVENTS when its program runs, and when it has ended.
    PLACES are the connections that may be opened at once.
    """

    def __init__(
        self,
        host: HostEntry,
        words: Sequence[str],
        order: bytes,
        *,
        show: Callable[[SshConnection, int, bytes], None],
        events: SimpleQueue[SshConnection | int],
        places: threading.Semaphore | None = None,
    ) -> None:
        self.host = host
        self._argv = command(words, host)
        self._order = order
        self._show, self._events = show, events
        self._places = places or threading.Semaphore()
        self._process: subprocess.Popen[bytes] | None = None
        # Whether its program runs on the host.
        self.is_up = False
        # How ssh has ended: its exit code in Python's form, and a shell's.
        self.status = 0
        self.code: int | None = None
        # Why we have given it up.
        self.fault = ""
        # The last line that is not the program's output.
        self.last = ""
        # What its program says about itself at the end.
        self.note = ""

    @property
    def is_lost(self) -> bool:
        """Whether ssh has ended by its own fault, or was killed."""
        return self.code is not None and (self.status < 0 or self.code == SSH_FAULT)

    def start(self) -> None:
        """Open the connection as soon as it has a place."""
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self._places.acquire()
        try:
            if not self.fault:
                self._process = self._open()
        except OSError as error:
            self.last = f"it cannot be started here ({error.strerror})"
        if self._process is None:
            self._places.release()
            self._end(SSH_FAULT)
            return
        streams = ((1, self._process.stdout), (2, self._process.stderr))
        readers = [
            threading.Thread(target=self._read, args=(stream, fd), daemon=True)
            for fd, stream in streams
        ]
        for reader in readers:
            reader.start()
        assert self._process.stdin is not None
        with suppress(OSError):
            write_all(self._process.stdin.fileno(), self._order)
            os.set_blocking(self._process.stdin.fileno(), False)
        status = self._process.wait()
        for reader in readers:
            reader.join(_LAST_OUTPUT_S)
        if not self.is_up:
            self._places.release()
        self.hang_up()
        self._end(status)

    def _open(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            self._argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # We handle Ctrl-C, and tell the hosts.
            start_new_session=True,
        )
        if self.fault:
            os.killpg(process.pid, signal.SIGKILL)
        return process

    def _end(self, status: int) -> None:
        self.status = status
        self.code = shell_code(status)
        self._events.put(self)

    def _read(self, stream: BufferedReader, fd: int) -> None:
        """Read STREAM: what a login shell prints, then what the program does."""
        with stream:
            if not self._skip_greeting(stream):
                return
            if fd == 1:
                self.is_up = True
                self._places.release()
                self._events.put(self)
                while part := stream.read1(_CHUNK):
                    self._show(self, fd, part)
            while part := stream.readline(_LONGEST_LINE) if fd == 2 else b"":
                if part.startswith(MARK):
                    self.note = os.fsdecode(part.removeprefix(MARK).rstrip(b"\n"))
                    continue
                self._keep(part)
                self._show(self, fd, part)

    def _skip_greeting(self, stream: BufferedReader) -> bool:
        """Read up to the line with MARK; return False if none comes."""
        chatter = 0
        while text := stream.readline(_LONGEST_LINE):
            if text.startswith(MARK):
                return True
            self._keep(text)
            chatter += len(text)
            if chatter > _MOST_CHATTER:
                self.give_up(
                    "its shell prints endlessly before fleetrun can answer: check its start-up "
                    "files, such as ~/.bashrc."
                )
                break
        return False

    def _keep(self, text: bytes) -> None:
        self.last = text.decode(errors="replace").strip() or self.last

    def send(self, data: bytes) -> None:
        """Send DATA to the program, unless its pipe is full: then it will count as lost."""
        if self.is_up and self.code is None and self._process is not None:
            assert self._process.stdin is not None
            # It may have ended, or been hung up.
            with suppress(OSError, ValueError):
                os.write(self._process.stdin.fileno(), data)

    def hang_up(self) -> None:
        """Close the program's input, which ends it."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def give_up(self, fault: str) -> None:
        """Kill its ssh, because of FAULT, and what that has started: --ssh may be a script."""
        if self.code is None:
            self.fault = self.fault or fault
            if self._process is not None and self._process.returncode is None:
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
