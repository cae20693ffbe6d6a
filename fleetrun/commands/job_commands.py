"""`fleetrun ps`, `stop`, `attach` and `stacks`: the jobs of this user that run on this host."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click
import psutil

from fleetrun.cli.types import among
from fleetrun.commands import tables
from fleetrun.commands.logs import collectives
from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.host import jobs
from fleetrun.host.jobs import RunningJob
from fleetrun.printing import put, remark
from fleetrun.run import proc
from fleetrun.rundir import eventfile, lockfile, names, reading, runs
from fleetrun.rundir.variables import JOB
from fleetrun.text import format_duration, visible, visible_lines

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

HEADS = ("PID", "JOB", "FOR", "PROCESSES", "HOST", "FOLDER", "COMMAND")
# Ranks are asked for stacks one after the other, and an unresponsive one takes 13 s.
_STACKS_ANSWER_S = 120.0
# Processes of a killed launcher are gone within this time.
_SWEEP_S = 30.0
_AGAIN_S, _LOOK_S = 0.1, 0.005
_CHUNK, _MOST_SHOWN = 1 << 16, 8 << 10
# The exit code of `attach` for a job whose launcher was killed.
_LOST = 137


def _complete(
    _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Return the jobs whose process id or name starts with INCOMPLETE."""
    running = jobs.find()
    words = [str(job.launcher) for job in running if job.launcher is not None]
    return among([*words, *(job.name for job in running)], incomplete)


_JOB = click.argument("word", required=False, metavar="[JOB]", shell_complete=_complete)


def selected(word: str | None, running: Sequence[RunningJob], command: str) -> RunningJob:
    """Return the job of RUNNING that WORD names, by default the one of the current folder.

    A job whose launcher was killed is only meant by its name. Raises UsageError, which names
    COMMAND, unless there is exactly one.
    """
    if word is None:
        running = [job for job in running if job.launcher is not None]
        matches = [job for job in running if jobs.folder(job) == os.getcwd()]
        none = f"{command}: no job of yours runs in this folder; name one that runs elsewhere"
    else:
        matches = [*jobs.named(running, word)]
        none = ""
    if len(matches) == 1:
        return matches[0]
    listed = ", ".join(
        (job.name if job.launcher is None else f"{job.launcher} ({names.job_name(job.name)})")
        + ("" if matches else f" in {jobs.folder(job) or 'an unknown folder'}")
        for job in matches or running
    )
    if matches:
        raise UsageError(f"{command}: {len(matches)} jobs match; name one by its number: {listed}.")
    if none and running:
        raise UsageError(f"{none}: {listed}.")
    raise _unknown(word, command)


def _unknown(word: str | None, command: str) -> UsageError:
    name = "job of yours" if word is None else f'job "{word}"'
    return UsageError(f"{command}: no {name} runs on this host; `fleetrun ps` lists what does.")


@click.command("ps", help="List your jobs on this host. JOB is a process id or a name.")
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object per line.")
@click.argument("words", nargs=-1, metavar="[JOB]...", shell_complete=_complete)
def ps(words: tuple[str, ...], *, is_json: bool) -> int:
    """Print the jobs that WORDS name, or all."""
    running = jobs.find()
    wanted = [job for word in words for job in jobs.named(running, word)]
    records = [record(job) for job in running if not words or job in wanted]
    if words and running and not records:
        raise _unknown(words[0], "ps")
    if is_json:
        return put("".join(json.dumps(job) + "\n" for job in records))
    if not records:
        return put("No job of yours runs on this host.\n")
    rows = [row(job, time.time()) for job in records]
    whole = range(HEADS.index("FOLDER"))
    return put(tables.layout(rows, heads=HEADS, whole=whole, width=tables.width()) + "\n")


