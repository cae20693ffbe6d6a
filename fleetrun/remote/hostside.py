"""What ssh starts on a host: runs fleetrun as ordered, as long as its standard input lives.

The first line of input is the order. Empty lines are heartbeats of the head; `stop` asks fleetrun
to end, as does the end of the input or silence: the head was killed, the connection cut, or a
laptop went to sleep.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

import fleetrun
from fleetrun import __version__
from fleetrun.errors import EnvironmentFault, shell_code
from fleetrun.remote import logs, ssh
from fleetrun.remote.ssh import HostOrder
from fleetrun.run import libc
from fleetrun.rundir.folder import write_all

_CHUNK = 1 << 16
# Not by -m, which would take modules of the folder for Python's own.
_MAIN = os.path.join(os.path.dirname(fleetrun.__file__), "__main__.py")
# The exit code if nothing was started.
_UNUSED = 0


class Lifeline:
    """The lines of standard input; `is_over` once no more will come within SILENCE_S seconds."""

    def __init__(self, silence_s: float) -> None:
        self.silence_s = silence_s
        self.is_over = False
        self._rest = b""

    def read(self, *, is_ready: bool = False) -> list[bytes]:
        """Return the lines that have arrived; unless IS_READY, wait for input."""
        if not is_ready:
            is_ready = bool(select.select([0], [], [], self.silence_s)[0])
        part = os.read(0, _CHUNK) if is_ready else b""
        self.is_over = not part
        *lines, self._rest = (self._rest + part).split(b"\n")
        return [line for line in lines if line]


def run(silence_s: float = ssh.SILENCE_S) -> None:
    """Serve the head, and exit with fleetrun's exit code.

    A head that is silent for SILENCE_S seconds counts as gone.
    """
    # The job's end would wait 10 ms for the interpreter's.
    os._exit(_serve(Lifeline(silence_s)))


def _serve(head: Lifeline) -> int:
    lines: list[bytes] = []
    while not lines and not head.is_over:
        lines = head.read()
    if not lines:
        return _UNUSED
    order = ssh.read(lines[0])
    if order is None or order.version != __version__:
        there = "of another version" if order is None else order.version
        return _refuse(f"fleetrun is {__version__}, and {there} where the job was started.")
    if not os.path.isdir(order.cwd):
        return _refuse(f"there is no folder {order.cwd}.")
    for fd in (1, 2):
        write_all(fd, b"\n" + ssh.MARK + b"\n")
    if order.run:
        logs.send(order.run, is_all=order.logs == logs.ALL)
        return 0
    process = _start(order)
    code = _watch(process, head, is_asked=ssh.STOP.strip() in lines[1:])
    if order.logs and not head.is_over:
        run_dir = logs.find(os.path.join(order.cwd, order.log_dir), process.pid)
        if run_dir is not None:
            write_all(2, ssh.MARK + os.fsencode(run_dir) + b"\n")
    return code


def _refuse(sentence: str) -> int:
    write_all(2, sentence.encode() + b"\n")
    return EnvironmentFault.exit_code


def _start(order: HostOrder) -> subprocess.Popen[bytes]:
    """Start fleetrun as ORDER says."""
    ours = os.getpid()

    def prepare() -> None:
        # If we are killed, nothing else would end the launcher.
        libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != ours:
            os._exit(_UNUSED)

    return subprocess.Popen(
        [sys.executable, _MAIN, *order.words],
        cwd=order.cwd,
        env={**os.environ, **order.environ},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=prepare,  # noqa: PLW1509 - there are no threads
    )


def _watch(process: subprocess.Popen[bytes], head: Lifeline, *, is_asked: bool) -> int:
    """Wait for the end of PROCESS, which HEAD may stop; return its exit code."""
    pidfd = os.pidfd_open(process.pid)
    if is_asked:
        _stop(pidfd)
    while True:
        watched = [pidfd] if head.is_over else [pidfd, 0]
        ready, _, _ = select.select(watched, [], [], None if head.is_over else head.silence_s)
        if pidfd in ready:
            return shell_code(process.wait())
        lines = head.read(is_ready=True) if ready else []
        head.is_over = head.is_over or not ready
        if ssh.STOP.strip() in lines or (head.is_over and not is_asked):
            _stop(pidfd)
            is_asked = True


def _stop(pidfd: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        # A stopped launcher (`kill -STOP`) would not end.
        signal.pidfd_send_signal(pidfd, signal.SIGCONT)
