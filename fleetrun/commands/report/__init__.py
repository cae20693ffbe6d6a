"""`fleetrun report`: writes one HTML file about a run, or two side by side, for offline use."""

from __future__ import annotations

from pathlib import Path

import click

from fleetrun.cli import parser
from fleetrun.commands.logs import choose
from fleetrun.commands.report import history, page
from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.printing import put
from fleetrun.rundir import names
from fleetrun.rundir.folder import PRIVATE
from fleetrun.text import visible

_SIDE_BY_SIDE = 2


def _report(run: tuple[str, ...], log_dir: str, out: str | None) -> int:
    """Write the page; UsageError if a run is missing."""
    if len(run) > _SIDE_BY_SIDE:
        raise UsageError("report: give one run, or two to compare.")
    # The hosts of a job are one run.
    chosen = [choose.find_runs([word], log_dir) for word in run] or [choose.find_runs([], log_dir)]
    # In the folder of a single run, or here for two.
    place = Path(chosen[0][0].path) if len(chosen) == 1 else Path()
    path = (Path(out) if out else place / names.PAGE).absolute()
    text = page.page([history.read(several) for several in chosen], str(path.parent))
    try:
        # As private as its sources.
        path.touch(PRIVATE)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be written ({error.strerror}); see --out.") from None
    return put(f"{visible(str(path))}\n")


command = click.Command(
    "report",
    help="Write one HTML file about a run, which opens without a network: the timeline of "
    "processes, why it ended, losses and steps that ranks printed, memory, the strategy in "
    "effect, versions and settings, links to the logs. RUN is as for `fleetrun logs`; two runs "
    "are compared side by side. The file is report.html in the folder of the run, or for two "
    "runs in the current folder.",
    callback=_report,
    params=[
        click.Argument(["run"], nargs=-1, metavar="[RUN [RUN]]"),
        parser.log_dir(),
        parser.option("out", "text", "The file to write.", metavar="FILE", path="file"),
    ],
)