def row(job: Mapping[str, Any], now: float) -> list[str]:
    """Return the row of the table for the record JOB at the time NOW."""
    # The head of a job by ssh has no processes.
    processes = str(len(job["processes"]) or ("0" if job["wanted"] else "-"))
    processes += f" of {job['wanted']}" if job["wanted"] else ""
    processes += f", attempt {job['attempt']}" if job["attempt"] else ""
    nodes = len(job["nodes"])
    cells = (
        "killed" if job["pid"] is None else str(job["pid"]),
        names.job_name(job["name"]) if job["job"] or job["pid"] else job["name"],
        "-" if job["started"] is None else format_duration(now - job["started"]),
        processes,
        f"{job['node_rank'] + 1} of {nodes}" if nodes > 1 else "-",
        job["folder"] or "-",
        " ".join(job["command"]) or "-",
    )
    return [visible(cell) for cell in cells]


def record(job: RunningJob) -> dict[str, Any]:
    """Return the record of JOB for other programs."""
    run = runs.read(job.run_dir)
    plan = run.plan
    return {
        "job": run.job_id,
        "name": job.name,
        "pid": job.launcher,
        "processes": jobs.running(job),
        "wanted": run.processes,
        "attempt": run.attempt,
        "started": run.started_at,
        "nodes": () if plan is None else plan.nodes,
        "node_rank": run.node_rank,
        "command": plan.processes[0].argv if plan is not None and plan.processes else (),
        "folder": jobs.folder(job),
        "run_dir": job.run_dir,
    }


@click.command(
    "stop",
    help="Stop a job as SIGTERM does, and wait until nothing of it is left on this host. JOB is "
    "a process id or name from `fleetrun ps`; without it, the job of this folder.",
)
@click.option("--now", "is_now", is_flag=True, help="Kill the processes at once, without --grace.")
@click.option("--all", "is_all", is_flag=True, help="Stop all your jobs on this host.")
@_JOB
def stop(word: str | None, *, is_now: bool, is_all: bool) -> int:
    """Stop the job that WORD names."""
    running = jobs.find()
    if is_all and word is not None:
        raise UsageError("stop: give a JOB or --all, not both.")
    chosen = running if is_all else (selected(word, running, "stop"),)
    # Ask all before waiting for any.
    pidfds = [_launcher_of(job) for job in chosen]
    for pidfd in pidfds:
        if pidfd is not None:
            _terminate(pidfd)
    for job, pidfd in zip(chosen, pidfds, strict=True):
        pause_s = _AGAIN_S if is_now else None
        # A second signal makes a launcher kill at once; two pending signals would be one.
        while pidfd is not None and not select.select([pidfd], [], [], pause_s)[0]:
            _terminate(pidfd)
        if job.launcher is None and not _kill_all(job.name, _SWEEP_S):
            raise EnvironmentFault(
                f"stop: processes of {job.name} cannot be killed; look at `ps -e`."
            )
        run = runs.read(job.run_dir)
        name = names.job_name(job.name) if run.job_id else job.name
        pid = "" if job.launcher is None else f" (process {job.launcher})"
        remark(f"{name}{pid} has ended: {run.verdict or 'its launcher had been killed.'}")
    if not chosen:
        remark("no job of yours runs on this host.")
    return 0


def _launcher_of(job: RunningJob) -> int | None:
    """Return a descriptor of the launcher of JOB; None if it has ended."""
    if job.launcher is None:
        return None
    try:
        pidfd = os.pidfd_open(job.launcher)
    except ProcessLookupError:
        return None
    # The pid may have been reused before the descriptor was opened.
    if any(other.name == job.name and other.launcher == job.launcher for other in jobs.find()):
        return pidfd
    os.close(pidfd)
    return None


def _terminate(pidfd: int) -> None:
    # Ctrl-Z may have stopped it.
    for signum in (signal.SIGTERM, signal.SIGCONT):
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signum)


