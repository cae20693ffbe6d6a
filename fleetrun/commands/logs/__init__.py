"""`fleetrun logs`: shows the output of a run's ranks, merged, filtered or followed."""

from __future__ import annotations

import os
import re
import sys
import time
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from fleetrun.cli import parser, types
from fleetrun.cli.types import among
from fleetrun.commands.logs import choose, collectives, show
from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.printing import is_color_wanted, put, remark
from fleetrun.rundir import lockfile, names, runs
from fleetrun.text import visible_lines

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def _logs(run: tuple[str, ...], *, log_dir: str, color: str, follow: bool, **own: Any) -> int:  # noqa: ANN401 - click's
    """Show the requested logs; UsageError if there are none."""
    if own["runs"]:
        if run:
            raise UsageError(f"--runs lists all runs of --log_dir: leave {run[0]} out.")
        return put(visible_lines(listed(log_dir)))
    rank, attempt, since, grep = (own[name] for name in ("rank", "attempt", "since", "grep"))
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    log_filter = show.LogFilter(
        pattern=None if grep is None else re.compile(os.fsencode(grep)),
        since=None if since is None else time.time() - since,
        is_coloured=is_color_wanted(color, os.environ, sys.stdout),
        is_clean=is_terminal and not own["raw"],
    )
    chosen = choose.find_runs(run, log_dir)
    named = None if rank is None else choose.processes(rank)
    if own["collectives"]:
        return put(collectives.text(chosen, named))
    follows = follow and any(chosen_run.is_running for chosen_run in chosen)
    if follows:
        # More attempts, and at the beginning more ranks, may come.
        count = len(named) if named else sum(chosen_run.processes for chosen_run in chosen)
        log_filter = log_filter._replace(is_prefixed=count != 1)
    pick = partial(choose.find_logs, rank=rank, attempt=attempt, failed=own["failed"])
    if show.show(chosen, pick, log_filter, follows=follows) or follows:
        return 0
    if own["failed"] and any(chosen_run.logs for chosen_run in chosen):
        remark(f"no rank of {chosen[0].name} has failed ({choose.state(chosen[0])}).")
        return 0
    raise EnvironmentFault(
        f"{chosen[0].path} has no logs: nothing was started, or {names.EVENTS} is gone, or "
        "another user's."
    )


def listed(log_dir: str) -> str:
    """Return the runs in LOG_DIR, newest first; EnvironmentFault if there are none."""
    from fleetrun.commands import tables  # rich takes as long as a million lines

    rows = []
    for path in lockfile.listed(log_dir):
        run = runs.read(path)
        began = datetime.fromtimestamp(run.started_at or 0).astimezone()
        ranks = names.listed(sorted({log.label for log in run.logs}))
        at = f"{began:%Y-%m-%d %H:%M:%S}" if run.started_at else ""
        rows.append((run.name, at, ranks, choose.state(run)))
    if not rows:
        raise EnvironmentFault(f"There is no launch in {log_dir}; name its log folder: --log_dir.")
    heads = ("run", "began", "processes", "state")
    # Names are whole, to be copied.
    return tables.layout(rows, heads=heads, width=tables.width(), whole=(0,)) + "\n"


def _runs(
    context: click.Context,
    param: click.Parameter,  # noqa: ARG001 - click's
    incomplete: str,
) -> list[CompletionItem[str]]:
    """Return the names of runs that begin with INCOMPLETE."""
    log_dir = str(context.params.get("log_dir") or "log")
    run_names = map(os.path.basename, lockfile.listed(log_dir))
    return among(run_names, incomplete)


command = click.Command(
    "logs",
    help="Show the output of the ranks of the latest run, or of each RUN: its name or a part of "
    "it, its folder, or a log folder. Several ranks are merged in the order of their output, to "
    "a tenth of a second, each line prefixed with its rank; the log of a single rank is shown "
    "unchanged.",
    callback=_logs,
    params=[
        click.Argument(["run"], nargs=-1, metavar="[RUN]...", shell_complete=_runs),
        click.Option(["-f", "--follow"], is_flag=True, help="Follow it until the job ends."),
        parser.option("rank", types.FREE, "Only these: 0,3-5 or server.0.", metavar="LIST"),
        parser.option("failed", types.FLAG, "Only the ranks that failed first."),
        parser.option("attempt", types.number(0), "Only this attempt; the first is 0."),
        parser.option("since", types.seconds(0), "Only the last 90s, 10m or 2h.", metavar="TIME"),
        parser.option("grep", types.PATTERN, "Only lines that match this.", metavar="REGEX"),
        parser.LOG_DIR,
        parser.COLOR,
        parser.option("raw", types.FLAG, "Keep escape sequences, such as colours, on a terminal."),
        parser.option("runs", types.FLAG, "List the runs, newest first."),
        # The records of --flight_recorder or --hang_timeout.
        parser.option(
            "collectives", types.FLAG, "Show the last collectives, and who waits for whom."
        ),
    ],
)
