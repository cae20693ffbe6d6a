"""`fleetrun stacks`: shows the Python stacks of a running job's ranks, and their collectives."""

from __future__ import annotations

import os
import time

import click

from fleetrun.commands import ps
from fleetrun.commands.logs import collectives
from fleetrun.errors import EnvironmentFault
from fleetrun.host import jobs
from fleetrun.printing import put, remark
from fleetrun.rundir import eventfile, names, reading, runs
from fleetrun.text import visible_lines

# Ranks answer one after the other, and an unresponsive one takes 13 s.
_ANSWER_S = 120.0
_AGAIN_S = 0.1


@click.command(
    "stacks",
    help="Show the Python stacks of all ranks of a running job, and their last collectives if it "
    "records them; the job goes on. JOB is its process id or name in `fleetrun ps`; without it, "
    "the job of this folder.",
)
@click.argument("word", required=False, metavar="[JOB]", shell_complete=ps.complete)
def command(word: str | None) -> int:
    """Ask the launcher of the job that WORD names for the stacks, and print them."""
    running = tuple(job for job in jobs.find() if job.launcher is not None)
    job = ps.meant(word, running, "stacks")
    run = job.run_dir
    events = os.path.join(run, names.EVENTS)
    before = _answers(events)
    if not jobs.ask_for_stacks([run]):
        raise EnvironmentFault(f"{job.name} has just ended.")
    deadline = time.monotonic() + _ANSWER_S
    while _answers(events) == before:
        if time.monotonic() > deadline or not runs.is_running(run):
            raise EnvironmentFault(f"{job.name} did not answer; its console may say why.")
        time.sleep(_AGAIN_S)
    for name in sorted(os.listdir(run)):
        if name.startswith("stacks.") and name.endswith(".txt"):
            content = reading.content(os.path.join(run, name)) or b""
            # A file has the stacks of each request, each with a heading.
            put(visible_lines(newest(content.decode(errors="replace"))))
    try:
        put(collectives.text(runs.hosts(runs.read(run)), None))
    except EnvironmentFault as error:
        remark(str(error))
    return 0


def _answers(events: str) -> int:
    """Count how often the launcher has reported collected stacks."""
    warnings = (event for event in eventfile.read(events) if event.event == "warning")
    return sum(event.more.get("what") == "stacks" for event in warnings)


def newest(text: str) -> str:
    r"""Return the newest entry of a file of stacks.

    >>> newest("# 2026-01-02 03:04:05 rank 1: a\nx\n\n# 2026-01-02 03:04:06 rank 1: b\ny\n")
    '# 2026-01-02 03:04:06 rank 1: b\ny\n'
    """
    begin = text.rfind("\n\n# 2")
    return text[begin + 2 :] if begin >= 0 else text
