"""`scripts/bench launch`: how soon ranks run, how soon the launcher is gone, and what it costs."""

from __future__ import annotations

import argparse
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import launches
from launches import AGAIN, BARE, FLEETRUN, OURS, WORKER, command
from report import finish, in_turns, numbers, ratios, show, spread

# The run directory's plan, manifest and pruning, and git, belong to the start.
_SETTLE_S = 3.0


class Launch(NamedTuple):
    """What one launch was seen to do; seconds, bytes, and the share of a core with quiet ranks."""

    first_line_s: float
    last_line_s: float
    exit_lag_s: float
    cpu_s: float
    peak_rss: int
    idle_share: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--ranks", type=numbers, default=(1, 8, 64), help="of a launch (1,8,64)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, taken in turns (5)")
    parser.add_argument(
        "--heavy-ranks", type=int, default=8, help="most ranks of those that import frameworks (8)"
    )
    parser.add_argument("--idle-s", type=float, default=2, help="seconds of quiet ranks (2)")


def run(chosen: argparse.Namespace) -> int:
    """Measure, show, and write what CHOSEN says."""
    todo = {
        (name, ranks): partial(_watch, name, command(template, ranks=ranks, program=WORKER), ranks)
        for ranks in chosen.ranks
        for name, template in launches.peers(ranks, chosen.heavy_ranks).items()
    }
    idle = {key: partial(measure, chosen.idle_s) for key, measure in todo.items()}
    measured, failures = in_turns(chosen.rounds, idle)
    for ranks in chosen.ranks:
        _show_launches(ranks, {name: seen for (name, n), seen in measured.items() if n == ranks})
    walls, failed = in_turns(chosen.rounds * 3, _QUICK)
    bare = walls["python -c pass"]
    rows = [[name, spread(values), ratios(values, bare)] for name, values in walls.items()]
    show("Commands that start nothing, ms", ["command", "time", "x python"], rows)
    failures |= failed
    return finish(
        chosen,
        failures,
        launches=[
            {"launcher": name, "ranks": ranks, "rounds": [launch._asdict() for launch in rounds]}
            for (name, ranks), rounds in measured.items()
        ],
        quick=walls,
    )


def _watch(name: str, argv: list[str], ranks: int, idle_s: float) -> Launch:
    """Launch ARGV, which must start RANKS workers, and see what it does."""
    # An empty mask means CPU to fleetrun, and one GPU to Paddle's launcher.
    env = {"CUDA_VISIBLE_DEVICES": ""} if name in {OURS, AGAIN} else {}
    with launches.launch(argv, **env) as job:
        first = job.expect("first", ranks)
        time.sleep(min(_SETTLE_S, 5 * idle_s))
        pid = job.launchers[0].pid
        before, at = launches.on_cpu_s(pid), time.monotonic()
        time.sleep(idle_s)
        idle_share = (launches.on_cpu_s(pid) - before) / (time.monotonic() - at)
        status = Path(f"/proc/{pid}/status").read_text().split()
        job.release()
        ended = job.see_end()
        # Still a zombie: its own times can be read, while wait4 would add those of its children.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        last = max(job.expect("end", ranks))
        job.await_end()
    return Launch(
        first_line_s=min(first) - job.began,
        last_line_s=max(first) - job.began,
        exit_lag_s=ended - last,
        cpu_s=(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
        peak_rss=int(status[status.index("VmHWM:") + 1]) * 1024,
        idle_share=idle_share,
    )


def _show_launches(ranks: int, by_name: dict[str, list[Launch]]) -> None:
    bare = [launch.last_line_s for launch in by_name[BARE]]
    rows = []
    for name, seen in by_name.items():
        last = [launch.last_line_s for launch in seen]
        rows.append(
            [
                name,
                spread([launch.first_line_s for launch in seen]),
                spread(last),
                ratios(last, bare),
                spread([launch.exit_lag_s for launch in seen]),
                spread([launch.cpu_s for launch in seen]),
                spread([launch.peak_rss / 1e6 for launch in seen], "{:.1f}".format),
                spread([launch.idle_share for launch in seen], "{:.2%}".format),
            ]
        )
    heads = ["launcher", "first line", "last line", "x bare", "exit lag", "own CPU", "MB", "quiet"]
    show(f"{ranks} ranks, median (lowest-highest), ms", heads, rows)


# -- commands that start nothing -------------------------------------------------------------------


def _wall_s(*argv: str, **env: str) -> float:
    with launches.launch(argv, CUDA_VISIBLE_DEVICES="", **env) as job:
        return job.await_end() - job.began


_QUICK = {
    "python -c pass": partial(_wall_s, sys.executable, "-c", "pass"),
    "fleetrun --help": partial(_wall_s, *FLEETRUN, "--help"),
    # As bash asks.
    "Tab after fleetrun --n": partial(
        _wall_s,
        *FLEETRUN,
        _FLEETRUN_COMPLETE="bash_complete",
        COMP_WORDS="fleetrun --n",
        COMP_CWORD="1",
    ),
    "fleetrun --dry-run": partial(_wall_s, *FLEETRUN, "--dry-run", "--nproc_per_node=8", WORKER),
}
