"""`fleetrun ps`: lists this user's running jobs, on this host or on those of --hosts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from fleetrun.cli import parser
from fleetrun.cli.types import among
from fleetrun.commands import tables
from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.host import jobs
from fleetrun.host.jobs import JobRecords, RunningJob
from fleetrun.plan.command import CHECK
from fleetrun.printing import put, remark
from fleetrun.remote import everywhere, ssh, sshjob
from fleetrun.rundir import names, reading
from fleetrun.text import format_duration, visible

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


# With several hosts, the first column is the host.
ON = "ON"
HEADS = ("PID", "JOB", "FOR", "PROCESSES", "HOST", "FOLDER", "COMMAND")
# The seconds a host has to answer, including the start of ssh and Python.
_ANSWER_S = 60.0


def complete(
    _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Return the jobs whose process id or name starts with INCOMPLETE."""
    running = jobs.find()
    words = [str(job.launcher) for job in running if job.launcher is not None]
    return among([*words, *(job.name for job in running)], incomplete)


def _ps(words: tuple[str, ...], *, is_json: bool, **hosts: str | None) -> int:
    """Print the jobs that WORDS name, or all."""
    options = [f"--{name}={value}" for name, value in hosts.items() if value is not None]
    if options:
        return _on_hosts(options, words, is_json=is_json)
    running = jobs.find()
    if words:
        named = [jobs.named(running, word) for word in words]
        running = tuple(job for job in running if any(job in several for several in named))
    return _show([record(job, jobs.about(job)) for job in running], is_json=is_json)


def _on_hosts(options: Sequence[str], words: tuple[str, ...], *, is_json: bool) -> int:
    """Print the jobs on the hosts of OPTIONS; return 3 if a host does not answer."""
    request = parser.launch_request([*options, CHECK], os.environ)
    if not (request.hosts or request.hostfile):
        raise UsageError(f"ps: {options[0]} reaches the hosts of --hosts or --hostfile: give one.")
    hosts = sshjob.listed(request)
    order = ssh.HostOrder("/", words=("ps", "--json", *words))
    results = everywhere.run(ssh.words_of(request), hosts, [order] * len(hosts), _ANSWER_S)
    records = [
        {"on": host.name, **parsed}
        for host, (output, _) in zip(hosts, results, strict=True)
        for line in output.splitlines()
        if (parsed := reading.parse(line)) is not None and "run_dir" in parsed
    ]
    code = _show(records, is_json=is_json, where="these hosts")
    for host, (_, failure) in zip(hosts, results, strict=True):
        if failure:
            remark(f"ps: {host.name}  {failure}")
            code = EnvironmentFault.exit_code
    return code


def _show(records: Sequence[Mapping[str, Any]], *, is_json: bool, where: str = "this host") -> int:
    """Print RECORDS of jobs, on the hosts WHERE."""
    if is_json:
        return put("".join(json.dumps(job) + "\n" for job in records))
    if not records:
        return put(f"No job of yours runs on {where}.\n")
    heads = (ON, *HEADS) if ON.lower() in records[0] else HEADS
    now, width = time.time(), tables.width()
    cut = [heads.index("COMMAND"), heads.index("FOLDER")]
    rows = [[*([visible(job["on"])] if heads[0] == ON else []), *row(job, now)] for job in records]
    rows = tables.fitted(rows, heads, cut=cut, width=width)
    whole = range(len(heads))
    numbers = 0 if heads[0] == ON else 1
    return put(tables.layout(rows, heads=heads, numbers=numbers, width=width, whole=whole) + "\n")


def row(job: Mapping[str, Any], now: float) -> list[str]:
    """Return the row of the table for the record JOB at the time NOW."""
    # The head of a job by ssh has no processes.
    processes = str(len(job["processes"]) or ("0" if job["wanted"] else "-"))
    if job["wanted"]:
        processes += f" of {job['wanted']}"
    if job["attempt"]:
        processes += f", attempt {job['attempt']}"
    nodes = len(job["nodes"])
    cells = (
        "killed" if job["pid"] is None else str(job["pid"]),
        called(job["name"], is_known=bool(job["job"] or job["pid"])),
        "-" if job["started"] is None else format_duration(now - job["started"], is_short=True),
        processes,
        f"{job['node_rank'] + 1} of {nodes}" if nodes > 1 else "-",
        job["folder"] or "-",
        " ".join(job["command"]) or "-",
    )
    return [visible(cell) for cell in cells]


def record(job: RunningJob, about: JobRecords) -> dict[str, Any]:
    """Return the record of JOB for other programs."""
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


def meant(word: str | None, running: Sequence[RunningJob], command: str) -> RunningJob:
    """Return the job of RUNNING that WORD names, by default the one of the current folder.

    Raises UsageError, which names COMMAND, unless there is exactly one.
    """
    if word is None:
        here = os.getcwd()
        matches = tuple(job for job in running if jobs.about(job).cwd == here)
    else:
        matches = jobs.named(running, word)
    if len(matches) == 1:
        return matches[0]
    if matches:
        listed = ", ".join(map(_numbered, matches))
        raise UsageError(f"{command}: {len(matches)} jobs match; name one by its number: {listed}.")
    if word is None and running:
        listed = ", ".join(
            f"{_numbered(job)} in {jobs.about(job).cwd or 'an unknown folder'}" for job in running
        )
        raise UsageError(
            f"{command}: no job of yours runs in this folder; name one that runs elsewhere: "
            f"{listed}."
        )
    name = "job of yours" if word is None else f"job {word}"
    raise UsageError(f"{command}: no {name} runs on this host; `fleetrun ps` lists what does.")


def _numbered(job: RunningJob) -> str:
    """Return the process id of JOB and its name, or the run directory's name without a launcher."""
    return job.name if job.launcher is None else f"{job.launcher} ({names.job_name(job.name)})"


def called(run: str, *, is_known: bool) -> str:
    """Return the job name of RUN, the name of a run directory; RUN itself if it is not known."""
    return names.job_name(run) if is_known else run


command = click.Command(
    "ps",
    help="List your jobs on this host, or on the hosts of --hosts or --hostfile, by ssh. JOB is "
    "a process id or a name.",
    callback=_ps,
    params=[
        click.Option(["--json", "is_json"], is_flag=True, help="Print one JSON object per line."),
        *map(parser.launch_option, ("hosts", "hostfile", "ssh")),
        click.Argument(["words"], nargs=-1, metavar="[JOB]...", shell_complete=complete),
    ],
)
