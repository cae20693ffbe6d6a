"""Ranks that start warm: forked from a process that holds Paddle, warm/server.py."""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path
from zlib import crc32

from waiting import TRAINING_S, until

WARM = Path(__file__).parent / "warm"


def warm(python: Path, **loading: str) -> dict[str, str]:
    """Return the variables with which ranks that PYTHON runs start warm.

    LOADING are variables that count when Paddle is loaded, besides its flags.
    """
    return {"PYTHONPATH": str(WARM), "TEST_WARM_SOCKET": _server(python, **loading), **loading}


_one_at_a_time = threading.Lock()
servers: list[subprocess.Popen[bytes]] = []


def _server(python: Path, **loading: str) -> str:
    # Some tests launch from several threads.
    with _one_at_a_time:
        return _started(python, tuple(sorted(loading.items())))


@cache
def _folder() -> Path:
    """Return a folder for the servers, which all workers of pytest-xdist share."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return Path(tempfile.mkdtemp(prefix="warm"))
    folder = Path(tempfile.gettempdir(), f"warm-{run[:12]}")
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@cache
def _started(python: Path, loading: tuple[tuple[str, str], ...]) -> str:
    """Start the server of PYTHON's Paddle, if nobody has; it ends with the last who asked."""
    # The path of a socket has at most 107 characters.
    folder = _folder() / f"{crc32(repr((python, loading)).encode()):08x}"
    folder.mkdir(exist_ok=True)
    path, users = folder / "socket", folder / "users"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not users.exists():
            os.mkfifo(users, 0o600)
        # Both ends, which waits for nobody. It is open as long as this process lives.
        os.open(users, os.O_RDWR)
        if not path.exists():
            _start(python, path, users, dict(loading))
    return str(path)


def _start(python: Path, path: Path, users: Path, loading: dict[str, str]) -> None:
    with users.open("rb") as stdin:
        server = subprocess.Popen(
            [python, WARM / "server.py", path],
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            cwd=path.parent,
            env={
                name: value
                for name, value in os.environ.items()
                # What some test has set counts for its own ranks only.
                if not name.startswith(("PYTHONPATH", "PADDLE_", "FLAGS_", "FLEETRUN_"))
            }
            | loading,
        )
    # It outlives us where others use it, and removes its folder.
    servers.append(server)
    until(lambda: path.exists() or server.poll() is not None, TRAINING_S)
    assert server.poll() is None, "the server of warm ranks has ended"
