"""`scripts/bench nodes`: one job on several hosts, against as many launches that know of no other.

The hosts are network namespaces of this machine, so all share its cores: what counts is the ratio
to the same number of launches side by side.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import peers
import processes
import report
from peers import FLEETRUN, OURS, ROOT
from processes import HERE, WORKER, Failed
from report import Goal, ms, spread, summary

sys.path.insert(0, str(ROOT / "tests"))

import lab

if TYPE_CHECKING:
    import argparse
    import subprocess
    from collections.abc import Iterator, Mapping, Sequence

HOSTS = (1, 2, 4, 16, 64)
PORT = 7100
VICTIM = str(HERE / "victim.py")
APART = "unconnected"
BY_LIST, BY_MASTER = "fleetrun --ips", "fleetrun --master"

# What has to be reached.
TIMES_APART, AFTER_APART_S = 1.25, 0.100
LAST_TERM_S, EXIT_S = 0.3, 0.5


class Launcher(NamedTuple):
    """One way to launch on several hosts; {hosts}, {ips} and {master} in its words are replaced."""

    name: str
    words: tuple[str, ...]
    is_heavy: bool = False
    env: Mapping[str, str] = {}
    absent: str | None = None

    def command(self, hosts: Sequence[lab.Host]) -> list[str]:
        """Return the command that runs on each of HOSTS."""
        told = {
            "hosts": str(len(hosts)),
            "ips": ",".join(host.ip for host in hosts),
            "master": f"{hosts[0].ip}:{PORT}",
        }
        return [word.format(**told) for word in self.words]


def _launchers() -> list[Launcher]:
    known = {peer.name: peer for peer in peers.all_peers()}
    paddle, torch = known["paddle launch"], known["torchrun"]
    one_rank, several = "--nproc_per_node=1", "--nnodes={hosts}"
    c10d = ("--rdzv-backend=c10d", "--rdzv-endpoint={master}")
    return [
        Launcher(APART, (*FLEETRUN, one_rank), env=OURS),
        Launcher(BY_LIST, (*FLEETRUN, one_rank, "--ips={ips}"), env=OURS),
        Launcher(BY_MASTER, (*FLEETRUN, one_rank, "--master={master}", several), env=OURS),
        Launcher(
            "paddle launch",
            (*paddle.before[:-1], one_rank, "--master={master}", several),
            is_heavy=True,
            absent=paddle.absent,
        ),
        Launcher(
            "torchrun",
            (torch.before[0], "--nproc-per-node=1", several, *c10d),
            is_heavy=True,
            absent=torch.absent,
        ),
    ]


class Start(NamedTuple):
    """When the first and the last rank ran its first line; seconds from the command on."""

    first_s: float
    last_s: float


class Failure(NamedTuple):
    """What came of a rank's failure; seconds from it on. None: nobody was asked, or not ended."""

    last_term_s: float | None
    exit_s: float | None
    asked: int


