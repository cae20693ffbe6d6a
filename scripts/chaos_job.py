"""One launch of scripts/chaos, seen from outside: its ranks, their children, what is left."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chaos_faults import Fault

ROOT = Path(__file__).parents[1]
WORKER = Path(__file__).with_name("chaos_worker.py")
PREFIXES = ("CUDA_VISIBLE", "PADDLE_", "FLAGS_", "NCCL_", "GLOO_", "FLEETRUN_", "TRAINER_", "POD_")
CHILDREN = ("child", "daemon", "bare", "lost", "potato")
MOST_RANKS = 8
# What does not happen by then on a busy machine has not happened.
TIMEOUT_S = 30.0
# From a fault to the end of the launcher, and to a rank's hearing of a stop, on an idle machine.
WITHIN_S, HEARD_S = 1.0, 0.5
# Seconds of grace: long where nobody may need it, short where somebody surely does.
LONG_GRACE_S, SHORT_GRACE_S = 20.0, 0.3


class Lost(Exception):
    """Something that must not happen, in words."""


def await_(what: str, condition: Callable[[], object], seconds: float = TIMEOUT_S) -> None:
    """Return as soon as CONDITION holds; Lost if WHAT does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise Lost(f"{what}: not within {seconds:g} s")
        time.sleep(0.005)


def alive(pid: int) -> bool:
    """Whether PID runs: neither gone nor a zombie."""
    return state(pid) not in {"", "Z", "X"}


def state(pid: int) -> str:
    """Return the letter that stands for what PID does; nothing if it is gone."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return ""


def marked(mark: str) -> dict[int, str]:
    """Return the living processes with MARK in their environment or command line."""
    needle, commands = mark.encode(), {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - hundreds of times
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with suppress(OSError):
            command = Path(f"/proc/{entry}/cmdline").read_bytes()
            if needle in command or needle in Path(f"/proc/{entry}/environ").read_bytes():
                commands[int(entry)] = command.replace(b"\0", b" ").decode(errors="replace").strip()
    return commands


def environ(**more: str) -> dict[str, str]:
    """Return the environment of a launcher, without the variables of another launch."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIXES)}
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), **more}


def slack() -> float:
    """Return how many times as long as on an idle machine an end may take, by the load here."""
    return max(2.0, 4 * os.getloadavg()[0] / (os.cpu_count() or 1))


