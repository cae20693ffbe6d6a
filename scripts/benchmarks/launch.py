"""`scripts/bench launch`: how soon ranks run, how soon the launcher is gone, and what it costs."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import peers
import processes
import report
from peers import BARE, FLEETRUN, OUR_NAME, OURS
from processes import HERE, WORKER, Failed
from report import Goal, Summary, mb, ms, spread, summary

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from peers import Peer
    from processes import Launch

RANKS = (1, 2, 8, 64, 256)
LINES = 1_000_000
PLAIN = "plain redirect"

# What has to be reached; ratios are taken within one run.
LAST_LINE_AFTER_BARE_S = 0.100
TIMES_SOONER = 8
TIMES_BARE = 1.25
EXIT_LAG_S = 0.020
QUICK_S = 0.150
PEAK_RSS = 35e6
IDLE_SHARE = 0.001
FLOOD_RATIO = 1.03


def add_to(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this benchmark to SUBCOMMANDS."""
    parser = subcommands.add_parser("launch", help="start-up, exit and cost of a launch")
    peers.add_ranks(parser, RANKS, heavy=8)
    parser.add_argument("--idle-s", type=float, default=5, help="seconds of quiet ranks (5)")
    parser.add_argument(
        "--lines", type=int, default=LINES, help="lines of the chatty rank (1000000)"
    )
    parser.add_argument("--only", default="", help="some of: ranks, quick, idle, lines")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Measure, show, and write what CHOSEN says."""
    processes.adopt_orphans()
    parts = chosen.only.split(",") if chosen.only else ["ranks", "quick", "idle", "lines"]
    document: dict[str, Any] = {"machine": report.machine(), "versions": peers.versions()}
    goals: list[Goal] = []
    print(report.headline(document))
    for part in parts:
        _PARTS[part](chosen, document, goals)
    print(report.goals(goals))
    document["goals"] = [goal._asdict() for goal in goals]
    if chosen.json:
        chosen.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


# -- ranks: from the command to the first lines, and from the last exit to the launcher's ---------


def _ranks(chosen: argparse.Namespace, document: dict[str, Any], goals: list[Goal]) -> None:
    launches, failures = _launches(chosen)
    medians: dict[tuple[str, int], dict[str, Summary]] = {
        key: {
            field: summary([getattr(launch, field) for launch in rounds])
            for field in ("first_line_s", "last_line_s", "exit_lag_s", "cpu_s", "peak_rss")
        }
        for key, rounds in launches.items()
    }
    document["launches"] = [
        {"launcher": name, "ranks": ranks, "rounds": [launch._asdict() for launch in rounds]}
        for (name, ranks), rounds in launches.items()
    ]
    document["failures"] = failures
    for ranks in chosen.ranks:
        rows = [
            _row(name, numbers, medians.get((BARE, ranks)))
            for (name, number), numbers in medians.items()
            if number == ranks
        ]
        heads = ["launcher", "first line", "last line", "x bare", "exit lag", "own CPU", "peak MB"]
        title = f"{ranks} rank{'s' * (ranks > 1)}, median (lowest-highest) of {chosen.rounds}, ms"
        print(report.table(title, heads, rows))
    for name, why in failures.items():
        print(f"{name}: not measured: {why}\n")
    _judge_ranks(chosen, medians, goals)


def _launches(
    chosen: argparse.Namespace,
) -> tuple[dict[tuple[str, int], list[Launch]], dict[str, str]]:
    """Launch everything ROUNDS times in turns, each round in the other direction."""
    launches: dict[tuple[str, int], list[Launch]] = defaultdict(list)
    failures = {peer.name: peer.absent for peer in peers.all_peers() if peer.absent}
    todo: list[tuple[Peer, int]] = [
        (peer, ranks)
        for ranks in chosen.ranks
        for peer in peers.all_peers()
        if not peer.absent and (not peer.is_heavy or ranks <= chosen.heavy_ranks)
    ]
    for number in range(chosen.rounds):
        for peer, ranks in todo if number % 2 == 0 else todo[::-1]:
            report.progress(f"round {number + 1} of {chosen.rounds}: {peer.name}, {ranks} ranks")
            try:
                seen = processes.watch(peer.command(ranks), ranks, env=peer.env)
            except Failed as failure:
                failures[f"{peer.name}, {ranks} ranks"] = str(failure)
            else:
                launches[peer.name, ranks].append(seen)
    report.progress("")
    # In the order of the table, whichever came first.
    return {
        key: launches[key] for key in ((p.name, r) for p, r in todo) if key in launches
    }, failures


def _row(name: str, numbers: dict[str, Summary], bare: dict[str, Summary] | None) -> list[str]:
    ratio = numbers["last_line_s"].median / bare["last_line_s"].median if bare else None
    return [
        name,
        spread(numbers["first_line_s"]),
        spread(numbers["last_line_s"]),
        "-" if ratio is None else f"{ratio:.2f}",
        spread(numbers["exit_lag_s"]),
        ms(numbers["cpu_s"].median),
        mb(numbers["peak_rss"].high),
    ]


def _judge_ranks(
    chosen: argparse.Namespace,
    medians: dict[tuple[str, int], dict[str, Summary]],
    goals: list[Goal],
) -> None:
    ours = {ranks: medians.get((OUR_NAME, ranks)) for ranks in chosen.ranks}

    def last(name: str, ranks: int) -> float | None:
        numbers = medians.get((name, ranks))
        return None if numbers is None else numbers["last_line_s"].median

    few, many = 8, 256
    if few in chosen.ranks:
        goals.append(
            _goal(
                "8 ranks: last line after the bare loop's",
                "<= 100 ms",
                _both(last(OUR_NAME, few), last(BARE, few), lambda mine, bare: mine - bare),
                LAST_LINE_AFTER_BARE_S,
                lambda value: f"{ms(value)} ms",
            )
        )
        for peer in peers.all_peers():
            if peer.is_heavy:
                times = _both(last(peer.name, few), last(OUR_NAME, few), lambda a, b: a / b)
                seen = "-" if times is None else f"{times:.1f} times"
                reached = None if times is None else times >= TIMES_SOONER
                goals.append(Goal(f"8 ranks: sooner than {peer.name}", ">= 8 times", seen, reached))
    if many in chosen.ranks:
        goals.append(
            _goal(
                "256 ranks: last line against the bare loop's",
                "<= 1.25 x",
                _both(last(OUR_NAME, many), last(BARE, many), lambda mine, bare: mine / bare),
                TIMES_BARE,
                lambda value: f"{value:.2f} x",
            )
        )
    lags = [numbers["exit_lag_s"].median for numbers in ours.values() if numbers]
    peaks = [numbers["peak_rss"].high for numbers in ours.values() if numbers]
    goals += [
        _goal(
            "exit after the last rank's, worst number of ranks",
            "< 20 ms",
            max(lags, default=None),
            EXIT_LAG_S,
            lambda value: f"{ms(value)} ms",
        ),
        _goal(
            "launcher's peak memory, worst number of ranks",
            "< 35 MB",
            max(peaks, default=None),
            PEAK_RSS,
            lambda value: f"{mb(value)} MB",
        ),
    ]


def _both(
    first: float | None, other: float | None, combine: Callable[[float, float], float]
) -> float | None:
    return None if first is None or other is None else combine(first, other)


def _goal(
    what: str, wanted: str, seen: float | None, limit: float, write: Callable[[float], str]
) -> Goal:
    if seen is None:
        return Goal(what, wanted, "-", None)
    return Goal(what, wanted, write(seen), seen <= limit)


# -- quick: commands that start nothing -----------------------------------------------------------


def _quick(chosen: argparse.Namespace, results: dict[str, Any], goals: list[Goal]) -> None:
    commands = {
        "python -c pass": (sys.executable, "-c", "pass"),
        "fleetrun --help": (*FLEETRUN, "--help"),
        "fleetrun --dry-run": (*FLEETRUN, "--dry-run", "--nproc_per_node=8", WORKER),
    }
    walls: dict[str, list[float]] = defaultdict(list)
    for _ in range(chosen.rounds * 3):
        for name, command in commands.items():
            walls[name].append(_walled(command))
    results["quick"] = dict(walls)
    rows = [[name, spread(summary(values))] for name, values in walls.items()]
    print(report.table("Commands that start nothing, ms", ["command", "wall time"], rows))
    for name in list(commands)[1:]:
        seen = median(walls[name])
        goals.append(_goal(name, "< 150 ms", seen, QUICK_S, lambda value: f"{ms(value)} ms"))


def _walled(command: Sequence[str]) -> float:
    return processes.wall_s(command, env=OURS)


# -- idle: quiet ranks ----------------------------------------------------------------------------


def _idle(chosen: argparse.Namespace, results: dict[str, Any], goals: list[Goal]) -> None:
    ours = next(peer for peer in peers.all_peers() if peer.name == OUR_NAME)
    seen = processes.watch(ours.command(8), 8, env=ours.env, idle_s=chosen.idle_s)
    share = seen.idle_share or 0.0
    results["idle_share"] = share
    goals.append(
        _goal(
            f"CPU while 8 ranks are quiet for {chosen.idle_s:g} s",
            "< 0.1 %",
            share,
            IDLE_SHARE,
            lambda value: f"{value:.3%}",
        )
    )


# -- lines: a chatty rank -------------------------------------------------------------------------


def _lines(chosen: argparse.Namespace, results: dict[str, Any], goals: list[Goal]) -> None:
    program = str(HERE / "flood.py")
    loop = 'exec "$1" -u "$2" >workerlog.0 2>&1'
    plain = ("sh", "-c", loop, "sh", sys.executable, program)
    ours = (*FLEETRUN, "--nproc_per_node=1", "--quiet", "--log_dir=log", program)
    floods: dict[str, list[processes.Flood]] = {PLAIN: [], OUR_NAME: []}
    for number in range(chosen.rounds):
        report.progress(f"round {number + 1} of {chosen.rounds}: {chosen.lines} lines")
        floods[PLAIN].append(processes.flood(plain, chosen.lines, log="workerlog.0", console=False))
        floods[OUR_NAME].append(
            processes.flood(ours, chosen.lines, env=OURS, log="log/workerlog.0", console=True)
        )
    report.progress("")
    results["lines"] = {name: [flood._asdict() for flood in some] for name, some in floods.items()}
    took = {name: summary([flood.took_s for flood in some]) for name, some in floods.items()}
    rows = [
        [
            name,
            spread(took[name]),
            spread(summary([flood.cpu_s for flood in some])),
            str(min(flood.lines_in_log for flood in some)),
            "-" if name == PLAIN else str(min(flood.lines_on_console or 0 for flood in some)),
        ]
        for name, some in floods.items()
    ]
    heads = ["one rank's output", "time", "its CPU time", "in the log", "on the console"]
    print(report.table(f"A rank that prints {chosen.lines} lines, ms", heads, rows))
    # Pairs, because both of a pair ran under the same load of the machine.
    pairs = zip(floods[OUR_NAME], floods[PLAIN], strict=True)
    ratio = median([mine.took_s / bare.took_s for mine, bare in pairs])
    goals.append(
        _goal(
            "a rank's time to print, against a plain redirect",
            "<= 1.03 x",
            ratio,
            FLOOD_RATIO,
            lambda value: f"{value:.3f} x",
        )
    )
    fewest = min(min(flood.lines_in_log, flood.lines_on_console or 0) for flood in floods[OUR_NAME])
    goals.append(
        Goal(
            "lines in the log and on the console",
            str(chosen.lines),
            str(fewest),
            fewest == chosen.lines,
        )
    )


_PARTS = {"ranks": _ranks, "quick": _quick, "idle": _idle, "lines": _lines}
