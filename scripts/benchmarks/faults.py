"""`scripts/bench faults`: how soon the others hear of a failure, and the launcher is gone."""

from __future__ import annotations

import argparse
import math
import signal
import time
from functools import partial
from typing import NamedTuple

import launches
from launches import AGAIN, BARE, OURS, VICTIM, command
from report import finish, in_turns, numbers, show, spread


class Fault(NamedTuple):
    """What is done to a launch: a rank fails or the launcher gets TERM, and its peers are deaf."""

    name: str
    a_rank_fails: bool
    is_deaf: bool


FAULTS = (
    Fault("a rank fails", a_rank_fails=True, is_deaf=False),
    Fault("a rank fails, the others ignore TERM", a_rank_fails=True, is_deaf=True),
    Fault("SIGTERM to the launcher", a_rank_fails=False, is_deaf=False),
)


class Seen(NamedTuple):
    """What came of one fault; seconds from the fault on."""

    exit_s: float
    # When the first and the last peer was asked to stop, if any was.
    first_term_s: float | None
    last_term_s: float | None
    asked: int
    # How many of its processes the launcher left behind.
    left: int


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--ranks", type=numbers, default=(4, 64), help="of a launch (4,64)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, taken in turns (5)")
    parser.add_argument(
        "--heavy-ranks", type=int, default=4, help="most ranks of those that import frameworks (4)"
    )
    parser.add_argument("--grace", type=float, default=1.0, help="fleetrun's --grace (1)")


def run(chosen: argparse.Namespace) -> int:
    """Measure, show, and write what CHOSEN says."""
    todo = {}
    for ranks in chosen.ranks:
        for name, template in launches.peers(ranks, chosen.heavy_ranks).items():
            argv = command(template, ranks=ranks, program=VICTIM)
            if name == OURS:
                argv.insert(1, f"--grace={chosen.grace:g}")
            for fault in FAULTS if name not in {BARE, AGAIN} else ():
                todo[fault.name, ranks, name] = partial(_do, fault, argv, ranks, name)
    measured, failures = in_turns(chosen.rounds, todo)
    heads = ["launcher", "first TERM", "last TERM", "asked", "exit", "left behind"]
    for ranks in chosen.ranks:
        for fault in FAULTS:
            rows = [
                [
                    name,
                    spread([trial.first_term_s for trial in seen]),
                    spread([trial.last_term_s for trial in seen]),
                    str(min(trial.asked for trial in seen)),
                    spread([trial.exit_s for trial in seen]),
                    str(max(trial.left for trial in seen)),
                ]
                for (what, number, name), seen in measured.items()
                if seen and (what, number) == (fault.name, ranks)
            ]
            show(f"{ranks} ranks: {fault.name}; median (lowest-highest), ms", heads, rows)
    faults = [
        {"fault": what, "ranks": ranks, "launcher": name, "rounds": [x._asdict() for x in seen]}
        for (what, ranks, name), seen in measured.items()
    ]
    return finish(chosen, failures, grace_s=chosen.grace, faults=faults)


def _do(fault: Fault, argv: list[str], ranks: int, name: str) -> Seen:
    """Launch ARGV, let FAULT happen when all RANKS are there, and see the end."""
    env = {"CUDA_VISIBLE_DEVICES": ""} if name == OURS else {}
    env["BENCH_FAILS"] = str(ranks - 1) if fault.a_rank_fails else "none"
    env["BENCH_DEAF"] = str(int(fault.is_deaf))
    with launches.launch(argv, **env) as job:
        job.expect("ready", ranks)
        began = time.monotonic()
        if fault.a_rank_fails:
            job.release()
        else:
            job.launchers[0].send_signal(signal.SIGTERM)
        # Until the launcher has ended.
        terms = job.hear("term", math.inf)
        ended = job.see_end(0)
        job.launchers[0].wait()
        left = len(launches.marked(job.mark))
        if fault.a_rank_fails:
            (began,) = job.expect("fails", 1)
    asked = sorted(at - began for at in terms)
    return Seen(
        exit_s=ended - began,
        first_term_s=asked[0] if asked else None,
        last_term_s=asked[-1] if asked else None,
        asked=len(asked),
        left=left,
    )