class Job:
    """A launch in FOLDER, whose name is unique; every random choice is drawn from `draw`."""

    def __init__(self, folder: Path, fault: Fault, draw: random.Random) -> None:
        self.folder = folder
        self.mark = folder.name
        self.draw = draw
        self.traits = _traits(draw, fault)
        is_deaf = any("deaf" in traits for traits in self.traits)
        self.grace_s = SHORT_GRACE_S if is_deaf and "twice" not in fault.name else LONG_GRACE_S
        # Under a short grace a busy machine kills before anything can be saved.
        self.saves = fault.saves and not is_deaf
        # What this launch adds to the seconds that its end may take.
        self.more_s = SHORT_GRACE_S if is_deaf else 0.0
        self.options: list[str] = []
        self.struck_at = 0.0
        # Whether the end is to be in the records.
        self.has_records = True
        # The ranks that a fault has hit.
        self.struck: set[int] = set()
        self.attempts = 1
        # Ranks and their children, once they are ready.
        self.pids: list[list[int]] = []
        self.launcher: subprocess.Popen[bytes] | None = None
        self._prepare = fault.prepare

    def start(self) -> None:
        """Start the launcher."""
        self.folder.mkdir()
        if self._prepare is not None:
            self._prepare(self)
        for rank in range(len(self.traits)):
            os.mkfifo(self.folder / f"orders.{rank}")
        command = [sys.executable, "-m", "fleetrun", "--quiet", f"--grace={self.grace_s}"]
        command += [f"--nproc_per_node={len(self.traits)}", *self.options]
        command += [str(WORKER), str(self.folder)]
        with (self.folder / "stdout").open("wb") as out, (self.folder / "stderr").open("wb") as err:
            self.launcher = subprocess.Popen(
                [*command, *self.traits],
                env=environ(CHAOS_MARK=self.mark),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Wait until every rank and its children are there."""
        files = [self.folder / f"ready.{rank}" for rank in range(len(self.traits))]

        def ready() -> bool:
            if (code := self.poll()) is not None:
                raise Lost(f"the launcher ended by itself with {code}: {self.printed()}")
            texts = [file.read_bytes() if file.exists() else b"" for file in files]
            return all(text.count(b"\n") == self.attempts for text in texts)

        await_("all ranks are ready", ready)
        lines = [file.read_text().splitlines()[-1] for file in files]
        self.pids = [[int(pid) for pid in line.split()] for line in lines]

    # What can be done to it ---------------------------------------------------------------------

    def strike(self, pid: int, signum: int) -> None:
        """Send SIGNUM to PID and remember when."""
        self.struck_at = time.monotonic()
        self.struck |= {rank for rank, pids in enumerate(self.pids) if pid == pids[0]}
        os.kill(pid, signum)

    def tell_launcher(self, signum: int) -> None:
        """Send SIGNUM to the launcher, if it is still there."""
        self.struck_at = time.monotonic()
        if self.launcher is not None:
            self.launcher.send_signal(signum)

    def order(self, rank: int, words: str) -> None:
        """Tell RANK how to end."""
        self.struck.add(rank)
        self.struck_at = time.monotonic()
        pipe = os.open(self.folder / f"orders.{rank}", os.O_RDWR)
        os.write(pipe, words.encode())
        # The rank has both ends too, so the words stay.
        os.close(pipe)

    def let_end(self) -> None:
        """Let every rank end well."""
        for rank in range(len(self.traits)):
            self.order(rank, "exit 0")

    def a_rank(self) -> int:
        """Draw a rank."""
        return self.draw.randrange(len(self.traits))

    # What must hold -----------------------------------------------------------------------------

    def finish(self, codes: Sequence[int]) -> float:
        """Wait for the end and check everything; return the seconds from the fault to the end."""
        code = self.await_end()
        took_s = time.monotonic() - self.struck_at
        if code < 0:
            # Whoever ends a job whose launcher was killed needs a moment.
            with suppress(Lost):
                await_("nobody is left", lambda: not marked(self.mark), 5.0)
            took_s = time.monotonic() - self.struck_at
        if left := marked(self.mark):
            raise Lost(f"these outlived the launcher: {left}")
        if code not in codes:
            wanted = " or ".join(map(str, codes))
            raise Lost(f"exit code {code} instead of {wanted}: {self.printed()}")
        self._check_logs()
        self._check_events(code)
        self._check_console(code)
        if self.saves:
            self._check_saved(HEARD_S * slack())
        return took_s

    def await_end(self) -> int:
        """Wait until the launcher ends and return its code."""
        try:
            await_("the launcher ends", lambda: self.poll() is not None)
        except Lost:
            who = [f"{pid} {state(pid)}" for pids in self.pids for pid in pids if alive(pid)]
            raise Lost(f"the launcher hangs; alive: {who}") from None
        return self.poll() or 0

    @property
    def launcher_pid(self) -> int:
        """The launcher's pid; 0 before it is started."""
        return self.launcher.pid if self.launcher is not None else 0

    def poll(self) -> int | None:
        """Return the launcher's exit code, or None while it runs."""
        return self.launcher.poll() if self.launcher is not None else None

    def printed(self) -> str:
        """Return what the launcher said."""
        return (self.folder / "stderr").read_text(errors="replace").strip()

    def clear(self) -> None:
        """Kill what a failed launch has left."""
        while processes := marked(self.mark):
            for pid in processes:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        if self.launcher is not None:
            self.launcher.wait()

    def log(self, rank: int) -> bytes:
        """Return what RANK has written, nothing if it never came to it."""
        try:
            return (self.folder / "log" / "latest" / f"workerlog.{rank}").read_bytes()
        except FileNotFoundError:
            return b""

    def _check_saved(self, allowed_s: float) -> None:
        """Each rank that saves a checkpoint when it is asked to end was asked, and in time."""
        for rank, traits in enumerate(self.traits):
            if "saver" not in traits.split("+") or rank in self.struck or not self.pids:
                continue
            file = self.folder / f"saved.{rank}"
            if not file.exists():
                raise Lost(f"rank {rank} was not asked to end, and saved nothing")
            took_s = float(file.read_text()) - self.struck_at
            if took_s > allowed_s:
                delay = f"rank {rank} was asked to end {took_s:.1f} s after the fault"
                raise Lost(f"{delay}, {allowed_s:.1f} s are allowed")

    def _check_logs(self) -> None:
        """Every log holds its rank's lines, from the first on, in order, each whole."""
        for rank, pids in enumerate(self.pids):
            text = self.log(rank)
            lines = [line for line in text.splitlines(keepends=True) if line.startswith(b"rank ")]
            wanted = [b"rank %d line %d\n" % (rank, number) for number in range(len(lines))]
            if lines != wanted or len(lines) < (20 if pids else 0):
                raise Lost(f"the log of rank {rank} is torn: {text[-300:]!r}")

    def _check_events(self, code: int) -> None:
        """events.jsonl is whole to its last line, and ends as the launcher did."""
        file = self.folder / "log" / "latest" / "events.jsonl"
        if not file.exists():
            if self.pids and code >= 0:
                raise Lost("there is no events.jsonl")
            return
        text = file.read_text()
        try:
            events: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
        except ValueError as error:
            raise Lost(f"events.jsonl is not valid ({error}): {text[-300:]!r}") from None
        if text and not text.endswith("\n"):
            raise Lost(f"the last line of events.jsonl has no end: {text[-300:]!r}")
        if code >= 0 and self.has_records:
            last = events[-1] if events else {}
            if (last.get("event"), last.get("exit_code")) != ("finished", code):
                raise Lost(f"events.jsonl ends with {last}, the launcher with {code}")

    def _check_console(self, code: int) -> None:
        """All that rank 0 wrote has come to the console, unless who writes there was killed."""
        if self.options:
            # The console has all attempts one after the other, a log has one.
            return
        output, log = (self.folder / "stdout").read_bytes(), self.log(0)
        is_whole = code >= 0 and self.has_records
        if not log.startswith(output) or (is_whole and output != log):
            raise Lost(
                f"the console has {len(output)} bytes that end with {output[-100:]!r}, "
                f"the log has {len(log)} that end with {log[-100:]!r}"
            )
        # Ctrl-C before our first line shows where Python was.
        own = "Traceback" in self.printed() and "KeyboardInterrupt" not in self.printed()
        logs = b"".join(self.log(rank) for rank in range(len(self.traits)))
        if own and b"Traceback" not in logs:
            raise Lost(f"the launcher itself failed: {self.printed()}")


def _traits(draw: random.Random, fault: Fault) -> list[str]:
    """Draw the ranks, and what children and manners each has."""
    ranks = draw.randint(2, MOST_RANKS)
    traits = []
    for rank in range(ranks):
        words = ["plain"]
        words += [kind for kind in CHILDREN if draw.random() < (0.02, 0.15)[kind != "potato"]]
        if draw.random() < 0.2:
            words.append("saver")
        if draw.random() < 0.1 or (rank == 0 and fault.prepare is not None):
            words.append("chatty")
        if fault.needs_deaf and draw.random() < 0.5:
            words.append("deaf")
        traits.append("+".join(words))
    if fault.needs_deaf and not any("deaf" in words for words in traits):
        traits[draw.randrange(ranks)] += "+deaf"
    return traits
