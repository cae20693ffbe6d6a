"""Real processes in tests: who is alive, found by a marker variable over all of /proc."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from waiting import LONG_S, until

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MARKER = "FLEETRUN_TEST_MARKER"
# Less than the minute for which ranks of tests sleep: what ends by itself would not be noticed.
_GONE_S = 40.0


def kill_what_was_left(since_s: float) -> None:
    """Kill what a failed test, which began SINCE_S after the machine, has not waited for itself.

    Else it would hold ports of others, and a test that has no part in it be blamed for it.
    """
    import gc  # only after a failure

    from warming import servers

    objects = gc.get_objects()
    for job in [one for one in objects if isinstance(one, Job)]:
        for pid in survivors(job.marker):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    ticks = int(since_s * os.sysconf("SC_CLK_TCK"))
    for process in [one for one in objects if isinstance(one, subprocess.Popen)]:
        stat = _read(Path(f"/proc/{process.pid}/stat")) if process.returncode is None else b""
        if not stat or int(stat.rpartition(b")")[2].split()[19]) < ticks or process in servers:
            continue
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def survivors(marker: str) -> dict[int, str]:
    """Return the living processes whose environment says MARKER=marker, with their commands."""
    entry = f"\0{MARKER}={marker}\0".encode()
    processes = {}
    for folder in Path("/proc").iterdir():
        # The environment of a zombie is empty, so it does not count as alive.
        if folder.name.isdigit() and entry in b"\0" + _read(folder / "environ"):
            command = _read(folder / "cmdline").replace(b"\0", b" ").decode(errors="replace")
            processes[int(folder.name)] = command
    processes.pop(os.getpid(), None)
    return processes


def assert_no_survivors(marker: str, seconds: float = _GONE_S) -> None:
    """Fail if a process of MARKER is alive; after a kill -9 the guard needs a moment."""
    try:
        until(lambda: not survivors(marker), seconds)
    except AssertionError:
        message = f"these outlived the launcher: {survivors(marker)}"
        raise AssertionError(message) from None


DRIVER = Path(__file__).parent / "process" / "driver.py"


def piped(
    argv: Sequence[str],
    env: Mapping[str, str],
    folder: Path,
    **popen: Any,
) -> subprocess.Popen[bytes]:
    """Start ARGV in FOLDER; its standard output and error are pipes unless POPEN says else."""
    usual: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    return subprocess.Popen(  # pyright: ignore[reportReturnType] - nobody asks for text
        argv, env=env, cwd=folder, **{**usual, **popen}
    )


class Job:
    """What the launches in a folder leave there; their processes are under a fresh marker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.marker = uuid.uuid4().hex

    def wait_for(self, *names: str) -> None:
        """Wait until ranks have made these files in the folder."""
        until(lambda: all((self.folder / name).exists() for name in names))

    def log(self, rank: int) -> Path:
        """Return where users look for a rank's output."""
        return self.folder / "log" / f"workerlog.{rank}"

    def events(self) -> list[dict[str, Any]]:
        """Return what the last launch has written down so far."""
        try:
            text = (self.folder / "log" / "latest" / "events.jsonl").read_text()
        except FileNotFoundError:
            return []
        # While it is written, a reader may see half of the last line, which is none.
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]


class Launch(Job):
    """A launcher in a process of its own, running shell commands as ranks."""

    def __init__(self, folder: Path, *commands: str | list[str], **wanted: object) -> None:
        super().__init__(folder)
        argvs = [["sh", "-c", one] if isinstance(one, str) else one for one in commands]
        document = {"commands": argvs, "folder": str(folder), **wanted}
        self._spec = folder / f"{self.marker}.json"
        self._spec.write_text(json.dumps(document))

    def start(
        self,
        prefix: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        **popen: Any,
    ) -> subprocess.Popen[bytes]:
        """Start the launcher; its standard output and error are pipes unless POPEN says else."""
        argv = [*prefix, sys.executable, str(DRIVER), str(self._spec)]
        whole = {**os.environ, MARKER: self.marker, **(env or {})}
        return piped(argv, whole, self.folder, **popen)

    def run(self, **popen: Any) -> subprocess.CompletedProcess[bytes]:
        """Run the launcher to its end; nobody may be left."""
        return self.finish(self.start(**popen))

    def finish(
        self, process: subprocess.Popen[bytes], seconds: float = LONG_S
    ) -> subprocess.CompletedProcess[bytes]:
        """Wait for the end of a started launcher; nobody may be left."""
        try:
            out, err = process.communicate(timeout=seconds)
        finally:
            process.kill()
        assert_no_survivors(self.marker, 0.0)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)
