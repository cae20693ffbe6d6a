"""`scripts/bench recovery`: from a rank's failure to the first line of all ranks' second run."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import peers
import processes
import report
from peers import FLEETRUN, OURS
from processes import HERE, Failed
from report import ms, spread, summary

if TYPE_CHECKING:
    import argparse
    import subprocess
    from collections.abc import Callable, Mapping
    from pathlib import Path

RANKS = (8,)
SCRIPT = str(HERE / "recovering.py")
_TIMEOUT_S = 300.0
# What has to be reached at 8 ranks with Paddle imported, on one host and on several.
FIRST_LINE_S, HOSTS_FIRST_LINE_S = 0.300, 0.600

_LOOP = """
while :; do
    pids=
    for ((i = 0; i < $1; i++)); do
        PADDLE_TRAINER_ID=$i "$2" -u "$3" & pids="$pids $!"
    done
    for ((i = 0; i < $1; i++)); do
        wait -n || { kill $pids; wait; continue 2; }
    done
    break
done
"""


class Way(NamedTuple):
    """One way to start again: its command for a number of ranks, and why it is absent here."""

    name: str
    command: Callable[[int], list[str]]
    env: Mapping[str, str] = {}
    absent: str | None = None


def ways() -> list[Way]:
    """Return what is compared."""
    known = {peer.name: peer for peer in peers.all_peers()}
    paddle, torch = known["paddle launch"], known["torchrun"]

    def ours(*more: str) -> Callable[[int], list[str]]:
        options = ("--max_restart=1", *more)
        return lambda ranks: [*FLEETRUN, *options, f"--nproc_per_node={ranks}", SCRIPT]

    return [
        Way("shell loop", lambda n: ["bash", "-c", _LOOP, "bash", str(n), sys.executable, SCRIPT]),
        Way("fleetrun", ours(), OURS),
        Way("fleetrun, not forked", ours("--preload=none"), OURS),
        Way(
            "paddle launch",
            lambda n: [*paddle.before[:-1], "--max_restart=1", paddle.before[-1], str(n), SCRIPT],
            absent=paddle.absent,
        ),
        Way(
            "torchrun",
            lambda n: [torch.before[0], "--max-restarts=1", torch.before[1], str(n), SCRIPT],
            absent=torch.absent,
        ),
    ]


def add_to(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this benchmark to SUBCOMMANDS."""
    parser = subcommands.add_parser("recovery", help="how soon ranks run again after a failure")
    peers.add_ranks(parser, RANKS, heavy=8)
    parser.add_argument(
        "--hosts",
        type=int,
        default=1,
        help="launchers on this machine that meet as hosts and share the ranks (1); fleetrun only",
    )
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Measure in turns, show, and write what CHOSEN says."""
    processes.adopt_orphans()
    seen: dict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)
    failures: dict[str, str] = {}
    # A shell loop has no hosts, and the others do not start again together here.
    compared = [way for way in ways() if chosen.hosts == 1 or way.name.startswith("fleetrun")]
    todo = [(way, ranks) for ranks in chosen.ranks for way in compared]
    goal_s = FIRST_LINE_S if chosen.hosts == 1 else HOSTS_FIRST_LINE_S
    for number, (way, ranks) in report.in_turns(chosen.rounds, todo):
        report.progress(f"{number}: {way.name}, {ranks} ranks")
        if way.absent:
            failures[way.name] = way.absent
            continue
        try:
            seen[way.name, ranks].append(_recover(way, ranks, chosen.hosts))
        except Failed as failure:
            failures[way.name] = str(failure)
    goals = []
    for ranks in chosen.ranks:
        rows = []
        for way in compared:
            rounds = seen.get((way.name, ranks), [])
            if rounds:
                names = ("first line", "imported")
                cells = [spread(summary([trial[name] for trial in rounds])) for name in names]
                phases = "; ".join(f"{k} {ms(v)}" for k, v in rounds[-1].items() if k not in names)
                rows.append([way.name, *cells, phases or "-"])
        where = f" on {chosen.hosts} hosts" if chosen.hosts > 1 else ""
        title = (
            f"{ranks} ranks{where}: a rank fails; ms to the last rank's, median of {chosen.rounds}"
        )
        print(report.table(title, ["", "first line", "imported", "phases of the last"], rows))
        lines = [trial["first line"] for trial in seen.get(("fleetrun", ranks), [])]
        first = summary(lines).median if lines else None
        goals.append(report.goal(f"{ranks} ranks{where}: failure to first line", first, goal_s))
    report.unmeasured(failures)
    print(report.goals(goals))
    rounds_of = [{"way": way, "ranks": n, "rounds": rounds} for (way, n), rounds in seen.items()]
    document = {"versions": peers.versions(), "recovery": rounds_of, "failures": failures}
    report.write(chosen, document)
    return 0


def _commands(way: Way, ranks: int, hosts: int) -> list[list[str]]:
    """Return the command of each of HOSTS, which meet at a port of this machine."""
    if hosts == 1:
        return [way.command(ranks)]
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    *words, script = way.command(ranks // hosts)
    words += [f"--master=127.0.0.1:{port}", f"--nnodes={hosts}", "--host=127.0.0.1"]
    return [[*words, f"--log_dir=log{host or ''}", script] for host in range(hosts)]


def _recover(way: Way, ranks: int, hosts: int) -> dict[str, float]:
    """Let a rank of RANKS fail, and return how long it took until all ran again, in seconds."""
    with processes.place() as (folder, base):
        reports, output = processes.Reports(folder), folder / "output"
        # A rank of a shell loop knows its number alone.
        env = {**base, "BENCH_FOLDER": str(folder), "BENCH_RANKS": str(ranks), **way.env}
        commands = _commands(way, ranks, hosts)
        launchers = [processes.start(command, folder, env) for command in commands]
        logs = [folder / f"log{host or ''}/latest/events.jsonl" for host in range(hosts)]
        events = logs[0]
        try:
            reports.expect("ready", ranks, launchers, output, _TIMEOUT_S)
            for launcher, log in zip(launchers, logs, strict=True):
                if way.name == "fleetrun":
                    _until(launcher, partial(_is_in, "fork server", log))
            (folder / "fail").touch()
            heard = {
                word: reports.expect(word, count, launchers, output, _TIMEOUT_S)
                for word, count in (("fails", 1), ("line", ranks), ("imported", ranks))
            }
            for launcher in launchers:
                launcher.wait(_TIMEOUT_S)
        finally:
            for launcher in launchers:
                if launcher.poll() is None:
                    os.killpg(launcher.pid, signal.SIGKILL)
                launcher.wait()
            reports.close()
        failed = heard["fails"][0]
        outcome = {
            "first line": max(heard["line"]) - failed,
            "imported": max(heard["imported"]) - failed,
        }
        if events.exists():
            lines = [json.loads(line) for line in events.read_text().splitlines()]
            phases = next((line["phases"] for line in lines if line["event"] == "recovered"), {})
            return {**phases, **outcome}
        return outcome


def _is_in(word: str, path: Path) -> bool:
    return path.exists() and word in path.read_text()


def _until(launcher: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not condition():
        if launcher.poll() is not None:
            raise Failed(f"it has ended with {launcher.returncode} and did not start again")
        if time.monotonic() > deadline:
            raise Failed(f"it did not start again within {_TIMEOUT_S:g} s")
        time.sleep(0.005)
