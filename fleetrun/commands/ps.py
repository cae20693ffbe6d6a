"""`fleetrun ps`: the jobs that run on this host as this user."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import click

from fleetrun.commands import tables
from fleetrun.errors import UsageError
from fleetrun.plan.visible import visible
from fleetrun.printing import put
from fleetrun.probe import jobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from click.shell_completion import CompletionItem

    from fleetrun.probe.jobs import JobRecords, RunningJob

HEADS = ("PID", "JOB", "FOR", "PROCESSES", "HOST", "COMMAND", "FOLDER")
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def complete(
    _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Return the jobs whose process id or name starts with INCOMPLETE."""
    from click.shell_completion import CompletionItem  # only for Tab

    words = [str(job.launcher) for job in jobs.find() if job.launcher is not None]
    words += [job.name for job in jobs.find()]
    return [CompletionItem(word) for word in words if word.startswith(incomplete)]


@click.command("ps", help="List the jobs that run on this host as this user.")
@click.option("--json", "is_json", is_flag=True, help="One JSON object a line, for programs.")
@click.argument("words", nargs=-1, metavar="[JOB]...", shell_complete=complete)
def command(words: tuple[str, ...], *, is_json: bool) -> int:
    """Print the jobs that WORDS name, or all."""
    found = jobs.find()
    if words:
        found = tuple(job for job in found if any(job in jobs.named(found, one) for one in words))
    now = time.time()
    reported = [(job, jobs.about(job)) for job in found]
    if is_json:
        return put("".join(json.dumps(record(*one)) + "\n" for one in reported))
    if not reported:
        return put("No job of yours runs on this host.\n")
    width = tables.width()
    cut = [HEADS.index("COMMAND"), HEADS.index("FOLDER")]
    rows = tables.fitted([row(*one, now) for one in reported], HEADS, cut=cut, width=width)
    whole = range(len(HEADS))
    return put(tables.layout(rows, heads=HEADS, numbers=1, width=width, whole=whole) + "\n")


def row(job: RunningJob, about: JobRecords, now: float) -> list[str]:
    """Return JOB's line of the table, at the time NOW."""
    alive = len(jobs.running(job))
    processes = f"{alive} of {about.wanted}" if about.wanted else str(alive)
    if about.attempt:
        processes += f", attempt {about.attempt}"
    host = f"{about.node_rank + 1} of {len(about.nodes)}" if len(about.nodes) > 1 else "-"
    cells = (
        "killed" if job.launcher is None else str(job.launcher),
        about.job_id or job.name,
        "-" if about.started is None else duration(now - about.started),
        processes,
        host,
        " ".join(about.argv) or "-",
        about.cwd or "-",
    )
    return [visible(cell) for cell in cells]


def record(job: RunningJob, about: JobRecords) -> dict[str, Any]:
    """Return what is known of JOB, for programs."""
    return {
        "job": about.job_id,
        "name": job.name,
        "pid": job.launcher,
        "processes": jobs.running(job),
        "wanted": about.wanted,
        "attempt": about.attempt,
        "started": about.started,
        "nodes": about.nodes,
        "node_rank": about.node_rank,
        "command": about.argv,
        "folder": about.cwd,
        "run_dir": job.run_dir,
    }


def duration(seconds: float) -> str:
    """Write SECONDS shortly.

    >>> duration(59.9), duration(61), duration(7325), duration(200000)
    ('59s', '1m01s', '2h02m', '2d07h')
    """
    whole = max(0, int(seconds))
    if whole < _MINUTE:
        return f"{whole}s"
    if whole < _HOUR:
        return f"{whole // _MINUTE}m{whole % _MINUTE:02d}s"
    if whole < _DAY:
        return f"{whole // _HOUR}h{whole % _HOUR // _MINUTE:02d}m"
    return f"{whole // _DAY}d{whole % _DAY // _HOUR:02d}h"


def one(word: str | None, found: Sequence[RunningJob], what: str) -> RunningJob:
    """Return the one of FOUND that WORD means, for the command WHAT; UsageError if none or many."""
    meant = tuple(found) if word is None else jobs.named(found, word)
    if len(meant) == 1:
        return meant[0]
    if not meant:
        which = "job of yours" if word is None else f"job {word}"
        raise UsageError(f"{what}: no {which} runs on this host; `fleetrun ps` lists what does.")
    listed = ", ".join(job.name if job.launcher is None else str(job.launcher) for job in meant)
    raise UsageError(f"{what}: {len(meant)} jobs may be meant; say which by its number: {listed}.")
