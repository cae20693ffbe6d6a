"""`scripts/bench launch`: how soon ranks run, how soon the launcher is gone, and what it costs."""

from __future__ import annotations

import operator
import sys
from collections import defaultdict
from statistics import median
from typing import TYPE_CHECKING, Any

import peers
import processes
import report
from peers import BARE, FLEETRUN, OUR_NAME, OURS
from processes import HERE, WORKER, Failed
from report import Goal, Summary, goal, mb, ms, spread, summary

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from peers import Peer
    from processes import Launch

RANKS = (1, 2, 8, 64, 256)
LINES = 1_000_000
PLAIN = "plain redirect"
# The second launch of a null pair: the same command, whose difference is the machine's.
AGAIN = " again"

# What has to be reached; differences and ratios are those of pairs of one round.
AFTER_BARE_S = 0.040
TIMES_SOONER = 8
TIMES_BARE = 1.05
EXIT_LAG_S, WORST_EXIT_LAG_S = 0.003, 0.020
QUICK_S, DRY_RUN_S = 0.040, 0.150
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
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Measure, show, and write what CHOSEN says."""
    processes.adopt_orphans()
    parts = chosen.only.split(",") if chosen.only else ["ranks", "quick", "idle", "lines"]
    document: dict[str, Any] = {"machine": report.machine(), "versions": peers.versions()}
    document["command"] = " ".join(FLEETRUN)
    goals: list[Goal] = []
    print(report.headline(document))
    print(f"fleetrun is started as `{document['command']}`\n")
    for part in parts:
        _PARTS[part](chosen, document, goals)
    print(report.goals(goals))
    document["goals"] = [goal._asdict() for goal in goals]
    report.write(chosen, document)
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
    report.unmeasured(failures)
    print(_beside_bare(chosen.ranks, launches))
    _judge_ranks(chosen, medians, launches, goals)


_Launches = dict[tuple[str, int], list["Launch"]]


_FIGURES: tuple[tuple[str, str, Callable[[float, float], float], Callable[[float], str]], ...] = (
    ("first line, later by", "first_line_s", operator.sub, ms),
    ("last line, later by", "last_line_s", operator.sub, ms),
    ("last line, times", "last_line_s", operator.truediv, "{:.2f}".format),
    ("exit lag, longer by", "exit_lag_s", operator.sub, ms),
)


def _beside_bare(ranks: Sequence[int], launches: _Launches) -> str:
    """Compare fleetrun with the bare loop, each figure beside that of its null pair."""
    rows = []
    for number in ranks:
        for what, field, compare, write in _FIGURES:
            cells = []
            for pair in ((OUR_NAME, BARE), (OUR_NAME + AGAIN, OUR_NAME)):
                seen = [compare(*of) for of in _pairs(launches, pair, number, field)]
                cells.append(spread(summary(seen), write) if seen else "-")
            rows.append([f"{number}: {what}", *cells])
    title = "In pairs of a round, median (lowest-highest), ms or times"
    heads = ["ranks", "fleetrun, bare loop", "null pair"]
    return report.table(title, heads, rows)


def _pairs(
    launches: _Launches, pair: tuple[str, str], ranks: int, field: str
) -> list[tuple[float, float]]:
    """Return the FIELD of both launchers of PAIR in each round; nothing if one has failed."""
    first, other = (launches.get((name, ranks), []) for name in pair)
    if len(first) != len(other):
        return []
    return [(getattr(a, field), getattr(b, field)) for a, b in zip(first, other, strict=True)]


def _launches(
    chosen: argparse.Namespace,
) -> tuple[dict[tuple[str, int], list[Launch]], dict[str, str]]:
    """Launch everything ROUNDS times in turns, each round in the other direction."""
    launches: dict[tuple[str, int], list[Launch]] = defaultdict(list)
    compared = peers.all_peers()
    failures = {peer.name: peer.absent for peer in compared if peer.absent}
    ours = next(peer for peer in compared if peer.name == OUR_NAME)
    compared.insert(compared.index(ours) + 1, ours._replace(name=OUR_NAME + AGAIN))
    todo: list[tuple[Peer, int]] = [
        (peer, ranks)
        for ranks in chosen.ranks
        for peer in compared
        if not peer.absent and (not peer.is_heavy or ranks <= chosen.heavy_ranks)
    ]
    # The first launch of a new checkout or an upgrade writes bytecode.
    processes.watch(ours.command(1), 1, env=ours.env)
    for number, (peer, ranks) in report.in_turns(chosen.rounds, todo):
        report.progress(f"round {number} of {chosen.rounds}: {peer.name}, {ranks} ranks")
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
    launches: _Launches,
    goals: list[Goal],
) -> None:
    ours = {ranks: medians.get((OUR_NAME, ranks)) for ranks in chosen.ranks}
    for ranks in sorted({1, 8, 64, 256} & {*chosen.ranks}):
        pairs = _pairs(launches, (OUR_NAME, BARE), ranks, "last_line_s")
        of = f"{ranks} rank{'s' * (ranks > 1)}: last line"
        if ranks <= 8:
            later = median([mine - bare for mine, bare in pairs]) if pairs else None
            goals.append(goal(f"{of} after the bare loop's", later, AFTER_BARE_S))
        else:
            ratio = median([mine / bare for mine, bare in pairs]) if pairs else None
            what = f"{of} against the bare loop's"
            goals.append(goal(what, ratio, TIMES_BARE, "{:.2f} x".format))
    for peer in peers.all_peers():
        if peer.is_heavy and 8 in chosen.ranks:
            theirs, mine = medians.get((peer.name, 8)), ours[8]
            times = (
                theirs["last_line_s"].median / mine["last_line_s"].median
                if theirs and mine
                else None
            )
            shown = "-" if times is None else f"{times:.1f} times"
            reached = None if times is None else times >= TIMES_SOONER
            goals.append(Goal(f"8 ranks: sooner than {peer.name}", ">= 8 times", shown, reached))
    lags = {ranks: numbers["exit_lag_s"].median for ranks, numbers in ours.items() if numbers}
    peaks = [numbers["peak_rss"].high for numbers in ours.values() if numbers]
    after = "exit after the last rank's, "
    if 8 in chosen.ranks:
        goals.append(goal(f"{after}8 ranks", lags.get(8), EXIT_LAG_S))
    worst, peak = max(lags.values(), default=None), max(peaks, default=None)
    memory = "launcher's peak memory, worst number of ranks"
    goals += [
        goal(f"{after}worst number of ranks", worst, WORST_EXIT_LAG_S),
        goal(memory, peak, PEAK_RSS, lambda value: f"{mb(value)} MB"),
    ]


# -- quick: commands that start nothing -----------------------------------------------------------


def _quick(chosen: argparse.Namespace, results: dict[str, Any], goals: list[Goal]) -> None:
    commands = {
        "python -c pass": (sys.executable, "-c", "pass"),
        "fleetrun --help": (*FLEETRUN, "--help"),
        "fleetrun --help" + AGAIN: (*FLEETRUN, "--help"),
        "Tab after fleetrun --n": FLEETRUN,
        "fleetrun --dry-run": (*FLEETRUN, "--dry-run", "--nproc_per_node=8", WORKER),
    }
    # As bash asks.
    tab = {"_FLEETRUN_COMPLETE": "bash_complete", "COMP_WORDS": "fleetrun --n", "COMP_CWORD": "1"}
    walls: dict[str, list[float]] = defaultdict(list)
    for _ in range(chosen.rounds * 3):
        for name, command in commands.items():
            env = {**OURS, **tab} if name.startswith("Tab") else OURS
            walls[name].append(processes.wall_s(command, env=env))
    results["quick"] = dict(walls)
    rows = [[name, spread(summary(values))] for name, values in walls.items()]
    print(report.table("Commands that start nothing, ms", ["command", "wall time"], rows))
    for name in list(commands)[1:]:
        limit = DRY_RUN_S if "dry-run" in name else QUICK_S
        goals.append(goal(name, median(walls[name]), limit))


# -- idle: quiet ranks ----------------------------------------------------------------------------


def _idle(chosen: argparse.Namespace, results: dict[str, Any], goals: list[Goal]) -> None:
    ours = next(peer for peer in peers.all_peers() if peer.name == OUR_NAME)
    seen = processes.watch(ours.command(8), 8, env=ours.env, idle_s=chosen.idle_s)
    share = seen.idle_share or 0.0
    results["idle_share"] = share
    what = f"CPU while 8 ranks are quiet for {chosen.idle_s:g} s"
    goals.append(goal(what, share, IDLE_SHARE, "{:.3%}".format))


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
    what = "a rank's time to print, against a plain redirect"
    goals.append(goal(what, ratio, FLOOD_RATIO, "{:.3f} x".format))
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
