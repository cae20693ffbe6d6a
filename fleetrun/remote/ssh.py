"""The user's own ssh: its options, what it starts on a host, and one connection.

What it starts there (`hostside`) gets an order as its first line of input, then a heartbeat every
second. It writes MARK to standard error when fleetrun is about to run.
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
from dataclasses import dataclass
from functools import partial
from typing import IO, NamedTuple

from fleetrun import __version__
from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.model import Request
from fleetrun.plan.hostfile import HostEntry
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
# The exit code of ssh's own faults, ssh(1), and those of shells that cannot start a program.
SSH_FAULT, _NO_PROGRAM = 255, (126, 127)
# Control characters: no shell greets with them.
MARK = b"\x1e\x02fleetrun\n"
HEARTBEAT, STOP = b"\n", b"stop\n"
# The silence after which the sender of heartbeats counts as lost.
SILENCE_S = 15.0
# A longer line comes in parts.
_LONGEST_LINE = 1 << 16
# What ssh has started may keep its standard error open.
_LAST_LINES_S = 0.5


class HostOrder(NamedTuple):
    """The first line of input: run fleetrun with WORDS, as long as the input lives if ATTENDED."""

    cwd: str
    environ: Mapping[str, str]
    words: Sequence[str]
    attended: bool = True

    def line(self) -> bytes:
        """Return it as a line; texts may contain any bytes."""
        return json.dumps([__version__, *self]).encode() + b"\n"


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
    seen = last or f"its ssh ended with {code}"
    if code in _NO_PROGRAM or "No module named" in last:
        return f"fleetrun is not installed there for {sys.executable} ({seen}): install it there."
    # With 1, our side has refused the order.
    return seen if code == 1 or not last else f"ssh: {last.removeprefix('ssh: ')}"


def addresses(words: Sequence[str], hosts: Sequence[HostEntry]) -> list[str]:
    """Return the names by which HOSTS find each other: HostName of ssh's configuration."""

    def address(host: HostEntry) -> str:
        command = [*words, "-G", host.target]
        with suppress(OSError):
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, check=False
            )
            for line in done.stdout.decode().splitlines():
                if line.startswith("hostname "):
                    return line.removeprefix("hostname ")
        return host.name

    # A program in the place of ssh has no such option.
    if os.path.basename(words[0]) != "ssh":
        return [host.name for host in hosts]
    with ThreadPoolExecutor(max_workers=16) as pool:
        return list(pool.map(address, hosts))


@dataclass(eq=False)
class SshConnection:
    """The ssh by `argv` to `host`, whose program gets `order` and writes to `stdout`.

    `show` gets each line of standard error; `changed` None when the program is about to run, and
    how ssh has ended (in Python's form). Both are called in threads.
    """

    host: HostEntry
    argv: Sequence[str]
    order: HostOrder
    stdout: int | None
    show: Callable[[HostEntry, bytes], None]
    changed: Callable[[SshConnection, int | None], None]
    # Whether fleetrun is about to run, or has; and how ssh has ended. The caller sets them.
    is_up: bool = False
    status: int | None = None
    _process: subprocess.Popen[bytes] | None = None
    # Why we have given it up, and the last line that is not of fleetrun.
    _fault: str = ""
    _last: str = ""

    def open(self) -> None:
        """Start ssh."""
        try:
            process = subprocess.Popen(
                self.argv,
                stdin=subprocess.PIPE,
                stdout=self.stdout,
                stderr=subprocess.PIPE,
                # We handle Ctrl-C, and tell the hosts.
                start_new_session=True,
            )
        except OSError as error:
            self._last = f"it cannot be started here ({error.strerror})"
            self.changed(self, SSH_FAULT)
            return
        self._process = process
        reader = threading.Thread(target=self._read, args=(process.stderr,), daemon=True)
        reader.start()
        threading.Thread(target=self._wait, args=(process, reader), daemon=True).start()

    def _read(self, errors: IO[bytes]) -> None:
        self.send(self.order.line())
        is_up = False
        with errors:
            for text in iter(partial(errors.readline, _LONGEST_LINE), b""):
                if is_up:
                    self.show(self.host, text.removesuffix(b"\n"))
                elif text.endswith(MARK):
                    is_up = True
                    self.changed(self, None)
                else:
                    self._last = text.decode(errors="replace").strip() or self._last

    def _wait(self, process: subprocess.Popen[bytes], reader: threading.Thread) -> None:
        assert process.stdin is not None
        with process.stdin:
            status = process.wait()
        reader.join(_LAST_LINES_S)
        self.changed(self, status)

    def send(self, data: bytes) -> None:
        """Send DATA to the program, if ssh still takes any."""
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            write_all(self._process.stdin.fileno(), data)

    def kill(self, fault: str) -> None:
        """End ssh because of FAULT, and what that has started: --ssh may be a script."""
        self._fault = self._fault or fault
        if self._process is None:
            self.changed(self, SSH_FAULT)
        else:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def why(self) -> str:
        """Return why it has ended or its program was never up."""
        return self._fault or why(self.status or 0, self._last)
