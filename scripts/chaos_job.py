"""One launch of scripts/chaos, seen from outside: its ranks, their children, what is left."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence


WORKER = Path(__file__).with_name("chaos_worker.py")
_PREFIXES = ("CUDA_VISIBLE", "PADDLE_", "FLAGS_", "NCCL_", "GLOO_", "FLEETRUN_", "TRAINER_", "POD_")
# What does not happen by then on a busy machine has not happened.
TIMEOUT_S = 30.0
_LOOK_AGAIN_S = 0.005
# How long it may take on an idle machine until a rank hears of a stop.
_HEARD_S = 0.5


class Lost(Exception):
    """Something that must not happen, in words."""


def await_(what: str, condition: Callable[[], object], seconds: float = TIMEOUT_S) -> None:
    """Return as soon as CONDITION holds; Lost if WHAT does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise Lost(f"{what}: not within {seconds:g} s")
        time.sleep(_LOOK_AGAIN_S)


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


def own_mounts() -> bool:
    """Let what we mount be ours alone and vanish with us; False without the right to."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_namespace, private = 0x20000, 1 << 18 | 1 << 14
    return (
        os.geteuid() == 0
        and libc.unshare(new_namespace) == 0
        and libc.mount(b"none", b"/", None, private, None) == 0
    )


def slack() -> float:
    """Return how many times as long as on an idle machine an end may take, by the load here."""
    return max(2.0, 4 * os.getloadavg()[0] / (os.cpu_count() or 1))


class Job:
    """A launch in FOLDER, whose name is unique; every random choice is drawn from `draw`."""

    def __init__(self, folder: Path, traits: Sequence[str], draw: random.Random) -> None:
        self.folder = folder
        self.mark = folder.name
        self.traits = traits
        self.draw = draw
        self.grace_s = 5.0
        # Around the command: words before it, more options, and where its standard output goes.
        self.prefix: list[str] = []
        self.options: list[str] = []
        self.stdout: int | None = None
        # What a reader saw of the console; None where nobody looks.
        self.output: bytes | None = None
        self.reader = -1
        self.struck_at = 0.0
        # The ranks that a fault has hit.
        self.struck: set[int] = set()
        self.is_whole = True
        self.attempts = 1
        # Ranks and their children, once they are ready.
        self.pids: list[list[int]] = []

    def start(self) -> None:
        """Start the launcher."""
        self.folder.mkdir(exist_ok=True)
        for rank in range(len(self.traits)):
            os.mkfifo(self.folder / f"orders.{rank}")
        env = {k: v for k, v in os.environ.items() if not k.startswith(_PREFIXES)}
        env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(WORKER.parents[1])}
        command = [sys.executable, "-m", "fleetrun", "--quiet", f"--grace={self.grace_s}"]
        command += [f"--nproc_per_node={len(self.traits)}", *self.options]
        command += [str(WORKER), str(self.folder)]
        with (self.folder / "stdout").open("wb") as out, (self.folder / "stderr").open("wb") as err:
            self.launcher = subprocess.Popen(
                [*self.prefix, *command, *self.traits],
                env={**env, "CHAOS_MARK": self.mark},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out if self.stdout is None else self.stdout,
                stderr=err,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Wait until every rank and its children are there."""
        files = [self.folder / f"ready.{rank}" for rank in range(len(self.traits))]

        def ready() -> bool:
            if self.launcher.poll() is not None:
                code = self.launcher.returncode
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
        self.launcher.send_signal(signum)

    def order(self, rank: int, words: str) -> None:
        """Let RANK do as it is told: `exit CODE` or `raise MESSAGE`."""
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

    def finish(
        self, codes: Sequence[int], within_s: float, *, saves: bool = False
    ) -> tuple[float, float]:
        """Wait for the end and check everything; return the seconds from the fault to the end.

        And how many were allowed, WITHIN_S on an idle machine. If the job SAVES, every rank that
        can save a checkpoint has, as soon as it could hear of the end.
        """
        code = self.await_end()
        took = time.monotonic() - self.struck_at
        if code < 0:
            # Whoever ends a job whose launcher was killed needs a moment.
            with suppress(Lost):
                await_("nobody is left", lambda: not marked(self.mark), 5.0)
            took = time.monotonic() - self.struck_at
        left = marked(self.mark)
        if left:
            raise Lost(f"these outlived the launcher: {left}")
        if code not in codes:
            raise Lost(
                f"exit code {code} instead of {' or '.join(map(str, codes))}: {self.printed()}"
            )
        self._check_logs()
        self._check_events(code)
        self._check_console(code)
        slowdown = slack()
        if saves:
            self._check_saved(_HEARD_S * slowdown)
        allowed = within_s * slowdown
        if took > allowed:
            raise Lost(f"it ended {took:.1f} s after the fault, {allowed:.1f} s are allowed")
        return took, allowed

    def _check_saved(self, allowed: float) -> None:
        """Each rank that saves a checkpoint when it is asked to end was asked, and in time."""
        for rank, traits in enumerate(self.traits):
            if "saver" not in traits.split("+") or rank in self.struck or not self.pids:
                continue
            try:
                text = (self.folder / f"saved.{rank}").read_text()
            except FileNotFoundError:
                raise Lost(f"rank {rank} was not asked to end, and saved nothing") from None
            took = float(text) - self.struck_at
            if took > allowed:
                delay = f"rank {rank} was asked to end {took:.1f} s after the fault"
                raise Lost(f"{delay}, {allowed:.1f} s are allowed")

    def await_end(self) -> int:
        """Wait until the launcher ends and return its code."""
        if self.launcher.poll() is not None:
            return self.launcher.returncode
        # Popen's own wait looks twenty times a second.
        pidfd = os.pidfd_open(self.launcher.pid)
        try:
            ended = select.select([pidfd], [], [], TIMEOUT_S)[0]
        finally:
            os.close(pidfd)
        if not ended:
            who = [f"{pid} {state(pid)}" for pids in self.pids for pid in pids if alive(pid)]
            raise Lost(f"the launcher hangs; alive: {who}")
        return self.launcher.wait()

    def printed(self) -> str:
        """Return what the launcher said."""
        return (self.folder / "stderr").read_text(errors="replace").strip()

    def clear(self) -> None:
        """Kill what a failed launch has left."""
        for _ in range(100):
            processes = marked(self.mark)
            for pid in processes:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not processes:
                break
            time.sleep(0.01)
        if hasattr(self, "launcher"):
            self.launcher.wait()

    def log(self, rank: int) -> bytes:
        """Return what RANK has written, nothing if it never came to it."""
        try:
            return (self.folder / "log" / "latest" / f"workerlog.{rank}").read_bytes()
        except FileNotFoundError:
            return b""

    def _check_logs(self) -> None:
        """Every log holds its rank's lines, from the first on, in order, each whole."""
        for rank, pids in enumerate(self.pids):
            text = self.log(rank)
            prefix = b"rank %d line " % rank
            lines = [line for line in text.splitlines(keepends=True) if line.startswith(b"rank ")]
            wanted = [b"%s%d\n" % (prefix, number) for number in range(len(lines))]
            if lines != wanted and self.is_whole:
                raise Lost(f"the log of rank {rank} is torn: {text[-300:]!r}")
            least = 20 if pids and self.is_whole else 0
            if len(lines) < least:
                raise Lost(f"the log of rank {rank} has {len(lines)} lines: {text[-300:]!r}")

    def _check_events(self, code: int) -> None:
        """events.jsonl is whole to its last line, and ends as the launcher did."""
        try:
            text = (self.folder / "log" / "latest" / "events.jsonl").read_text()
        except FileNotFoundError:
            if self.pids and self.is_whole and code >= 0:
                raise Lost("there is no events.jsonl") from None
            return
        try:
            events: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
        except ValueError as error:
            raise Lost(f"events.jsonl is not valid ({error}): {text[-300:]!r}") from None
        if text and not text.endswith("\n"):
            raise Lost(f"the last line of events.jsonl has no end: {text[-300:]!r}")
        if code >= 0 and self.is_whole:
            last = events[-1] if events else {}
            if (last.get("event"), last.get("exit_code")) != ("finished", code):
                raise Lost(f"events.jsonl ends with {last}, the launcher with {code}")

    def _check_console(self, code: int) -> None:
        """All that rank 0 wrote has come to the console, unless nobody wanted it there."""
        if self.stdout is None and not self.prefix:
            self.output = (self.folder / "stdout").read_bytes()
        if self.output is None or not self.is_whole or self.options:
            # The console has all attempts one after the other, a log has one.
            return
        log = self.log(0)
        if not log.startswith(self.output) or (code >= 0 and self.output != log):
            raise Lost(
                f"the console has {len(self.output)} bytes that end with {self.output[-100:]!r}, "
                f"the log has {len(log)} that end with {log[-100:]!r}"
            )
        # Ctrl-C before our first line shows where Python was.
        own = "Traceback" in self.printed() and "KeyboardInterrupt" not in self.printed()
        logs = b"".join(self.log(rank) for rank in range(len(self.traits)))
        if own and b"Traceback" not in logs:
            raise Lost(f"the launcher itself failed: {self.printed()}")
