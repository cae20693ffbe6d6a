"""What ssh starts on a host: runs fleetrun as ordered, as long as its standard input lives.

The first line of input is the order. Empty lines are heartbeats of the head; `stop` asks fleetrun
to end, as does the end of the input or silence: the head was killed, the connection cut, or a
laptop went to sleep.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import fleetrun
from fleetrun import __version__
from fleetrun.errors import shell_code
from fleetrun.remote import ssh
from fleetrun.run import libc
from fleetrun.rundir.folder import write_all

# Not by -m, which would take modules of the folder for Python's own.
_MAIN = os.path.join(os.path.dirname(fleetrun.__file__), "__main__.py")


def run() -> None:
    """Serve the head, and exit with fleetrun's exit code."""
    # The job's end would wait 10 ms for the interpreter's.
    os._exit(_serve(_lines()))


def _lines() -> Iterator[bytes]:
    """Yield the lines of standard input until it ends, or nothing comes for SILENCE_S seconds."""
    rest = b""
    while select.select([0], [], [], ssh.SILENCE_S)[0]:
        part = os.read(0, 1 << 16)
        if not part:
            return
        *lines, rest = (rest + part).split(b"\n")
        yield from filter(None, lines)


def _serve(lines: Iterator[bytes]) -> int:
    first = next(lines, None)
    if first is None:
        return 0
    # The line contains the token, and is not quoted.
    version, *fields = json.loads(first)
    if version != __version__:
        sys.exit(f"fleetrun is {__version__}, and {version} where the job was started.")
    order = ssh.HostOrder(*fields)
    try:
        os.chdir(order.cwd)
    except OSError as error:
        sys.exit(f"the folder {order.cwd} cannot be entered ({error.strerror}).")
    ours = os.getpid()

    def prepare() -> None:
        # If we are killed, nothing else would end the launcher.
        libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != ours:
            os._exit(0)

    write_all(2, ssh.MARK)
    process = subprocess.Popen(
        [sys.executable, _MAIN, *order.words],
        env={**os.environ, **order.environ},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=prepare,  # noqa: PLW1509 - there are no threads yet
    )
    if order.attended:
        threading.Thread(target=_obey, args=(lines, process), daemon=True).start()
    return shell_code(process.wait())


def _obey(lines: Iterator[bytes], process: subprocess.Popen[bytes]) -> None:
    """Stop fleetrun, the PROCESS, whenever the head asks, and when the head is gone."""
    is_asked = False
    for line in lines:
        if line == ssh.STOP.strip():
            is_asked = True
            _stop(process)
    if not is_asked:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    # A stopped launcher (`kill -STOP`) would not end.
    process.send_signal(signal.SIGCONT)
