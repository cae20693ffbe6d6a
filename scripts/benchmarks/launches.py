"""Launches that are measured from outside: when their ranks came and went, and what is left."""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WORKER, VICTIM = str(HERE / "worker.py"), str(HERE / "victim.py")
TIMEOUT_S = 120
MARK = "BENCH_MARK"
_serial = itertools.count()
# A launch must not find the variables of another one.
# (PYTHONDONTWRITEBYTECODE would have every launch compile its modules anew.)
_PREFIXES = (
    *("CUDA_VISIBLE", "PYTHONDONTWRITE", "PADDLE_", "FLAGS_", "NCCL_", "GLOO_"),
    *("FLEETRUN_", "TRAINER_", "POD_"),
)

BARE, OURS = "bare loop", "fleetrun"
# The same command again: its difference is the machine's.
AGAIN = "fleetrun again"
FLEETRUN = (str(Path(sys.executable).with_name("fleetrun")),)
_LOOP = """
i=0
while [ $i -lt "$1" ]; do
    PADDLE_TRAINER_ID=$i "$2" -u "$3" >"workerlog.$i" 2>&1 &
    i=$((i + 1))
done
wait
"""
_PADDLE = (sys.executable, "-m")
TORCHRUN = shutil.which("torchrun") or str(Path(sys.executable).with_name("torchrun"))
# What launches RANKS workers. Those of frameworks import them, which takes seconds.
PEERS: Mapping[str, tuple[str, ...]] = {
    BARE: ("sh", "-c", _LOOP, "sh", "{ranks}", sys.executable, "{program}"),
    OURS: (*FLEETRUN, "--nproc_per_node={ranks}", "{program}"),
    AGAIN: (*FLEETRUN, "--nproc_per_node={ranks}", "{program}"),
    "paddle launch": (
        *(*_PADDLE, "paddle.distributed.launch"),
        *("--nproc_per_node={ranks}", "{program}"),
    ),
    "torchrun": (TORCHRUN, "--nproc-per-node={ranks}", "{program}"),
}


def command(template: Sequence[str], **values: object) -> list[str]:
    """Return the command of TEMPLATE, whose {NAMES} stand for VALUES."""
    return [word.format(**values) for word in template]


def is_light(name: str) -> bool:
    """Whether the launcher NAME imports no framework."""
    return not name.startswith(("paddle", "torchrun"))


def peers(ranks: int, heavy_ranks: int) -> dict[str, tuple[str, ...]]:
    """Return what is compared with so many RANKS; those that import a framework up to a bound."""
    return {
        name: template
        for name, template in PEERS.items()
        if (ranks <= heavy_ranks or is_light(name))
        and (name != "torchrun" or os.access(TORCHRUN, os.X_OK))
    }


class Failed(Exception):
    """A launch that did not do what was measured, with its last word."""


def adopt_orphans() -> None:
    """Become the parent of processes that lose theirs, so that all can be found and reaped."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def environ(**more: str) -> dict[str, str]:
    """Return the environment of a launch: fleetrun from here, on CPUs where no GPU is asked for."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_PREFIXES)}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


def marked(mark: str) -> list[int]:
    """Return the living processes with MARK in their environment; a zombie has none."""
    pids = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if (
                entry.name.isdigit()
                and int(entry.name) != os.getpid()
                and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes()
            ):
                pids.append(int(entry.name))
    return pids


