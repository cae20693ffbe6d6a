"""`fleetrun ps`: the jobs that run on this host, or on those of --hosts, as this user."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import click

from fleetrun import conversion
from fleetrun.commands import parser, tables
from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.plan.command import CHECK
from fleetrun.plan.visible import visible
from fleetrun.printing import put, remark
from fleetrun.probe import jobs
from fleetrun.records import names, reading

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from click.shell_completion import CompletionItem

    from fleetrun.probe.jobs import JobRecords, RunningJob

# Of several hosts, the one that a job runs on comes first.
ON = "ON"
HEADS = ("PID", "JOB", "FOR", "PROCESSES", "HOST", "FOLDER", "COMMAND")
# The seconds a host has to answer, including the start of ssh and Python.
_ANSWER_S = 60.0


def complete(
    _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Return the jobs whose process id or name starts with INCOMPLETE."""
    from click.shell_completion import CompletionItem  # only for Tab

    words = [str(job.launcher) for job in jobs.find() if job.launcher is not None]
    words += [job.name for job in jobs.find()]
    return [CompletionItem(word) for word in words if word.startswith(incomplete)]


def _ps(words: tuple[str, ...], *, is_json: bool, **hosts: str | None) -> int:
    """Print the jobs that WORDS name, or all."""
    told = [f"--{name}={value}" for name, value in hosts.items() if value is not None]
    if told:
        return _on_hosts(told, words, is_json=is_json)
    found = jobs.find()
    if words:
        found = tuple(job for job in found if any(job in jobs.named(found, one) for one in words))
    return _show([record(job, jobs.about(job)) for job in found], is_json=is_json)


def _on_hosts(told: Sequence[str], words: tuple[str, ...], *, is_json: bool) -> int:
    """Print the jobs on the hosts that TOLD lists; return 3 if one does not answer."""
    from fleetrun.remote import sshjob  # only for them
    from fleetrun.remote.everywhere import Everywhere
    from fleetrun.remote.protocol import Inquiry
    from fleetrun.remote.sshconnection import ssh_command

    wanted = parser.launch_request([*told, CHECK], os.environ)
    if not (wanted.hosts or wanted.hostfile):
        raise UsageError(f"ps: {told[0]} reaches the hosts of --hosts or --hostfile: give one.")
    hosts = sshjob.listed(wanted)
    order = ("ps", "--json", *words)
    everywhere = Everywhere(
        hosts, ssh_command(wanted), Inquiry("/"), lambda _addresses, _me: order, _ANSWER_S
    )
    results = everywhere.results()
    found = [
        {"on": host.name, **one}
        for host, (output, _) in zip(hosts, results, strict=True)
        for line in output.splitlines()
        if (one := reading.parse(line)) is not None and "run_dir" in one
    ]
    code = _show(found, is_json=is_json, where="these hosts")
    for host, (_, failure) in zip(hosts, results, strict=True):
        if failure:
            remark(f"ps: {host.name}  {failure}")
            code = EnvironmentFault.exit_code
    return code


def _show(found: Sequence[Mapping[str, Any]], *, is_json: bool, where: str = "this host") -> int:
    """Print the records FOUND, each of one job, on the hosts WHERE."""
    if is_json:
        return put("".join(json.dumps(one) + "\n" for one in found))
    if not found:
        return put(f"No job of yours runs on {where}.\n")
    heads = (ON, *HEADS) if ON.lower() in found[0] else HEADS
    now, width = time.time(), tables.width()
    cut = [heads.index("COMMAND"), heads.index("FOLDER")]
    rows = [[*([visible(one["on"])] if heads[0] == ON else []), *row(one, now)] for one in found]
    rows = tables.fitted(rows, heads, cut=cut, width=width)
    whole = range(len(heads))
    numbers = 0 if heads[0] == ON else 1
    return put(tables.layout(rows, heads=heads, numbers=numbers, width=width, whole=whole) + "\n")


def row(found: Mapping[str, Any], now: float) -> list[str]:
    """Return the row of the table for the record FOUND, at the time NOW."""
    # The head of a job by ssh has none of its own.
    processes = str(len(found["processes"]) or ("0" if found["wanted"] else "-"))
    if found["wanted"]:
        processes += f" of {found['wanted']}"
    if found["attempt"]:
        processes += f", attempt {found['attempt']}"
    nodes = len(found["nodes"])
    cells = (
        "killed" if found["pid"] is None else str(found["pid"]),
        called(found["name"], found["job"]),
        "-"
        if found["started"] is None
        else conversion.duration(now - found["started"], is_short=True),
        processes,
        f"{found['node_rank'] + 1} of {nodes}" if nodes > 1 else "-",
        found["folder"] or "-",
        " ".join(found["command"]) or "-",
    )
    return [visible(cell) for cell in cells]


def record(job: RunningJob, about: JobRecords) -> dict[str, Any]:
    """Return the record of JOB, for programs."""
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


def one(word: str | None, found: Sequence[RunningJob], what: str) -> RunningJob:
    """Return the job of FOUND that WORD names, for the command WHAT; else UsageError."""
    meant = tuple(found) if word is None else jobs.named(found, word)
    if word is None and len(meant) > 1:
        here = os.getcwd()
        meant = tuple(job for job in meant if jobs.about(job).cwd == here) or meant
    if len(meant) == 1:
        return meant[0]
    if not meant:
        which = "job of yours" if word is None else f"job {word}"
        raise UsageError(f"{what}: no {which} runs on this host; `fleetrun ps` lists what does.")
    listed = ", ".join(
        job.name if job.launcher is None else f"{job.launcher} ({names.job_name(job.name)})"
        for job in meant
    )
    raise UsageError(f"{what}: {len(meant)} jobs match; name one by its number: {listed}.")


def called(run: str, job: str | None) -> str:
    """Return what people call the job of RUN, if its records tell the id JOB."""
    return names.job_name(run) if job else run


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
