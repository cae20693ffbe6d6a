"""`fleetrun doctor`: checks whether this host is fit for the job, and names the fixes."""

from __future__ import annotations

import json
import os
import sys
import textwrap

import click

from fleetrun.cli import parser, types
from fleetrun.commands import tables
from fleetrun.doctor import checkup, findings, output
from fleetrun.errors import EnvironmentFault
from fleetrun.model import Request
from fleetrun.plan.command import CHECK
from fleetrun.printing import AUTO, is_color_wanted, put
from fleetrun.remote import everywhere
from fleetrun.rundir import reading, secrets
from fleetrun.text import visible, visible_lines


def _doctor(launch: parser.Launch, *, wait: float, **own: bool) -> int:
    """Return 0, or 3 if there is an error."""
    words = (*launch.words, *(launch.script or (CHECK,)))
    request = parser.launch_request(words, os.environ)._replace(typed=words)
    log = checkup.remark(os.environ)
    if request.hosts or request.hostfile:
        options = [f"--wait={wait:g}", *(["--json"] * own["json"])]
        return _of_all_hosts(request, options, wait, is_json=own["json"])
    results = checkup.examine(request, os.environ, timeout_s=wait, log=log)
    # Processes, variables and paths are quoted.
    redact = secrets.of_launch(request, os.environ)
    shown = tuple(
        finding._replace(seen=visible(redact(finding.seen)), fix=visible(redact(finding.fix)))
        for finding in results
    )
    code = findings.exit_code(shown)
    if own["json"]:
        document = output.document(os.uname().nodename, shown)
        put(json.dumps(document, indent=2) + "\n")
        return code
    is_coloured = is_color_wanted(AUTO, os.environ, sys.stdout)
    put(output.text(shown, width=tables.width(), is_coloured=is_coloured))
    return code


def _of_all_hosts(request: Request, options: list[str], wait: float, *, is_json: bool) -> int:
    """Check all hosts of --hosts at once; return 0, or 3 if one has an error."""
    reports = everywhere.examine(request, os.environ, options, timeout_s=wait)
    code = EnvironmentFault.exit_code if any(code for code, _ in reports.values()) else 0
    if is_json:
        hosts = {host: reading.parse(text.encode()) for host, (_, text) in reports.items()}
        document = {"schema": output.SCHEMA, "exit_code": code, "hosts": hosts}
        put(json.dumps(document, indent=2) + "\n")
        return code
    for host, (_, shown) in reports.items():
        put(f"{host}\n{textwrap.indent(visible_lines(shown.rstrip()), '  ')}\n")
    return code


command = parser.LaunchCommand(
    "doctor",
    help="Check whether this host is fit for a job, in seconds and without starting it: GPUs "
    "and driver, Paddle, PATH, memory, limits, disks, names, interfaces, ports. Give the "
    "options of the launch, and the script if you like. With --hosts or --hostfile, all hosts "
    "are checked by ssh; with --ips, run it on all of them at once. The hosts connect on the "
    "ports of the job. The exit code is 0, or 3 if something must be fixed first.",
    options_metavar="[OPTIONS] [LAUNCH OPTIONS] [SCRIPT [ARGUMENTS]...]",
    callback=click.pass_obj(_doctor),
    params=[
        parser.option("json", types.FLAG, "Print the findings as one JSON object."),
        parser.option("wait", types.seconds(0), "How long to wait for other hosts.", default="10"),
    ],
)