def add_to(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this benchmark to SUBCOMMANDS."""
    parser = subcommands.add_parser("nodes", help="one job on several hosts (needs root)")
    parser.add_argument(
        "--hosts",
        type=lambda text: tuple(int(part) for part in text.split(",")),
        default=HOSTS,
        help="numbers of hosts (1,2,4,16,64)",
    )
    parser.add_argument(
        "--engine", choices=("ssh", "slurm", "mpi"), help="start by this, beside the engine alone"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds, taken in turns (5)")
    parser.add_argument(
        "--heavy-hosts",
        type=int,
        default=2,
        help="launchers that import a framework are measured up to this many hosts (2)",
    )
    parser.add_argument("--give-up-s", type=float, default=15.0, help="await an end so long (15)")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Measure, show, and write what CHOSEN says."""
    reason = "network namespaces need root" if not lab.is_root() else lab.missing()
    if reason:
        print(f"scripts/bench: there can be no hosts here: {reason}", file=sys.stderr)
        return 3
    if chosen.engine:
        import engines

        return engines.run(chosen)
    processes.adopt_orphans()
    machine = {"machine": report.machine(), "versions": peers.versions()}
    print(report.headline(machine))
    starts: dict[tuple[int, str], list[Start]] = defaultdict(list)
    ends: dict[tuple[int, str], list[Failure]] = defaultdict(list)
    failures = {launcher.name: launcher.absent for launcher in _launchers() if launcher.absent}
    for number in chosen.hosts:
        todo = [
            launcher
            for launcher in _launchers()
            if not launcher.absent
            and not (launcher.is_heavy and number > chosen.heavy_hosts)
            and not (number == 1 and launcher.name == BY_LIST)
        ]
        for turn, launcher in report.in_turns(chosen.rounds, todo):
            report.progress(f"{number} hosts, round {turn}: {launcher.name}")
            try:
                starts[number, launcher.name].append(_start(launcher, number))
                if launcher.name != APART:
                    ends[number, launcher.name].append(_fail(launcher, number, chosen.give_up_s))
            except Failed as failure:
                failures[f"{launcher.name}, {number} hosts"] = str(failure)
    report.progress("")
    goals = _goals(chosen, starts, ends)
    _show(chosen, starts, ends)
    report.unmeasured(failures)
    print(report.goals(goals))
    measured = {"starts": starts, "failures": ends}
    document: dict[str, Any] = {
        **machine,
        **{
            what: [
                {"hosts": hosts, "launcher": name, "rounds": [trial._asdict() for trial in rounds]}
                for (hosts, name), rounds in trials.items()
            ]
            for what, trials in measured.items()
        },
        "not_measured": failures,
        "goals": [goal._asdict() for goal in goals],
    }
    report.write(chosen, document)
    return 0


# -- measuring -------------------------------------------------------------------------------------


class Job(NamedTuple):
    """A launch on several hosts: what its ranks report, and its launchers."""

    reports: processes.Reports
    launchers: Sequence[subprocess.Popen[bytes]]
    # The first launcher's.
    output: Path
    began: float


@contextmanager
def _launch(launcher: Launcher, number: int, program: str, **env: str) -> Iterator[Job]:
    """Run PROGRAM on NUMBER hosts by LAUNCHER."""
    with tempfile.TemporaryDirectory(prefix="fleetrun-bench-") as name:
        folder = Path(name)
        reports = processes.Reports(folder)
        started: list[subprocess.Popen[bytes]] = []
        try:
            with lab.hosts(number, folder) as hosts, processes.place() as (_, base):
                whole = {**base, **reports.env, **env, **launcher.env}
                command = [*launcher.command(hosts), program]
                began = time.monotonic()
                started += [host.start(*command, env=whole) for host in hosts]
                yield Job(reports, started, hosts[0].folder / "output", began)
        finally:
            for process in started:
                process.kill()
                process.wait()
            reports.close()


def _start(launcher: Launcher, number: int) -> Start:
    with _launch(launcher, number, WORKER) as job:
        heard = job.reports.expect("first", number, job.launchers, job.output)
        job.reports.release()
        for process in job.launchers:
            if process.wait(processes.TIMEOUT_S):
                last = processes.last_word(job.output)
                raise Failed(f"exit code {process.returncode}: {last}")
        return Start(min(heard) - job.began, max(heard) - job.began)


def _fail(launcher: Launcher, number: int, give_up_s: float) -> Failure:
    """Let the last rank fail, and see how the others end."""
    fails = str(number - 1)
    with _launch(launcher, number, VICTIM, BENCH_FAILS=fails, BENCH_DEAF="0") as job:
        job.reports.expect("ready", number, job.launchers, job.output)
        job.reports.release()
        (began,) = job.reports.expect("fails", 1, job.launchers, job.output)
        asked = job.reports.hear("term", number - 1, job.launchers, give_up_s)
        deadline = began + give_up_s
        while (
            any(launcher.poll() is None for launcher in job.launchers)
            and time.monotonic() < deadline
        ):
            time.sleep(0.002)
        is_over = all(launcher.poll() is not None for launcher in job.launchers)
        return Failure(
            last_term_s=max(asked) - began if len(asked) == number - 1 and asked else None,
            exit_s=time.monotonic() - began if is_over else None,
            asked=len(asked),
        )


# -- showing ---------------------------------------------------------------------------------------


def _show(
    chosen: argparse.Namespace,
    starts: Mapping[tuple[int, str], Sequence[Start]],
    ends: Mapping[tuple[int, str], Sequence[Failure]],
) -> None:
    heads = ["launcher", "first line", "last line", "x unconnected", "last TERM", "all gone"]
    for number in chosen.hosts:
        rows = []
        apart = starts.get((number, APART))
        for (hosts, name), measured in starts.items():
            if hosts == number and measured:
                last = summary([start.last_s for start in measured])
                bare = summary([start.last_s for start in apart]).median if apart else None
                rows.append(
                    [
                        name,
                        spread(summary([start.first_s for start in measured])),
                        spread(last),
                        "-" if bare is None else f"{last.median / bare:.2f}",
                        *_ending(ends.get((number, name), ())),
                    ]
                )
        title = f"{number} hosts, one rank each; median (lowest-highest) of {chosen.rounds}, ms"
        print(report.table(title, heads, rows))


def _ending(failures: Sequence[Failure]) -> list[str]:
    terms = [failure.last_term_s for failure in failures if failure.last_term_s is not None]
    exits = [failure.exit_s for failure in failures if failure.exit_s is not None]
    return [
        spread(summary(terms)) if terms else "-",
        spread(summary(exits))
        if len(exits) == len(failures) > 0
        else ("never" if failures else "-"),
    ]


def _goals(
    chosen: argparse.Namespace,
    starts: Mapping[tuple[int, str], Sequence[Start]],
    ends: Mapping[tuple[int, str], Sequence[Failure]],
) -> list[Goal]:
    goals = []
    for number in chosen.hosts:
        for name in (BY_LIST, BY_MASTER):
            apart, ours = starts.get((number, APART)), starts.get((number, name))
            if number == 1 or not apart or not ours:
                continue
            bare = summary([start.last_s for start in apart]).median
            limit = TIMES_APART * bare + AFTER_APART_S
            seen = summary([start.last_s for start in ours]).median
            what = f"{number} hosts, {name}: last first line"
            goals.append(report.goal(what, seen, limit))
            for field, most in (("last_term_s", LAST_TERM_S), ("exit_s", EXIT_S)):
                values = [getattr(end, field) for end in ends.get((number, name), ())]
                is_known = bool(values) and None not in values
                worst = max(values) if is_known else None
                goals.append(
                    Goal(
                        f"{number} hosts, {name}: failure to {field[:-2].replace('_', ' ')}",
                        f"<= {ms(most)} ms",
                        "-" if worst is None else f"{ms(worst)} ms",
                        worst is not None and worst <= most,
                    )
                )
    return goals