def _kill_all(name: str, seconds: float) -> bool:
    """Kill the processes of the job NAME and their descendants, for at most SECONDS.

    Return whether none is left.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        family: set[psutil.Process] = set()
        for process in psutil.process_iter():
            # Gone already, or another user's.
            with suppress(psutil.Error):
                if process.pid != os.getpid() and process.environ().get(JOB) == name:
                    family |= {process, *process.children(recursive=True)}
        if not family:
            return True
        for process in family:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(_LOOK_S)
    return False


@click.command(
    "attach",
    help="Show the console of a job started with --detach until it ends, and return its exit "
    "code. Ctrl-C leaves the job running. JOB is a process id or name from `fleetrun ps`; without "
    "it, the job of this folder.",
)
@_JOB
def attach(word: str | None) -> int:
    """Copy the console of the job that WORD names until it ends; return its exit code."""
    job = selected(word, jobs.find(), "attach")
    pidfd = _launcher_of(job)
    if pidfd is None:
        how = "was killed" if job.launcher is None else "has just ended"
        raise EnvironmentFault(
            f"attach: the launcher of {job.name} {how}; its logs are in {job.run_dir}."
        )
    console = os.path.join(job.run_dir, names.CONSOLE)
    if not os.path.exists(console):
        raise EnvironmentFault(
            f"attach: {job.name} was not started with --detach; `fleetrun logs -f {job.run_dir}` "
            "follows the output of its ranks."
        )
    with open(console, "rb", buffering=0) as file:
        # From a whole line on.
        if file.seek(max(0, os.fstat(file.fileno()).st_size - _MOST_SHOWN)):
            file.readline()
        has_ended = False
        while True:
            while part := file.read(_CHUNK):
                sys.stdout.buffer.write(part)
            sys.stdout.buffer.flush()
            if has_ended:
                break
            # Read what was written last, too.
            has_ended = bool(select.select([pidfd], [], [], _AGAIN_S)[0])
    code = runs.read(job.run_dir).exit_code
    return _LOST if code is None else code


@click.command(
    "stacks",
    help="Show the Python stacks of all ranks of a running job, and their last collectives if it "
    "records them; the job goes on. JOB is its process id or name in `fleetrun ps`; without it, "
    "the job of this folder.",
)
@_JOB
def stacks(word: str | None) -> int:
    """Ask the launcher of the job that WORD names for the stacks, and print them."""
    job = selected(word, [job for job in jobs.find() if job.launcher is not None], "stacks")
    run = job.run_dir
    before, pid = _answers(run), job.launcher
    assert pid is not None
    if (launcher := proc.stat(pid)) is not None and launcher.state in "Tt":
        raise EnvironmentFault(f"{job.name} is stopped: `fg`, or `kill -CONT {pid}`, continues it.")
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGQUIT)
    deadline = time.monotonic() + _STACKS_ANSWER_S
    while _answers(run) == before:
        if time.monotonic() > deadline or not lockfile.is_running(run):
            raise EnvironmentFault(f"{job.name} did not answer; its console may say why.")
        time.sleep(_AGAIN_S)
    for name in sorted(os.listdir(run)):
        if name.startswith("stacks.") and name.endswith(".txt"):
            content = reading.content(os.path.join(run, name)) or b""
            put(visible_lines(newest(content.decode(errors="replace"))))
    try:
        put(collectives.text(runs.hosts(runs.read(run)), None))
    except EnvironmentFault as error:
        remark(str(error))
    return 0


def _answers(run: str) -> int:
    """Count how often the launcher of RUN has reported collected stacks."""
    events = eventfile.read(os.path.join(run, names.EVENTS))
    return sum(event.more.get("what") == "stacks" for event in events if event.event == "warning")


def newest(text: str) -> str:
    r"""Return the newest entry of a file of stacks, which has one for each request.

    >>> newest("# 2026-01-02 03:04:05 rank 1: a\nx\n\n# 2026-01-02 03:04:06 rank 1: b\ny\n")
    '# 2026-01-02 03:04:06 rank 1: b\ny\n'
    """
    begin = text.rfind("\n\n# 2")
    return text[begin + 2 :] if begin >= 0 else text
