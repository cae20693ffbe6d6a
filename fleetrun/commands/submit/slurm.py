"""`fleetrun submit slurm`: a readable script for sbatch, printed or handed in."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from typing import NamedTuple

import click

from fleetrun import __version__, probe
from fleetrun.commands import parser
from fleetrun.commands.submit import common
from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.printing import put
from fleetrun.records.variables import with_token

WHAT = "submit slurm"
# As sbatch(1) has it for --signal: a name or number, and seconds before the end of the job.
_SIGNAL = re.compile(r"[A-Z0-9]+(@[0-9]+)?")
# Slurm 22.05 begins a preempted job again only if it had to kill it.
_AGAIN = (
    "code=$?",
    "# Who is preempted and ends within the partition's GraceTime has failed for Slurm, and would",
    "# not begin again.",
    'case "$code $(scontrol show job "$SLURM_JOB_ID")" in',
    '143*PreemptTime=[0-9]*) scontrol requeue "$SLURM_JOB_ID" ;;',
    "esac",
    'exit "$code"',
)


class SlurmJob(NamedTuple):
    """What is asked of Slurm; None where Slurm's own defaults count."""

    name: str
    nodes: int
    words: tuple[str, ...]
    folder: str
    python: str
    gpus: int | None = None
    cpus: int | None = None
    memory: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    # Other options of sbatch, without their hyphens: "qos=high".
    sbatch: tuple[str, ...] = ()
    signal: str | None = None
    requeue: bool = False
    keep: bool = False


def script(job: SlurmJob) -> str:
    r"""Return the script of JOB.

    >>> job = SlurmJob("train", 2, ("train.py",), "/work", "/usr/bin/python3", gpus=8)
    >>> print(script(job).partition("exec ")[2], end="")
    srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 \
        /usr/bin/python3 -m fleetrun train.py
    """
    lines = ["#!/bin/bash", f"# Written by fleetrun {__version__}."]
    lines += [f"#SBATCH --{one}" for one in _directives(job)]
    lines += [""]
    if job.modules:
        lines.append(f"module load {shlex.join(job.modules)} || exit")
    lines += job.setup
    lines.append(f"cd {shlex.quote(job.folder)} || exit")
    lines += [
        "# One launcher on each host, which starts the ranks there and ends when the job does. The",
        "# exit code is that of the rank that failed first: Slurm shall not make it another by",
        "# ending the rest itself, as the site's settings may have it.",
        f"{'' if job.requeue else 'exec '}srun {shlex.join(_srun(job))} \\",
        f"    {shlex.join((job.python, '-m', 'fleetrun', *job.words))}",
        *(_AGAIN if job.requeue else ()),
    ]
    return "\n".join(lines) + "\n"


def _directives(job: SlurmJob) -> list[str]:
    """Return what sbatch is asked for."""
    found = [f"job-name={job.name}", f"nodes={job.nodes}", "ntasks-per-node=1"]
    found += [
        f"{name}={value}"
        for name, value in (
            ("gpus-per-node", job.gpus or None),
            ("cpus-per-task", job.cpus),
            ("mem", job.memory),
            ("time", job.time),
            ("partition", job.partition),
            ("account", job.account),
            ("signal", job.signal),
        )
        if value is not None
    ]
    # A job that begins again goes on in the same file.
    found += ["requeue", "open-mode=append"] if job.requeue else ["no-requeue"]
    found += ["no-kill"] if job.keep else []
    return [*found, *job.sbatch]


def _srun(job: SlurmJob) -> list[str]:
    """Return srun's options: one task on each host, which may have all of it."""
    found = ["--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=0"]
    # srun has not taken it from the job since Slurm 22.05.
    found += [f"--cpus-per-task={job.cpus}"] if job.cpus else []
    return [*found, *(["--no-kill"] if job.keep else [])]


def submit(text: str) -> int:
    """Hand the script TEXT in, and return sbatch's exit code."""
    if shutil.which("sbatch") is None:
        raise EnvironmentFault(
            f"{WHAT}: there is no sbatch on this host; go to one where Slurm is, or take "
            "--dry-run's script there."
        )
    # The environment is handed on to the launchers, unseen; the script is not.
    env = with_token(os.environ)
    return subprocess.run(["sbatch"], input=text, text=True, check=False, env=env).returncode  # noqa: S607 - the user's own


