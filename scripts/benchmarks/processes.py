"""One launch, watched from outside: when its ranks came and went, and what the launcher cost."""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import os
import select
import signal
import subprocess
import tempfile
import time
from collections import defaultdict
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

HERE = Path(__file__).parent
WORKER = str(HERE / "worker.py")
MARK = "BENCH_MARK"
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
TIMEOUT_S = 120
# The run directory's plan, manifest and pruning, and git, belong to the start.
_SETTLE_S = 3.0
# How a line of flood.py ends.
_LINE_END = b" images a second\n"
_serial = itertools.count()

# A launch must not find the variables of another one.
# (PYTHONDONTWRITEBYTECODE would have every launch compile its modules anew.)
_PREFIXES = (
    "CUDA_VISIBLE",
    "PYTHONDONTWRITE",
    "PADDLE_",
    "FLAGS_",
    "NCCL_",
    "GLOO_",
    "FLEETRUN_",
    "TRAINER_",
    "POD_",
)


class Failed(Exception):
    """A launch that did not do what was measured, with its last word."""


class Launch(NamedTuple):
    """What one launch was seen to do; seconds, and bytes for the peak."""

    first_line_s: float
    last_line_s: float
    exit_lag_s: float
    cpu_s: float
    peak_rss: int
    idle_share: float | None


def adopt_orphans() -> None:
    """Become the parent of processes that lose theirs, so that all can be found and reaped."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


@contextmanager
def place() -> Iterator[tuple[Path, dict[str, str]]]:
    """Make a folder and an environment for one launch; kill and remove whatever is left of it."""
    mark = f"{os.getpid()}-{next(_serial)}"
    env = {name: value for name, value in os.environ.items() if not name.startswith(_PREFIXES)}
    env[MARK] = mark
    with tempfile.TemporaryDirectory(prefix="fleetrun-bench-", ignore_cleanup_errors=True) as name:
        try:
            yield Path(name), env
        finally:
            _clean(mark)


def _clean(mark: str) -> None:
    """Kill every process that carries MARK in its environment, and reap what became ours."""
    for _ in range(100):
        pids = marked(mark)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not pids:
            return
        time.sleep(0.01)


def marked(mark: str) -> list[int]:
    """Return the living processes with MARK in their environment; a zombie has none."""
    needle = f"{MARK}={mark}".encode()
    numbers = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]  # noqa: PTH208
    return [pid for pid in numbers if pid != os.getpid() and needle in _environ(pid)]


def _environ(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


class Reports:
    """What the ranks of a launch report in a pipe in FOLDER, and the lock that holds them."""

    def __init__(self, folder: Path) -> None:
        reports, lock = folder / "said", folder / "lock"
        os.mkfifo(reports)
        # Both ends, so that the pipe neither waits for a writer nor ends with one.
        self._ear = os.open(reports, os.O_RDWR | os.O_NONBLOCK)
        self._lock = os.open(lock, os.O_CREAT | os.O_RDWR)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.env = {"BENCH_SAID": str(reports), "BENCH_LOCK": str(lock)}
        self._rest = b""
        self._heard: dict[str, list[float]] = defaultdict(list)

    def release(self) -> None:
        """Let the ranks that wait for the lock go on."""
        fcntl.flock(self._lock, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the pipe and the lock."""
        os.close(self._ear)
        os.close(self._lock)

    def hear(
        self,
        word: str,
        count: float,
        launchers: Sequence[subprocess.Popen[bytes]] = (),
        timeout_s: float = TIMEOUT_S,
    ) -> list[float]:
        """Return, once, the numbers that ranks reported with WORD.

        They are fewer than COUNT if all LAUNCHERS have ended, or after TIMEOUT_S.
        """
        deadline = time.monotonic() + timeout_s
        ends = {
            os.pidfd_open(launcher.pid) for launcher in launchers if launcher.returncode is None
        }
        running = set(ends)
        while len(self._heard[word]) < count and (left_s := deadline - time.monotonic()) > 0:
            have_ended = bool(launchers) and not running
            ready = select.select([self._ear, *running], [], [], 0 if have_ended else left_s)[0]
            if self._ear in ready:
                *lines, self._rest = (self._rest + os.read(self._ear, 65536)).split(b"\n")
                for line in lines:
                    heard, number = line.decode().split()
                    self._heard[heard].append(float(number))
            elif have_ended:
                break
            running -= set(ready)
        for end in ends:
            os.close(end)
        return self._heard.pop(word)

    def expect(
        self,
        word: str,
        count: int,
        launchers: Sequence[subprocess.Popen[bytes]],
        output: Path,
        timeout_s: float = TIMEOUT_S,
    ) -> list[float]:
        """Return what COUNT ranks reported with WORD; Failed if so many do not."""
        heard = self.hear(word, count, launchers, timeout_s)
        if len(heard) < count:
            raise Failed(f"only {len(heard)} of {count} ranks said {word}: {last_word(output)}")
        return heard


