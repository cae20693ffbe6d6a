"""What scripts/chaos lets go wrong: each fault says what it does, and what must come of it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from chaos_job import WITHIN_S, Job, Lost, alive, await_, state

Strike = Callable[[Job], Sequence[int]]

HUP, INT, TERM = signal.SIGHUP, signal.SIGINT, signal.SIGTERM
USR1, USR2, KILL, SEGV = signal.SIGUSR1, signal.SIGUSR2, signal.SIGKILL, signal.SIGSEGV
STOP, CONT, ABRT, BUS = signal.SIGSTOP, signal.SIGCONT, signal.SIGABRT, signal.SIGBUS


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
    # Seconds from the fault to the end that an idle machine may take, a short grace aside.
    within_s: float = WITHIN_S
    # Ranks that save a checkpoint when they are asked to end have the time to do it.
    saves: bool = False


# -- ranks -----------------------------------------------------------------------------------------


def kill_a_rank(job: Job) -> Sequence[int]:
    signum = job.draw.choice((KILL, KILL, SEGV, ABRT, BUS))
    job.strike(job.pids[job.a_rank()][0], signum)
    return [128 + signum]


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


def signal_between_attempts(job: Job) -> Sequence[int]:
    code = fail_once(job)
    time.sleep(job.draw.uniform(0.05, 2.0))
    signum = job.draw.choice((TERM, KILL))
    job.tell_launcher(signum)
    # While the first attempt still ends, its failure is the cause.
    return [-KILL] if signum == KILL else [128 + signum, code]


# -- their children --------------------------------------------------------------------------------


def signal_a_child(job: Job) -> Sequence[int]:
    children = [pid for pids in job.pids for pid in pids[1:]]
    if children:
        # A child that is somebody else every few milliseconds may be gone.
        with suppress(ProcessLookupError):
            job.strike(job.draw.choice(children), job.draw.choice((KILL, KILL, SEGV, STOP)))
    job.let_end()
    return [0]


# -- the launcher ----------------------------------------------------------------------------------


def kill_launcher(job: Job) -> Sequence[int]:
    signum = job.draw.choice((KILL, KILL, SEGV))
    job.tell_launcher(signum)
    return [-signum]


def stop_launcher(job: Job) -> Sequence[int]:
    signum = job.draw.choice((TERM, TERM, INT, HUP))
    job.tell_launcher(signum)
    return [128 + signum]


def stop_launcher_twice(job: Job) -> Sequence[int]:
    """Stop the job by signals far enough apart to be no echo of each other."""
    first, second = job.draw.choice(((TERM, TERM), (INT, INT), (TERM, INT)))
    job.tell_launcher(first)
    # On a busy machine it hears of the first late, and of both at once would be an echo.
    is_heard = "the launcher hears of the stop"
    await_(is_heard, lambda: "asked" in job.printed() or job.poll() is not None)
    time.sleep(0.15)
    job.tell_launcher(second)
    return [128 + first]


def kill_launcher_while_it_stops(job: Job) -> Sequence[int]:
    job.tell_launcher(TERM)
    time.sleep(job.draw.uniform(0, 0.2))
    job.tell_launcher(KILL)
    # All may have ended at once.
    return [-KILL, 143]


def pause_launcher(job: Job) -> Sequence[int]:
    job.tell_launcher(STOP)
    await_("the launcher stands still", lambda: state(job.launcher_pid) == "T")
    job.let_end()
    job.tell_launcher(CONT)
    return [0]


def kill_supervisor(job: Job) -> Sequence[int]:
    pid = job.launcher_pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    names = {Path(f"/proc/{child}/comm").read_text().strip(): int(child) for child in children}
    # Nobody writes the end down.
    job.has_records = False
    job.strike(names["rank-supervisor"], KILL)
    return [137]


def signal_early(job: Job) -> Sequence[int]:
    time.sleep(job.draw.uniform(0, 0.3))
    signum = job.draw.choice((TERM, INT, HUP, KILL, KILL))
    job.tell_launcher(signum)
    # Python itself has not come to our code yet (there Ctrl-C may be 1), or all are running.
    return [-signum, 128 + signum, *([1] if signum == INT else [])]


# -- output ----------------------------------------------------------------------------------------


def end_well(job: Job) -> Sequence[int]:
    job.let_end()
    return [0]


FAULTS = (
    Fault("nothing", end_well),
    Fault("rank: killed by a signal", kill_a_rank, weight=8, saves=True),
    Fault("rank: exit with a code", exit_a_rank, weight=3, saves=True),
    Fault("rank: exception", raise_in_a_rank, saves=True),
    Fault("rank: fails, peers deaf", exit_a_rank, needs_deaf=True),
    Fault("two ranks fail together", exit_two_ranks, saves=True),
    Fault("all ranks: kill -KILL", signal_all_ranks),
    Fault("restart", restart, prepare=allow_restart, weight=3),
    Fault("restart, launcher: -TERM or -KILL", signal_between_attempts, prepare=allow_restart),
    Fault("child: killed or stopped", signal_a_child, weight=5),
    Fault("launcher: killed by a signal", kill_launcher, weight=6),
    Fault("launcher: -TERM, -KILL", kill_launcher_while_it_stops, needs_deaf=True),
    Fault("launcher: -STOP, -CONT", pause_launcher),
    Fault("launcher: asked to stop", stop_launcher, weight=8, saves=True),
    Fault("launcher: asked to stop, ranks deaf", stop_launcher, needs_deaf=True),
    Fault("launcher: asked to stop twice", stop_launcher_twice, weight=5, needs_deaf=True),
    Fault("supervisor: -KILL", kill_supervisor),
    Fault("starting: a signal", signal_early, weight=10, is_early=True),
)
