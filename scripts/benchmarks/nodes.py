"""`scripts/bench nodes`: one job on several hosts, against as many launches that know of no other.

The hosts are network namespaces of this machine, so all share its cores: what counts is the ratio
to the same number of launches side by side.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import launches
from launches import FLEETRUN, ROOT, TORCHRUN, VICTIM, WORKER, Failed, command
from report import finish, in_turns, numbers, ratios, show, spread

sys.path.insert(0, str(ROOT / "tests"))

import lab

APART = "unconnected"
_MASTER = ("--master={master}", "--nnodes={hosts}", "{program}")
LAUNCHERS = {
    APART: (*FLEETRUN, "--nproc_per_node=1", "{program}"),
    "fleetrun --ips": (*FLEETRUN, "--nproc_per_node=1", "--ips={ips}", "{program}"),
    "fleetrun --master": (*FLEETRUN, "--nproc_per_node=1", *_MASTER),
    "paddle launch": (
        *(sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node=1"),
        *_MASTER,
    ),
    "torchrun": (
        *(TORCHRUN, "--nproc-per-node=1", "--nnodes={hosts}", "--rdzv-backend=c10d"),
        *("--rdzv-endpoint={master}", "{program}"),
    ),
}


class Seen(NamedTuple):
    """When ranks ran their first line, and, once one had failed, heard of it and were all gone.

    Seconds from the command, and from the failure; None: nobody heard, or not all were gone.
    """

    first_s: float
    last_s: float
    last_term_s: float | None
    exit_s: float | None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--hosts", type=numbers, default=(2, 4, 16), help="of a job (2,4,16)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, taken in turns (5)")
    parser.add_argument(
        "--heavy-hosts", type=int, default=2, help="most hosts of those that import frameworks (2)"
    )
    parser.add_argument("--give-up-s", type=float, default=15.0, help="await an end so long (15)")


def run(chosen: argparse.Namespace) -> int:
    """Measure, show, and write what CHOSEN says."""
    if why := "network namespaces need root" if not lab.is_root() else lab.missing():
        print(f"scripts/bench: there can be no hosts here: {why}", file=sys.stderr)
        return 3
    todo = {
        (number, name): partial(_measure, number, template, name, chosen.give_up_s)
        for number in chosen.hosts
        for name, template in LAUNCHERS.items()
        if launches.is_light(name) or number <= chosen.heavy_hosts
        if Path(template[0]).exists()
    }
    measured, failures = in_turns(chosen.rounds, todo)
    heads = ["launcher", "first line", "last line", f"x {APART}", "last TERM", "all gone"]
    for number in chosen.hosts:
        apart = [seen.last_s for seen in measured[number, APART]]
        rows = [
            [
                name,
                spread([trial.first_s for trial in seen]),
                spread([trial.last_s for trial in seen]),
                ratios([trial.last_s for trial in seen], apart),
                spread([trial.last_term_s for trial in seen]),
                spread([trial.exit_s for trial in seen]),
            ]
            for (hosts, name), seen in measured.items()
            if hosts == number
        ]
        show(f"{number} hosts, one rank each; median (lowest-highest), ms", heads, rows)
    hosts = [
        {"hosts": number, "launcher": name, "rounds": [trial._asdict() for trial in seen]}
        for (number, name), seen in measured.items()
    ]
    return finish(chosen, failures, nodes=hosts)


def _measure(number: int, template: Sequence[str], name: str, give_up_s: float) -> Seen:
    with (
        tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder,
        lab.hosts(number, Path(folder)) as hosts,
    ):
        told = {
            "hosts": number,
            "ips": ",".join(host.ip for host in hosts),
            "master": f"{hosts[0].ip}:7100",
        }
        starting = command(template, program=WORKER, **told)
        with launches.launch(*(host.command(starting) for host in hosts), **_env(name)) as job:
            first = job.expect("first", number)
            job.release()
            job.await_end()
        last_term_s = exit_s = None
        if name != APART:
            failing = [host.command(command(template, program=VICTIM, **told)) for host in hosts]
            last_term_s, exit_s = _fail(failing, name, give_up_s)
    return Seen(min(first) - job.began, max(first) - job.began, last_term_s, exit_s)


def _fail(
    commands: Sequence[list[str]], name: str, give_up_s: float
) -> tuple[float | None, float | None]:
    """Let the last rank fail, and see how the others end."""
    number = len(commands)
    env = {**_env(name), "BENCH_FAILS": str(number - 1), "BENCH_DEAF": "0"}
    with launches.launch(*commands, **env) as job:
        job.expect("ready", number)
        job.release()
        (began,) = job.expect("fails", 1)
        asked = job.hear("term", number - 1, give_up_s)
        try:
            exit_s = job.see_end(give_up_s) - began
        except Failed:
            exit_s = None
    return (max(asked) - began if len(asked) == number - 1 else None), exit_s


def _env(name: str) -> dict[str, str]:
    # An empty mask means CPU to fleetrun, and one GPU to Paddle's launcher.
    return {"CUDA_VISIBLE_DEVICES": ""} if name.startswith(("fleetrun", APART)) else {}
