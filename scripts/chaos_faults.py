"""What scripts/chaos lets go wrong: each fault says what it does, and what must come of it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from chaos_job import WORKER, Lost, alive, await_, marked, state

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from chaos_job import Job

    Strike = Callable[[Job], Sequence[int]]

HUP, INT, QUIT, TERM = signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM
USR1, USR2, KILL, SEGV = signal.SIGUSR1, signal.SIGUSR2, signal.SIGKILL, signal.SIGSEGV
STOP, CONT = signal.SIGSTOP, signal.SIGCONT
WITHIN_S = 1.0


class Fault(NamedTuple):
    """A fault: `strike` does it when all ranks are ready, and returns the exit codes it implies."""

    name: str
    strike: Strike
    # Before the launcher starts.
    prepare: Callable[[Job], None] | None = None
    # How often it is drawn, compared with the others.
    weight: int = 2
    # Strikes at any moment of the start, rather than when all ranks are ready.
    is_early: bool = False
    # Draw at least one rank that ignores polite signals, and a short grace.
    needs_deaf: bool = False
    needs_root: bool = False
    # Seconds from the fault to the end that an idle machine may take, a short grace aside.
    within_s: float = WITHIN_S
    # Ranks that save a checkpoint when they are asked to end have the time to do it.
    saves: bool = False


# -- ranks -----------------------------------------------------------------------------------------


def signal_a_rank(signum: int) -> Strike:
    def strike(job: Job) -> Sequence[int]:
        job.strike(job.pids[job.a_rank()][0], signum)
        return [128 + signum]

    return strike


def signal_all_ranks(job: Job) -> Sequence[int]:
    for pids in job.pids:
        # The launcher may have been faster.
        with suppress(ProcessLookupError):
            job.strike(pids[0], KILL)
    return [128 + KILL]


def exit_a_rank(job: Job) -> Sequence[int]:
    code = job.draw.randrange(1, 126)
    job.order(job.a_rank(), f"exit {code}")
    return [code]


def exit_two_ranks(job: Job) -> Sequence[int]:
    first, second = job.draw.sample(range(len(job.traits)), 2)
    job.order(first, "exit 41")
    job.order(second, "exit 42")
    return [41, 42]


def raise_in_a_rank(job: Job) -> Sequence[int]:
    rank = job.a_rank()
    job.order(rank, f"raise {job.mark}")
    job.await_end()
    if f"ValueError: {job.mark}" not in job.printed() and rank != 0:
        raise Lost(f"the report does not show the exception of rank {rank}: {job.printed()}")
    return [1]


def pause_a_rank(job: Job) -> Sequence[int]:
    pid = job.pids[job.a_rank()][0]
    os.kill(pid, STOP)
    await_("the rank stands still", lambda: state(pid) == "T")
    os.kill(pid, CONT)
    job.let_end()
    return [0]


def stop_a_rank_and_job(job: Job) -> Sequence[int]:
    pid = job.pids[job.a_rank()][0]
    os.kill(pid, STOP)
    job.tell_launcher(TERM)
    return [143]


def one_ends_early(job: Job) -> Sequence[int]:
    rank = job.a_rank()
    job.order(rank, "exit 0")
    await_("the rank ends", lambda: not alive(job.pids[rank][0]))
    for other in range(len(job.traits)):
        if other != rank:
            job.order(other, "exit 0")
    return [0]


# -- restarts --------------------------------------------------------------------------------------


def allow_restart(job: Job) -> None:
    job.options = ["--max_restart=1"]


def restart(job: Job) -> Sequence[int]:
    before = [pid for pids in job.pids for pid in pids]
    fail_once(job)
    job.attempts = 2
    job.wait_until_ready()
    left = [pid for pid in before if alive(pid)]
    if left:
        raise Lost(f"{len(left)} of the first attempt live beside the second")
    job.let_end()
    return [0]


def fail_once(job: Job) -> int:
    """Let a rank fail and return the exit code that this implies."""
    rank = job.a_rank()
    if job.draw.random() < 0.5:
        code = job.draw.randrange(1, 126)
        job.order(rank, f"exit {code}")
        return code
    job.strike(job.pids[rank][0], KILL)
    return 128 + KILL


def signal_between_attempts(signum: int) -> Strike:
    def strike(job: Job) -> Sequence[int]:
        code = fail_once(job)
        time.sleep(job.draw.uniform(0.05, 2.0))
        job.tell_launcher(signum)
        # While the first attempt still ends, its failure is the cause.
        return [-KILL] if signum == KILL else [128 + signum, code]

    return strike


# -- their children --------------------------------------------------------------------------------


def signal_a_child(signum: int) -> Strike:
    def strike(job: Job) -> Sequence[int]:
        children = [pid for pids in job.pids for pid in pids[1:]]
        if children:
            # A child that is somebody else every few milliseconds may be gone.
            with suppress(ProcessLookupError):
                job.strike(job.draw.choice(children), signum)
        job.let_end()
        return [0]

    return strike


# -- the launcher ----------------------------------------------------------------------------------


def signal_launcher(*signals: int) -> Strike:
    """Stop the job by signals, far enough apart to be no echo of each other."""

    def strike(job: Job) -> Sequence[int]:
        job.tell_launcher(signals[0])
        for signum in signals[1:]:
            # On a busy machine it hears of the first late, and of both at once would be an echo.
            await_(
                "the launcher hears of the stop",
                lambda: "asked" in job.printed() or job.launcher.poll() is not None,
            )
            time.sleep(0.15)
            job.tell_launcher(signum)
        first = signals[0]
        return [-first] if first in {KILL, SEGV} else [128 + first]

    return strike


def kill_launcher_while_it_stops(job: Job) -> Sequence[int]:
    job.tell_launcher(TERM)
    time.sleep(job.draw.uniform(0, 0.2))
    job.tell_launcher(KILL)
    # All may have ended at once.
    return [-KILL, 143]


def kill_stopped_launcher(job: Job) -> Sequence[int]:
    job.tell_launcher(STOP)
    job.tell_launcher(KILL)
    return [-KILL]


def kill_by_name(job: Job) -> Sequence[int]:
    """Do what `pkill -KILL -f fleetrun` does, but to this job alone."""
    for pid, command in marked(job.mark).items():
        if "fleetrun" in command.partition(str(WORKER))[0]:
            job.strike(pid, KILL)
    return [-KILL]


def pause_launcher(job: Job) -> Sequence[int]:
    job.tell_launcher(STOP)
    await_("the launcher stands still", lambda: state(job.launcher.pid) == "T")
    job.let_end()
    job.tell_launcher(CONT)
    return [0]


def suspend_job(job: Job) -> Sequence[int]:
    job.tell_launcher(signal.SIGTSTP)
    everybody = [job.launcher.pid, *(pids[0] for pids in job.pids)]
    await_("ranks and launcher stand still", lambda: all(state(pid) == "T" for pid in everybody))
    job.tell_launcher(CONT)
    job.let_end()
    return [0]


def warn_launcher(*signals: int) -> Strike:
    """Send what is for the ranks to act on: each gets it, and the job goes on."""

    def strike(job: Job) -> Sequence[int]:
        leaders = [pids[0] for pids in job.pids]

        def heard(signum: int) -> int:
            count = 0
            for rank, pid in enumerate(leaders):
                with suppress(FileNotFoundError):
                    lines = (job.folder / f"signals.{rank}").read_text().splitlines()
                    count += lines.count(f"{pid} {int(signum)}")
            return count

        for number, signum in enumerate(signals):
            job.tell_launcher(signum)
            wanted = len(leaders) * signals[: number + 1].count(signum)
            await_(f"every rank hears {signum}", lambda: heard(signum) >= wanted)  # noqa: B023
        job.let_end()
        job.await_end()
        for signum in set(signals):
            if heard(signum) != len(leaders) * signals.count(signum):
                raise Lost(f"ranks heard {signum} {heard(signum)} times, there are {len(leaders)}")
        return [0]

    return strike


def ask_for_stacks(job: Job) -> Sequence[int]:
    job.tell_launcher(QUIT)
    time.sleep(0.1)
    job.let_end()
    return [0]


def term_and_kill_a_rank(job: Job) -> Sequence[int]:
    job.strike(job.pids[job.a_rank()][0], KILL)
    job.tell_launcher(TERM)
    return [137, 143]


def kill_guard(job: Job) -> Sequence[int]:
    pid = job.launcher.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    names = {Path(f"/proc/{child}/comm").read_text().strip(): int(child) for child in children}
    job.strike(names["rank-guard"], KILL)
    job.let_end()
    return [0]


def signal_early(signum: int) -> Strike:
    def strike(job: Job) -> Sequence[int]:
        time.sleep(job.draw.uniform(0, 0.3))
        job.tell_launcher(signum)
        # Python itself has not come to our code yet (there Ctrl-C may be 1), or all are running.
        return [-signum, 128 + signum, *([1] if signum == INT else [])]

    return strike


# -- output ----------------------------------------------------------------------------------------


def end_well(job: Job) -> Sequence[int]:
    job.let_end()
    return [0]


def close_output(job: Job) -> None:
    job.prefix = ["sh", "-c", 'exec "$@" >&-', "sh"]


def close_all(job: Job) -> None:
    job.prefix = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]


def fill_output(job: Job) -> None:
    job.prefix = ["sh", "-c", 'exec "$@" >/dev/full', "sh"]


def pipe_output(job: Job) -> None:
    job.reader, job.stdout = os.pipe()


def read_a_little(job: Job) -> Sequence[int]:
    os.close(job.stdout or 0)
    os.read(job.reader, 10)
    os.close(job.reader)
    job.let_end()
    return [0]


def read_late(job: Job) -> Sequence[int]:
    os.close(job.stdout or 0)
    job.let_end()
    await_("all ranks end", lambda: not any(alive(pids[0]) for pids in job.pids))
    with os.fdopen(job.reader, "rb") as pipe:
        job.output = pipe.read()
    return [0]


def read_never(job: Job) -> Sequence[int]:
    os.close(job.stdout or 0)
    job.let_end()
    job.await_end()
    os.close(job.reader)
    return [0]


def small_disk(size: str) -> Callable[[Job], None]:
    def prepare(job: Job) -> None:
        job.is_whole = False
        log = job.folder / "log"
        log.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", log], check=True)

    return prepare


def end_on_full_disk(job: Job) -> Sequence[int]:
    job.let_end()
    job.await_end()
    if len(job.printed().splitlines()) > 4:  # one warning from each that writes there
        raise Lost(f"a full disk makes many words: {job.printed()}")
    return [0]


def start_on_full_disk(job: Job) -> Sequence[int]:
    job.struck_at = time.monotonic()
    job.await_end()
    if "make room" not in job.printed():
        raise Lost(f"a full disk is not named: {job.printed()}")
    return [3]


def full_disk(job: Job) -> None:
    small_disk("16k")(job)
    with suppress(OSError), (job.folder / "log" / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


FAULTS = (
    Fault("nothing", end_well),
    Fault("rank: kill -KILL", signal_a_rank(KILL), weight=4, saves=True),
    Fault("rank: kill -SEGV", signal_a_rank(SEGV), weight=3, saves=True),
    Fault("rank: kill -ABRT", signal_a_rank(signal.SIGABRT), saves=True),
    Fault("rank: kill -BUS", signal_a_rank(signal.SIGBUS), saves=True),
    Fault("rank: exit with a code", exit_a_rank, weight=3, saves=True),
    Fault("rank: exception", raise_in_a_rank, saves=True),
    Fault("rank: fails, peers deaf", exit_a_rank, needs_deaf=True),
    Fault("rank: -STOP, -CONT", pause_a_rank),
    Fault("rank: -STOP, job: -TERM", stop_a_rank_and_job, needs_deaf=True),
    Fault("rank: ends well early", one_ends_early),
    Fault("two ranks fail together", exit_two_ranks, saves=True),
    Fault("all ranks: kill -KILL", signal_all_ranks),
    Fault("restart", restart, prepare=allow_restart, weight=3),
    Fault("restart, launcher: -TERM", signal_between_attempts(TERM), prepare=allow_restart),
    Fault(
        "restart, launcher: -KILL",
        signal_between_attempts(KILL),
        prepare=allow_restart,
    ),
    Fault("child: kill -KILL", signal_a_child(KILL), weight=3),
    Fault("child: kill -SEGV", signal_a_child(SEGV)),
    Fault("child: kill -STOP", signal_a_child(STOP)),
    Fault("launcher: -KILL", signal_launcher(KILL), weight=5),
    Fault("launcher: -SEGV", signal_launcher(SEGV)),
    Fault("launcher: -STOP, -KILL", kill_stopped_launcher),
    Fault(
        "launcher: -TERM, -KILL",
        kill_launcher_while_it_stops,
        needs_deaf=True,
    ),
    Fault("pkill -KILL -f fleetrun", kill_by_name),
    Fault("launcher: -STOP, -CONT", pause_launcher),
    Fault("launcher: -TSTP, -CONT", suspend_job),
    Fault("launcher: -TERM", signal_launcher(TERM), weight=4, saves=True),
    Fault("launcher: -TERM, ranks deaf", signal_launcher(TERM), needs_deaf=True),
    Fault("launcher: -INT", signal_launcher(INT), weight=3, saves=True),
    Fault("launcher: -HUP", signal_launcher(HUP), saves=True),
    Fault("launcher: -TERM twice", signal_launcher(TERM, TERM), needs_deaf=True),
    Fault("launcher: -INT twice", signal_launcher(INT, INT), needs_deaf=True),
    Fault("launcher: -TERM, -INT", signal_launcher(TERM, INT), needs_deaf=True),
    Fault("launcher: -USR1", warn_launcher(USR1)),
    Fault("launcher: -USR1 twice", warn_launcher(USR1, USR1)),
    Fault("launcher: -USR2", warn_launcher(USR2)),
    Fault("launcher: -QUIT", ask_for_stacks),
    Fault("launcher: -TERM, rank: -KILL", term_and_kill_a_rank, saves=True),
    Fault("guard: -KILL", kill_guard),
    Fault("starting: -TERM", signal_early(TERM), weight=4, is_early=True),
    Fault("starting: -INT", signal_early(INT), is_early=True),
    Fault("starting: -HUP", signal_early(HUP), is_early=True),
    Fault("starting: -KILL", signal_early(KILL), weight=4, is_early=True),
    Fault("stdout closed", end_well, prepare=close_output),
    Fault("stdin, stdout, stderr closed", end_well, prepare=close_all),
    Fault("stdout full", end_well, prepare=fill_output),
    Fault("reader goes", read_a_little, prepare=pipe_output),
    Fault("reader is late", read_late, prepare=pipe_output),
    Fault("reader stops", read_never, prepare=pipe_output, weight=1, within_s=12.0),
    Fault("disk fills up", end_on_full_disk, prepare=small_disk("160k"), needs_root=True),
    Fault("disk is full", start_on_full_disk, prepare=full_disk, is_early=True, needs_root=True),
)