class Job:
    """Launchers, what their ranks report in a pipe, and the lock that holds the ranks."""

    def __init__(self, folder: Path, mark: str) -> None:
        self.folder = folder
        self.mark = mark
        self.launchers: list[subprocess.Popen[bytes]] = []
        self.began = time.monotonic()
        os.mkfifo(folder / "said")
        # Both ends, so that the pipe neither waits for a writer nor ends with one.
        self._reports = os.open(folder / "said", os.O_RDWR | os.O_NONBLOCK)
        self._lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._rest = b""
        self._numbers: dict[str, list[float]] = defaultdict(list)

    def release(self) -> None:
        """Let the ranks that wait for the lock go on."""
        fcntl.flock(self._lock, fcntl.LOCK_UN)

    def hear(self, word: str, count: float, timeout_s: float = TIMEOUT_S) -> list[float]:
        """Return, once, the numbers that ranks reported with WORD.

        They are fewer than COUNT if all launchers have ended, or after TIMEOUT_S.
        """
        deadline = time.monotonic() + timeout_s
        ends = {os.pidfd_open(child.pid) for child in self.launchers if child.returncode is None}
        running = set(ends)
        while len(self._numbers[word]) < count and (left_s := deadline - time.monotonic()) > 0:
            wait_s = left_s if running else 0
            ready = select.select([self._reports, *running], [], [], wait_s)[0]
            if self._reports in ready:
                *lines, self._rest = (self._rest + os.read(self._reports, 65536)).split(b"\n")
                for line in lines:
                    name, number = line.decode().split()
                    self._numbers[name].append(float(number))
            elif not running:
                break
            running -= set(ready)
        for end in ends:
            os.close(end)
        return self._numbers.pop(word)

    def expect(self, word: str, count: int, timeout_s: float = TIMEOUT_S) -> list[float]:
        """Return what COUNT ranks reported with WORD; Failed if so many do not."""
        numbers = self.hear(word, count, timeout_s)
        if len(numbers) < count:
            raise Failed(f"only {len(numbers)} of {count} ranks said {word}: {self.last_word()}")
        return numbers

    def await_end(self, timeout_s: float = TIMEOUT_S) -> float:
        """Return when the last launcher ended; Failed if one does not, or fails."""
        ended = self.see_end(timeout_s)
        for child in self.launchers:
            if child.wait():
                raise Failed(f"exit code {child.returncode}: {self.last_word()}")
        return ended

    def see_end(self, timeout_s: float = TIMEOUT_S) -> float:
        """Return when the last launcher ended, as a zombie that can be looked at; or Failed."""
        deadline = time.monotonic() + timeout_s
        for child in self.launchers:
            end = os.pidfd_open(child.pid)
            left_s = max(0.0, deadline - time.monotonic())
            is_over = bool(select.select([end], [], [], left_s)[0])
            os.close(end)
            if not is_over:
                raise Failed("it did not end with its ranks")
        return time.monotonic()

    def last_word(self) -> str:
        """Return the last line of the first launcher's output."""
        lines = (self.folder / "0" / "output").read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "without a word")

    def clean(self) -> None:
        """Kill every process of the launch, and reap what became ours."""
        for child in self.launchers:
            child.kill()
            child.wait()
        for descriptor in (self._reports, self._lock):
            os.close(descriptor)
        while pids := marked(self.mark):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.01)


@contextmanager
def launch(*commands: Sequence[str], stdout: int | None = None, **env: str) -> Iterator[Job]:
    """Start COMMANDS, each in a folder and session of its own; in the end nothing is left."""
    with tempfile.TemporaryDirectory(prefix="fleetrun-bench-", ignore_cleanup_errors=True) as name:
        mark = f"{os.getpid()}-{next(_serial)}"
        job = Job(Path(name), mark)
        told = {"BENCH_SAID": f"{name}/said", "BENCH_LOCK": f"{name}/lock", "BENCH_FOLDER": name}
        folders = [job.folder / str(number) for number in range(len(commands))]
        for own in folders:
            own.mkdir()
        try:
            job.began = time.monotonic()
            for own, words in zip(folders, commands, strict=True):
                with (own / "output").open("wb") as output:
                    job.launchers.append(
                        subprocess.Popen(
                            words,
                            env=environ(**told, **env, **{MARK: mark}),
                            cwd=own,
                            stdin=subprocess.DEVNULL,
                            stdout=output if stdout is None else stdout,
                            stderr=subprocess.STDOUT if stdout is None else None,
                            start_new_session=True,
                        )
                    )
            yield job
        finally:
            job.clean()


def on_cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads of process PID, to the nanosecond."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9
