"""Ranks that start warm: forked from a process that holds Paddle's library, warm/server.py."""

from __future__ import annotations

import atexit
import os
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path

from waiting import until

WARM = Path(__file__).parent / "warm"


def warm(python: Path) -> dict[str, str]:
    """Return the variables with which ranks that PYTHON runs start warm."""
    return {"PYTHONPATH": str(WARM), "FLEETRUN_TEST_WARM": _server(python)}


_one_at_a_time = threading.Lock()


def _server(python: Path) -> str:
    # Some tests launch from several threads.
    with _one_at_a_time:
        return _started(python)


@cache
def _started(python: Path) -> str:
    """Start the server of PYTHON's Paddle, once in this process; it ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="warm")
    path = Path(folder.name) / "socket"
    server = subprocess.Popen(
        [python, WARM / "server.py", path],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        cwd=folder.name,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )

    def stop() -> None:
        assert server.stdin is not None
        server.stdin.close()
        server.wait()
        folder.cleanup()

    atexit.register(stop)
    until(lambda: path.exists() or server.poll() is not None, 120.0)
    assert server.poll() is None, "the server of warm ranks has ended"
    return str(path)
