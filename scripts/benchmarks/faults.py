"""`scripts/bench faults`: how soon the others hear of a failure, and the launcher is gone."""

from __future__ import annotations

import math
import signal
import time
from collections import defaultdict
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import peers
import processes
import report
from peers import BARE, FLEETRUN, OUR_NAME
from processes import HERE, MARK, WORKER, Failed
from report import Goal, spread, summary

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from peers import Peer

RANKS = (4, 64)
VICTIM = str(HERE / "victim.py")

# What has to be reached.
FIRST_TERM_S = 0.010
EXIT_S = {4: 0.060, 64: 0.300}
AFTER_GRACE_S = 0.100


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


def add_to(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this benchmark to SUBCOMMANDS."""
    parser = subcommands.add_parser("faults", help="how a launch ends when something goes wrong")
    peers.add_ranks(parser, RANKS, heavy=4)
    parser.add_argument("--grace", type=float, default=1.0, help="fleetrun's --grace (1)")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Measure, show, and write what CHOSEN says."""
    processes.adopt_orphans()
    seen, failures = _measure(chosen)
    for fault in FAULTS:
        for ranks in chosen.ranks:
            _show(fault, ranks, chosen.rounds, seen)
    report.unmeasured(failures)
    goals = _goals(chosen, seen)
    print(report.goals(goals))
    document = {
        "versions": peers.versions(),
        "grace_s": chosen.grace,
        "faults": [
            {"fault": fault, "launcher": name, "ranks": ranks, "rounds": _as_dicts(rounds)}
            for (fault, name, ranks), rounds in seen.items()
        ],
        "failures": failures,
        "goals": [goal._asdict() for goal in goals],
    }
    report.write(chosen, document)
    return 0


def _as_dicts(rounds: Sequence[Seen]) -> list[dict[str, Any]]:
    return [trial._asdict() for trial in rounds]


# -- measuring -------------------------------------------------------------------------------------


def _measure(
    chosen: argparse.Namespace,
) -> tuple[dict[tuple[str, str, int], list[Seen]], dict[str, str]]:
    """Do every fault to every launcher ROUNDS times in turns, each round in the other direction."""
    seen: dict[tuple[str, str, int], list[Seen]] = defaultdict(list)
    launchers = [peer for peer in peers.all_peers() if peer.name != BARE]
    failures = {peer.name: peer.absent for peer in launchers if peer.absent}
    todo = [
        (fault, peer, ranks)
        for ranks in chosen.ranks
        for fault in FAULTS
        for peer in launchers
        if not peer.absent and (not peer.is_heavy or ranks <= chosen.heavy_ranks)
    ]
    for number, (fault, peer, ranks) in report.in_turns(chosen.rounds, todo):
        what = f"{peer.name}, {ranks} ranks, {fault.name}"
        report.progress(f"{number}: {what}")
        try:
            outcome = _do(fault, _command(peer, ranks, chosen.grace), ranks, peer.env)
        except Failed as failure:
            failures[what] = str(failure)
        else:
            seen[fault.name, peer.name, ranks].append(outcome)
    report.progress("")
    return seen, failures


def _command(peer: Peer, ranks: int, grace_s: float) -> list[str]:
    """Return the command by which PEER launches RANKS victims."""
    before = peer.before
    if peer.name == OUR_NAME:
        before = (*FLEETRUN, f"--grace={grace_s:g}", *before[len(FLEETRUN) :])
    after = [VICTIM if word == WORKER else word for word in peer.after]
    return [*before, str(ranks), *after]


def _do(fault: Fault, argv: Sequence[str], ranks: int, env: Mapping[str, str]) -> Seen:
    """Launch ARGV, let FAULT happen when all RANKS are there, and see the end."""
    with processes.place() as (folder, base):
        reports = processes.Reports(folder)
        told = {
            "BENCH_FAILS": str(ranks - 1) if fault.a_rank_fails else "none",
            "BENCH_DEAF": str(int(fault.is_deaf)),
        }
        launcher = processes.start(argv, folder, {**base, **reports.env, **told, **env})
        try:
            reports.expect("ready", ranks, [launcher], folder / "output")
            began = time.monotonic()
            if fault.a_rank_fails:
                reports.release()
            else:
                launcher.send_signal(signal.SIGTERM)
            terms = reports.hear("term", math.inf, [launcher])
            ended = time.monotonic()
            if launcher.poll() is None:
                raise Failed(f"it did not end within {processes.TIMEOUT_S:g} s")
            left = len(processes.marked(base[MARK]))
            if fault.a_rank_fails:
                (began,) = reports.expect("fails", 1, (), folder / "output")
        finally:
            launcher.kill()
            launcher.wait()
            reports.close()
        asked = sorted(at - began for at in terms)
        return Seen(
            exit_s=ended - began,
            first_term_s=asked[0] if asked else None,
            last_term_s=asked[-1] if asked else None,
            asked=len(asked),
            left=left,
        )


# -- showing ---------------------------------------------------------------------------------------


def _show(
    fault: Fault, ranks: int, rounds: int, seen: Mapping[tuple[str, str, int], Sequence[Seen]]
) -> None:
    rows = []
    for (name, launcher, number), measured in seen.items():
        if (name, number) == (fault.name, ranks):
            first = [trial.first_term_s for trial in measured if trial.first_term_s is not None]
            last = [trial.last_term_s for trial in measured if trial.last_term_s is not None]
            rows.append(
                [
                    launcher,
                    spread(summary(first)) if first else "-",
                    spread(summary(last)) if last else "-",
                    str(min(trial.asked for trial in measured)),
                    spread(summary([trial.exit_s for trial in measured])),
                    str(max(trial.left for trial in measured)),
                ]
            )
    heads = ["launcher", "first TERM", "last TERM", "asked", "exit", "left behind"]
    title = f"{ranks} ranks: {fault.name}; median (lowest-highest) of {rounds}, ms"
    if rows:
        print(report.table(title, heads, rows))


def _goals(
    chosen: argparse.Namespace, seen: Mapping[tuple[str, str, int], Sequence[Seen]]
) -> list[Goal]:
    goals = []
    for ranks in chosen.ranks:
        fails, deaf, _ = (seen.get((fault.name, OUR_NAME, ranks), []) for fault in FAULTS)
        terms = [trial.first_term_s for trial in fails if trial.first_term_s is not None]
        exits, late = ([trial.exit_s for trial in trials] for trials in (fails, deaf))
        figures = [
            ("first TERM", terms, FIRST_TERM_S),
            *([("exit", exits, EXIT_S[ranks])] if ranks in EXIT_S else []),
            ("exit, TERM ignored", late, chosen.grace + AFTER_GRACE_S),
        ]
        for what, seconds, limit in figures:
            middle = median(seconds) if seconds else None
            goals.append(report.goal(f"{ranks} ranks: failure to {what}", middle, limit))
    ours = [
        trial.left for (_, name, _), rounds in seen.items() if name == OUR_NAME for trial in rounds
    ]
    goals.append(Goal("processes left behind", "0", str(max(ours, default=0)), not any(ours)))
    return goals