def _run(words: tuple[str, ...], *, dry_run: bool, **fields: object) -> int:
    nodes = common.number(fields["nodes"]) or 1
    parsed = common.launch(words, WHAT, fields["config"], most=nodes)
    single = ("name", "memory", "time", "partition", "account", "signal")
    texts = {
        field: common.plain(WHAT, field, str(value))
        for field, value in fields.items()
        if field in single and value is not None
    }
    if "signal" in texts and not _SIGNAL.fullmatch(texts["signal"]):
        raise UsageError(f"{WHAT}: --signal={texts['signal']}: give SIGNAL@SECONDS, as TERM@120.")
    setup = common.texts(fields["setup"])
    for line in setup:
        if not line.isprintable():
            raise UsageError(f"{WHAT}: --setup={line!r}: give one line of shell.")
    job = SlurmJob(
        name=texts.get("name") or common.plain(WHAT, "name", common.name(parsed)),
        nodes=nodes,
        words=common.shown(parsed.words) if dry_run else parsed.words,
        folder=probe.current_folder(),
        python=str(fields["python"] or sys.executable),
        gpus=common.number(fields["gpus"]),
        cpus=common.number(fields["cpus"]),
        memory=texts.get("memory"),
        time=texts.get("time"),
        partition=texts.get("partition"),
        account=texts.get("account"),
        modules=_values(fields, "module"),
        setup=setup,
        sbatch=_values(fields, "sbatch"),
        signal=texts.get("signal"),
        requeue=fields["requeue"] is True,
        keep=fields["no_kill"] is True,
    )
    if not dry_run:
        return submit(script(job))
    common.remark_on_secrets(parsed.words)
    return put(script(job))


def _values(fields: dict[str, object], option: str) -> tuple[str, ...]:
    """Return the values of a repeatable OPTION, each a word."""
    return tuple(
        common.plain(WHAT, option, one.lstrip("-")) for one in common.texts(fields[option])
    )


command = common.QueueCommand(
    "slurm",
    help="Write a script for sbatch and hand it in. ARGUMENTS are those of a launch without hosts: "
    "`fleetrun submit slurm --nodes 4 --gpus 8 -- train.py`. What is always the same at a site "
    "(partition, account, module, ...) may stand in fleetrun.yaml under `submit: slurm:`.",
    callback=_run,
    params=[
        parser.option("nodes", "int", "How many hosts.", metavar="N", default="1", minimum=1),
        parser.option("gpus", "int", "GPUs on each host.", metavar="N", minimum=0),
        parser.option("cpus", "int", "CPUs on each host.", metavar="N", minimum=1),
        parser.option("memory", "text", "Memory on each host: 64G; 0: all.", metavar="SIZE"),
        parser.option("time", "text", "Time limit, as 12:00:00 or 2-00.", metavar="TIME"),
        parser.option("partition", "text", "Slurm's partition.", metavar="NAME"),
        parser.option("account", "text", "The account that is charged.", metavar="NAME"),
        parser.option("name", "text", "The job's name; the script's.", metavar="NAME"),
        common.repeatable("module", "Load this environment module first (repeatable).", "NAME"),
        common.repeatable("setup", "Run this line of shell first (repeatable).", "LINE"),
        common.repeatable("sbatch", "Another option of sbatch (repeatable).", "OPTION[=VALUE]"),
        parser.option(
            "signal",
            "text",
            "Send this so many seconds before the time limit: TERM ends the ranks with --grace, "
            "USR1 is passed on to them.",
            metavar="SIGNAL@SECONDS",
        ),
        click.Option(["--requeue"], is_flag=True, help="Begin again after preemption."),
        click.Option(
            ["--no-kill"],
            is_flag=True,
            help="Keep the job when a host is lost; with --nnodes=LEAST:N after --, it goes on.",
        ),
        parser.option("python", "text", "Python on the hosts; this one.", metavar="PATH"),
        click.Option(["--dry-run"], is_flag=True, help="Print the script."),
        common.config(),
        common.command_line(),
    ],
)