def start(argv: Sequence[str], folder: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start ARGV in FOLDER and in a session of its own; its output goes to a file there."""
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(
            argv,
            env=env,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def watch(
    argv: Sequence[str], ranks: int, *, env: Mapping[str, str] | None = None, idle_s: float = 0
) -> Launch:
    """Launch ARGV, which must start RANKS workers, and see what it does."""
    with place() as (folder, base):
        reports, output = Reports(folder), folder / "output"
        started = time.monotonic()
        launcher = start(argv, folder, {**base, **reports.env, **(env or {})})
        try:
            first = reports.expect("first", ranks, [launcher], output)
            time.sleep(_SETTLE_S)
            idle_share = _idle(launcher.pid, idle_s) if idle_s else None
            peak = _peak_rss(launcher.pid)
            reports.release()
            ended, cpu_s, code = _see_exit(launcher)
            last = reports.expect("end", ranks, (), output)
        finally:
            if launcher.returncode is None:
                launcher.kill()
                launcher.wait()
            reports.close()
        if code:
            raise Failed(f"exit code {code}: {last_word(output)}")
        return Launch(
            first_line_s=min(first) - started,
            last_line_s=max(first) - started,
            exit_lag_s=ended - max(last),
            cpu_s=cpu_s,
            peak_rss=peak,
            idle_share=idle_share,
        )


def last_word(output: Path) -> str:
    """Return the last line of the file OUTPUT."""
    lines = output.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "without a word")


def _see_exit(launcher: subprocess.Popen[bytes]) -> tuple[float, float, int]:
    """Wait for LAUNCHER; return when it ended, the CPU seconds that were its own, and its code."""
    exits = os.pidfd_open(launcher.pid)
    try:
        if not select.select([exits], [], [], TIMEOUT_S)[0]:
            raise Failed("it did not end with its ranks")
        at = time.monotonic()
    finally:
        os.close(exits)
    # Still a zombie: its own times can be read, while wait4 would add those of its children.
    fields = Path(f"/proc/{launcher.pid}/stat").read_text().rpartition(")")[2].split()
    cpu_s = (int(fields[11]) + int(fields[12])) * _TICK_S
    return at, cpu_s, launcher.wait()


def _peak_rss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _idle(pid: int, seconds: float) -> float:
    """Return the share of a core that process PID uses while its ranks are quiet."""
    before, at = on_cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    return (on_cpu_s(pid) - before) / (time.monotonic() - at)


def on_cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads of process PID, to the nanosecond."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def wall_s(argv: Sequence[str], env: Mapping[str, str]) -> float:
    """Return how long ARGV runs; its output goes nowhere."""
    with place() as (folder, base):
        whole = {**base, **env}
        started = time.monotonic()
        done = subprocess.run(argv, env=whole, cwd=folder, stdout=subprocess.DEVNULL, check=False)
        took = time.monotonic() - started
        if done.returncode:
            raise Failed(f"{' '.join(argv)} exited with {done.returncode}")
        return took


class Flood(NamedTuple):
    """What it took a rank to print its lines, and how many of them came where."""

    took_s: float
    cpu_s: float
    lines_in_log: int
    lines_on_console: int | None


def flood(
    argv: Sequence[str],
    lines: int,
    *,
    log: str,
    console: bool,
    env: Mapping[str, str] | None = None,
) -> Flood:
    """Run ARGV, whose one rank prints LINES to the file LOG, and read its console to the end."""
    with place() as (folder, base):
        took = folder / "took"
        whole = {**base, "BENCH_LINES": str(lines), "BENCH_TOOK": str(took), **(env or {})}
        seen, rest = 0, b""
        with subprocess.Popen(
            argv,
            env=whole,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        ) as launcher:
            assert launcher.stdout is not None  # we asked for a pipe
            while piece := os.read(launcher.stdout.fileno(), 1 << 20):
                # What ends a line may come in two pieces.
                seen += (rest + piece).count(_LINE_END)
                rest = (rest + piece)[1 - len(_LINE_END) :]
        if launcher.returncode:
            raise Failed(f"{' '.join(argv)} exited with {launcher.returncode}")
        with (folder / log).open("rb") as file:
            in_log = sum(line.endswith(_LINE_END) for line in file)
        took_s, cpu_s = map(float, took.read_text().split())
        return Flood(took_s, cpu_s, in_log, seen if console else None)
