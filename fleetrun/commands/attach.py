"""`fleetrun attach`: shows the console of a background job until it ends."""

from __future__ import annotations

import os
import select
import stat
import sys

import click

from fleetrun.cli import parser
from fleetrun.commands import ps
from fleetrun.errors import EnvironmentFault
from fleetrun.host import jobs
from fleetrun.host.jobs import RunningJob
from fleetrun.printing import remark
from fleetrun.rundir import names

_CHUNK = 1 << 16
# The polling interval; the end of the job is noticed at once.
_PACE_S = 0.1
# The exit code of a job whose launcher was killed.
_LOST = 137


def _attach(word: str | None, *, lines: int) -> int:
    job = ps.meant(word, jobs.find(), "attach")
    if job.launcher is None:
        raise EnvironmentFault(
            f"attach: the launcher of {job.name} was killed; its logs are in {job.run_dir}."
        )
    try:
        pidfd = os.pidfd_open(job.launcher)
    except ProcessLookupError:
        raise EnvironmentFault(
            f"attach: {job.name} has just ended; its logs are in {job.run_dir}."
        ) from None
    with open(console(job), "rb", buffering=0) as file:
        start = last(file.fileno(), lines)
        os.lseek(file.fileno(), start, os.SEEK_SET)
        has_ended = False
        while True:
            while part := file.read(_CHUNK):
                sys.stdout.buffer.write(part)
            sys.stdout.buffer.flush()
            if has_ended:
                break
            # Read what was written last, too.
            has_ended = bool(select.select([pidfd], [], [], _PACE_S)[0])
    end = jobs.end(job)
    return _LOST if end is None else end[0]


def console(job: RunningJob) -> str:
    """Return the file with the console of JOB; UsageError if it runs on a terminal."""
    own = f"{job.run_dir}/{names.CONSOLE}"
    if os.path.exists(own):
        return own
    try:
        path = f"/proc/{job.launcher}/fd/1"
        if stat.S_ISREG(os.stat(path).st_mode):
            return path
    except OSError:
        pass
    try:
        logs = sorted(name for name in os.listdir(job.run_dir) if name.startswith("workerlog."))
    except OSError as error:
        raise EnvironmentFault(
            f"attach: {job.run_dir} cannot be read ({error.strerror})."
        ) from None
    if not logs:
        raise EnvironmentFault(f"attach: {job.name} has no console and no log yet.")
    elsewhere = f"was not started with --detach and has its console elsewhere: this is {logs[0]}."
    remark(f"{job.name} {elsewhere}")
    return f"{job.run_dir}/{logs[0]}"


def last(fd: int, lines: int) -> int:
    """Return the offset of the last LINES lines of the file FD, including an unfinished one.

    It reads backwards in chunks, no further than necessary.
    """
    at = os.fstat(fd).st_size
    if not lines:
        return at
    # The end of the line before them, counted from the last end.
    ends_left = lines + 1
    while at:
        begin = max(0, at - _CHUNK)
        piece = os.pread(fd, at - begin, begin)
        ends = piece.count(b"\n")
        if ends >= ends_left:
            return begin + len(piece) - len(piece.split(b"\n", ends - ends_left + 1)[-1])
        ends_left -= ends
        at = begin
    return 0


command = click.Command(
    "attach",
    help="Show the console of a job started with --detach until it ends, and return its exit "
    "code. Ctrl-C leaves the job running. JOB is a process id or name from `fleetrun ps`; without "
    "it, the job of this folder.",
    callback=_attach,
    params=[
        click.Argument(["word"], required=False, metavar="[JOB]", shell_complete=ps.complete),
        parser.option(
            "lines",
            "int",
            "Number of earlier lines to show.",
            metavar="N",
            default="100",
            minimum=0,
        ),
    ],
)
