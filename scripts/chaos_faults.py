"""What scripts/chaos lets go wrong: each fault says what it does, and what must come of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from chaos_job import WITHIN_S, WORKER, Job, Lost, alive, await_, marked, state

Strike = Callable[[Job], Sequence[int]]

HUP, INT, QUIT, TERM = signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM
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
    await_("the launcher stands still", lambda: state(job.launcher_pid) == "T")
    job.let_end()
    job.tell_launcher(CONT)
    return [0]


def suspend_job(job: Job) -> Sequence[int]:
    job.tell_launcher(signal.SIGTSTP)
    everybody = [job.launcher_pid, *(pids[0] for pids in job.pids)]
    await_("ranks and launcher stand still", lambda: all(state(pid) == "T" for pid in everybody))
    job.tell_launcher(CONT)
    job.let_end()
    return [0]


def warn_launcher(job: Job) -> Sequence[int]:
    """Send what is for the ranks to act on, once or twice: each gets it, and the job goes on."""
    signum, times = job.draw.choice((USR1, USR2)), job.draw.randint(1, 2)
    leaders = [pids[0] for pids in job.pids]

    def count() -> int:
        files = [job.folder / f"signals.{rank}" for rank in range(len(leaders))]
        lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
        return sum(lines.count(f"{pid} {int(signum)}") for pid in leaders)

    for time_ in range(1, times + 1):
        job.tell_launcher(signum)
        wanted = len(leaders) * time_
        await_(f"every rank hears {signum}", lambda: count() >= wanted)  # noqa: B023
    job.let_end()
    job.await_end()
    if count() != len(leaders) * times:
        raise Lost(f"ranks heard {signum} {count()} times, there are {len(leaders)}")
    return [0]


def ask_for_stacks(job: Job) -> Sequence[int]:
    job.tell_launcher(QUIT)
    time.sleep(0.1)
    job.let_end()
    return [0]


def term_and_kill_a_rank(job: Job) -> Sequence[int]:
    job.strike(job.pids[job.a_rank()][0], KILL)
    job.tell_launcher(TERM)
    return [137, 143]


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


def redirect(words: str) -> Callable[[Job], None]:
    def prepare(job: Job) -> None:
        job.prefix = ["sh", "-c", f'exec "$@" {words}', "sh"]

    return prepare


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


FAULTS = (
    Fault("nothing", end_well),
    Fault("rank: killed by a signal", kill_a_rank, weight=8, saves=True),
    Fault("rank: exit with a code", exit_a_rank, weight=3, saves=True),
    Fault("rank: exception", raise_in_a_rank, saves=True),
    Fault("rank: fails, peers deaf", exit_a_rank, needs_deaf=True),
    Fault("rank: -STOP, -CONT", pause_a_rank),
    Fault("rank: -STOP, job: -TERM", stop_a_rank_and_job, needs_deaf=True),
    Fault("rank: ends well early", one_ends_early),
    Fault("two ranks fail together", exit_two_ranks, saves=True),
    Fault("all ranks: kill -KILL", signal_all_ranks),
    Fault("restart", restart, prepare=allow_restart, weight=3),
    Fault("restart, launcher: -TERM or -KILL", signal_between_attempts, prepare=allow_restart),
    Fault("child: killed or stopped", signal_a_child, weight=5),
    Fault("launcher: killed by a signal", kill_launcher, weight=6),
    Fault("launcher: -STOP, -KILL", kill_stopped_launcher),
    Fault("launcher: -TERM, -KILL", kill_launcher_while_it_stops, needs_deaf=True),
    Fault("pkill -KILL -f fleetrun", kill_by_name),
    Fault("launcher: -STOP, -CONT", pause_launcher),
    Fault("launcher: -TSTP, -CONT", suspend_job),
    Fault("launcher: asked to stop", stop_launcher, weight=8, saves=True),
    Fault("launcher: asked to stop, ranks deaf", stop_launcher, needs_deaf=True),
    Fault("launcher: asked to stop twice", stop_launcher_twice, weight=5, needs_deaf=True),
    Fault("launcher: -USR1 or -USR2", warn_launcher, weight=5),
    Fault("launcher: -QUIT", ask_for_stacks),
    Fault("launcher: -TERM, rank: -KILL", term_and_kill_a_rank, saves=True),
    Fault("supervisor: -KILL", kill_supervisor),
    Fault("starting: a signal", signal_early, weight=10, is_early=True),
    Fault("stdout closed", end_well, prepare=redirect(">&-")),
    Fault("stdin, stdout, stderr closed", end_well, prepare=redirect("<&- >&- 2>&-")),
    Fault("stdout full", end_well, prepare=redirect(">/dev/full")),
    Fault("reader goes", read_a_little, prepare=pipe_output),
    Fault("reader is late", read_late, prepare=pipe_output),
    Fault("reader stops", read_never, prepare=pipe_output, weight=1, within_s=12.0),
)
