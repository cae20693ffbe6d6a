"""Real processes in tests: living ones are found in /proc by a marker variable."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from waiting import until

if TYPE_CHECKING:
    from pathlib import Path

MARKER = "FLEETRUN_TEST_MARKER"
# Less than the minute that ranks of tests sleep, so that none of them can end by itself unnoticed.
_GONE_S = 40.0


def kill_what_was_left(since_s: float) -> None:
    """Kill what a failed test, which began SINCE_S after the machine, has not waited for itself.

    Else it would hold ports of others, and a test that has no part in it be blamed for it.
    """
    import gc  # only after a failure

    objects = gc.get_objects()
    for job in [item for item in objects if isinstance(item, Job)]:
        for pid in survivors(job.marker):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    ticks = int(since_s * os.sysconf("SC_CLK_TCK"))
    for process in [item for item in objects if isinstance(item, subprocess.Popen)]:
        stat = _read(f"/proc/{process.pid}/stat") if process.returncode is None else b""
        if not stat or int(stat.rpartition(b")")[2].split()[19]) < ticks:
            continue
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def _read(path: str) -> bytes:
    # Each test looks at all processes: no Path, which takes ten times as long.
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return b"".join(iter(lambda: os.read(descriptor, 1 << 16), b""))
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def survivors(marker: str) -> dict[int, str]:
    """Return the living processes whose environment says MARKER=marker, with their commands."""
    entry = f"\0{MARKER}={marker}\0".encode()
    processes = {}
    for name in os.listdir("/proc"):
        # The environment of a zombie is empty, so it does not count as alive.
        if name.isdigit() and entry in b"\0" + _read(f"/proc/{name}/environ"):
            command = _read(f"/proc/{name}/cmdline").replace(b"\0", b" ").decode(errors="replace")
            processes[int(name)] = command
    processes.pop(os.getpid(), None)
    return processes


def supervisor_of(launcher: int) -> int:
    """Return the process that LAUNCHER, the one that was started, has forked to do the work."""
    with open(f"/proc/{launcher}/task/{launcher}/children") as file:
        (supervisor,) = map(int, file.read().split())
    return supervisor


def assert_no_survivors(marker: str, seconds: float = _GONE_S) -> None:
    """Fail if a process of MARKER is alive; after a kill -9 the supervisor needs a moment."""
    try:
        until(lambda: not survivors(marker), seconds)
    except AssertionError:
        raise AssertionError(f"these outlived the launcher: {survivors(marker)}") from None


class Job:
    """What the launches in a folder leave there; their processes are under a fresh marker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.marker = uuid.uuid4().hex

    def wait_for(self, *names: str) -> None:
        """Wait until ranks have made these files in the folder."""
        until(lambda: all((self.folder / name).exists() for name in names))

    def log(self, rank: int) -> Path:
        """Return the path of a rank's log."""
        return self.folder / "log" / f"workerlog.{rank}"

    def events(self) -> list[dict[str, Any]]:
        """Return the events of the last launch so far."""
        try:
            text = (self.folder / "log" / "latest" / "events.jsonl").read_text()
        except FileNotFoundError:
            return []
        # While it is written, a reader may see half of the last line, which is none.
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]
