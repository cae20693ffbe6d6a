"""`scripts/bench strategy`: what a strategy makes of the time of a training step.

Two ranks train small models. Both sides of a comparison are launched and stay there; they train in
turns, a few steps each, while the other side waits and costs nothing: so both meet the same
machine, whatever else it does. Processes of one and the same command differ by some per cent (see
"null"): for less than that take many --repeats. Ranks use GPUs where there are two.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

import launches
from launches import HERE, ROOT, Job
from report import finish, in_turns, ms, show

from fleetrun.rundir import rankfile

sys.path.insert(0, str(ROOT / "tests"))

import lab

_TRAINEE = str(HERE / "trainee.py")
PYTHONS = {
    "3.3.1": str(ROOT / ".venv" / "bin" / "python"),
    "2.6.2": os.environ.get(
        "FLEETRUN_TEST_PADDLE26", str(ROOT / ".venv-paddle2.6" / "bin" / "python")
    ),
}
# As much as a slow link lets pass at once.
_BURST_BYTES = 131072


class Comparison(NamedTuple):
    """Two ways to launch the same training; the ratio is of the first one's time."""

    about: str
    first: tuple[str, ...]
    # None: the same processes, while they leave out what fleetrun does at each step.
    other: tuple[str, ...] | None
    models: tuple[str, ...]
    # The steps of a turn: as many as something comes once in, or as make up for waking up.
    steps: int = 4
    # Two hosts with half of so many ranks each, and a slow link between them; 0: one host.
    hosts_ranks: int = 0


def _set(*fields: str) -> tuple[str, ...]:
    return tuple(f"--set={field}" for field in fields)


# As large as the buckets of Paddle's own reducer are without a word.
_PADDLES = ("--check_ranks=0", *_set("fuse_grad_size_in_MB=25", "last_comm_group_size_MB=1"))
# Small enough for several of them.
_SMALL = _set("fuse_grad_size_in_MB=4", "fuse_grad_size_in_num=32")
_ALL = ("many", "resnet", "large")

COMPARISONS = {
    "null": Comparison("nothing against nothing", (), (), ("many",)),
    "recommended": Comparison(
        "the preset recommended, against Paddle alone", ("--strategy=recommended",), (), _ALL
    ),
    "reducer": Comparison(
        "the reducer that the strategy brings against Paddle's, equal buckets", _PADDLES, (), _ALL
    ),
    "hooks": Comparison(
        "hooks at each step, against the same processes without",
        ("--check_ranks=0",),
        None,
        ("many", "many-static", "resnet"),
    ),
    "check": Comparison(
        "the default check of the ranks, against the same processes without",
        ("--check_ranks=auto",),
        None,
        ("tiny", "many", "resnet", "wide"),
        steps=32,
    ),
    "fusion": Comparison(
        "fused allreduces against one per gradient",
        _set("fuse_all_reduce_ops=true", "fuse_grad_size_in_num=1000"),
        _set("fuse_all_reduce_ops=false"),
        ("many", "many-static"),
    ),
    "bytes": Comparison(
        "at most 1 MB in one allreduce, against 64",
        _set("fuse_grad_size_in_MB=1", "fuse_grad_size_in_num=1000"),
        _set("fuse_grad_size_in_MB=64", "fuse_grad_size_in_num=1000"),
        ("resnet", "wide"),
    ),
    "overlap": Comparison(
        "two communicators that overlap, against one that does not",
        (*_SMALL, *_set("nccl_comm_num=2", "sync_nccl_allreduce=false")),
        (*_SMALL, *_set("nccl_comm_num=1", "sync_nccl_allreduce=true")),
        _ALL,
    ),
    "hierarchy": Comparison(
        "an allreduce in each host and one between them, against one of all four ranks",
        _set("use_hierarchical_allreduce=true", "hierarchical_allreduce_inter_nranks=2"),
        _set("use_hierarchical_allreduce=false"),
        ("large",),
        hosts_ranks=4,
    ),
    "bf16": Comparison(
        "gradients sent in 16 bits against 32",
        _set("bf16_allreduce=true"),
        _set("bf16_allreduce=false"),
        ("large",),
        hosts_ranks=2,
    ),
    "merge": Comparison(
        "one update of four steps' gradients, against an update each step",
        _set("gradient_merge=true", "gradient_merge_configs.k_steps=4"),
        _set("gradient_merge=false"),
        _ALL,
        steps=4,
    ),
}


class Proof(NamedTuple):
    """What is known of a launch when it has ended."""

    # Of rank 0; None without a strategy.
    allreduces: int | None
    # The most memory that a rank of the first host has held.
    peak_bytes: int


class Seen(NamedTuple):
    """A pair of launches: the seconds of a step in the turns of each side, wall and processor."""

    first: list[tuple[float, float]]
    other: list[tuple[float, float]]
    # None: it was the same launch.
    proofs: tuple[Proof, Proof | None]

    def ratios(self, column: int) -> list[float]:
        """Return how the times of the two sides compare, turn by turn."""
        return [a[column] / b[column] for a, b in zip(self.first, self.other, strict=True)]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    compared = (f"  {name:11} {comparison.about}" for name, comparison in COMPARISONS.items())
    parser.epilog = "\n".join(("what is compared:", *compared))
    parser.add_argument("--paddle", choices=PYTHONS, default="3.3.1", help="which Paddle (3.3.1)")
    parser.add_argument("--repeats", type=int, default=5, help="launches of each side (5)")
    parser.add_argument("--turns", type=int, default=20, help="turns of each launch (20)")
    # The ranks are compared after the updates 1, 2, 4, 8, ...: in many of the first turns, and
    # hardly in a training; see "check" for what it costs.
    parser.add_argument("--warm-up", type=int, default=33, help="steps before the first turn (33)")
    parser.add_argument(
        "--only", type=_some, metavar="LIST", help="some comparisons: fusion,reducer:resnet"
    )
    parser.add_argument(
        "--mbits",
        type=int,
        default=0,
        help="what is for a link of so many Mbit/s between two hosts, which are namespaces (root)",
    )
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")


def _some(text: str) -> set[str]:
    """Return the comparisons, or comparisons of one model, that TEXT lists."""
    chosen = set(text.split(","))
    known = {f"{name}:{model}" for name, of in COMPARISONS.items() for model in of.models}
    if unknown := chosen - known - COMPARISONS.keys():
        what = ", ".join(sorted(unknown))
        raise argparse.ArgumentTypeError(f"there is no {what}: choose of {', '.join(COMPARISONS)}")
    return chosen


def run(chosen: argparse.Namespace) -> int:
    """Measure, show, and write what CHOSEN says."""
    why = ""
    if not os.access(PYTHONS[chosen.paddle], os.X_OK):
        why = f"there is no Paddle {chosen.paddle} at {PYTHONS[chosen.paddle]}"
    elif chosen.mbits:
        why = (lab.missing() or "") if lab.is_root() else "two hosts need root"
    if why:
        print(f"scripts/bench: {why}", file=sys.stderr)
        return 3
    todo = {
        (name, model): partial(_pair, chosen, comparison, model)
        for name, comparison in COMPARISONS.items()
        for model in comparison.models
        if bool(comparison.hosts_ranks) == bool(chosen.mbits)
        if not chosen.only or {name, f"{name}:{model}"} & chosen.only
    }
    measured, failures = in_turns(chosen.repeats, todo)
    heads = ["comparison", "ms a step", "against", "ratio (quartiles)", "by launches", "CPU ratio"]
    heads += ["allreduces", "against", "MB", "against"]
    rows = [_row(f"{name}, {model}", pairs) for (name, model), pairs in measured.items() if pairs]
    show(f"Paddle {chosen.paddle}, median of all turns", heads, rows)
    comparisons = [
        {"comparison": name, "model": model, "pairs": [pair._asdict() for pair in pairs]}
        for (name, model), pairs in measured.items()
    ]
    return finish(chosen, failures, paddle=chosen.paddle, comparisons=comparisons)


def _row(name: str, pairs: Sequence[Seen]) -> list[str]:
    by_launch = [median(pair.ratios(0)) for pair in pairs]
    proofs = [proof or pairs[-1].proofs[0] for proof in pairs[-1].proofs]
    return [
        name,
        ms(median(wall_s for pair in pairs for wall_s, _ in pair.first)),
        ms(median(wall_s for pair in pairs for wall_s, _ in pair.other)),
        _quartered([ratio for pair in pairs for ratio in pair.ratios(0)]),
        f"{min(by_launch):.3f}-{max(by_launch):.3f}",
        _quartered([ratio for pair in pairs for ratio in pair.ratios(1)]),
        *("-" if proof.allreduces is None else str(proof.allreduces) for proof in proofs),
        *(f"{proof.peak_bytes / 1e6:.0f}" for proof in proofs),
    ]


def _quartered(values: Sequence[float]) -> str:
    """Write the median of ratios, and the quarters around it."""
    low, middle, high = quantiles(values, n=4, method="inclusive") if values[1:] else values * 3
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


# -- measuring -------------------------------------------------------------------------------------


def _pair(chosen: argparse.Namespace, comparison: Comparison, model: str) -> Seen:
    """Launch both sides, and let them train in turns; who goes first changes every time."""
    ranks = comparison.hosts_ranks or 2
    took: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with ExitStack() as stack:
        hosts = stack.enter_context(_linked(chosen.mbits)) if chosen.mbits else ((),)
        sides: dict[bool, _Side] = {}
        # In any order: what is launched first was slower by 1 %.
        both = [(True, comparison.first), (False, comparison.other)]
        for is_first, options in random.sample(both, 2):
            if options is None:
                continue
            words = [PYTHONS[chosen.paddle], "-m", "fleetrun"]
            words += [f"--nproc_per_node={ranks // len(hosts)}"]
            if chosen.mbits:
                # Jobs at the same time take ports that are far apart.
                ips = ",".join(f"{lab.SUBNET}.{number}" for number in (1, 2))
                words += [f"--ips={ips}", f"--start_port={6170 + 1000 * is_first}"]
            words += [*options, _TRAINEE, model, str(comparison.steps), str(chosen.warm_up)]
            env = {"CUDA_VISIBLE_DEVICES": ""} if chosen.cpu else {}
            job = stack.enter_context(launches.launch(*([*host, *words] for host in hosts), **env))
            sides[is_first] = _Side(job, ranks, comparison.steps)
        for turn in range(chosen.turns):
            for is_first in (True, False) if turn % 2 == 0 else (False, True):
                side = sides.get(is_first)
                took[is_first].append(side.train() if side else sides[True].train(b"-"))
        proofs = {is_first: side.end() for is_first, side in sides.items()}
    return Seen(took[True], took[False], (proofs[True], proofs.get(False)))


@contextmanager
def _linked(mbits: int) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Make two hosts; yield for each the words before a command that runs it there.

    Only the network is the host's own: processes have the ids by which this machine knows them.
    """
    burst = max(_BURST_BYTES, mbits * 1_000_000 // 8 // 1000)
    with tempfile.TemporaryDirectory(prefix="bench-") as name, lab.hosts(2, Path(name)) as hosts:
        for host in hosts:
            host.run(
                *("tc", "qdisc", "add", "dev", "eth0", "root", "tbf"),
                *("rate", f"{mbits}mbit", "burst", str(burst), "latency", "200ms"),
            )
        yield tuple(("nsenter", "-t", str(host.pid), "-n", "--") for host in hosts)


class _Side:
    """One launch, whose ranks train when they are told to."""

    def __init__(self, job: Job, ranks: int, steps: int) -> None:
        self._job = job
        self._ranks = ranks
        self._steps = steps
        self._pids = [int(pid) for pid in job.expect("ready", ranks)]
        # Each rank has made its pipe before it said that it is ready.
        self._turns = [os.open(job.folder / f"turns.{rank}", os.O_RDWR) for rank in range(ranks)]

    def train(self, order: bytes = b".") -> tuple[float, float]:
        """Train for a turn; return what a step took, of the clock and of all ranks' processors."""
        before = sum(map(launches.on_cpu_s, self._pids))
        for turn in self._turns:
            os.write(turn, order)
        wall_s = max(self._job.expect("took", self._ranks))
        cpu_s = sum(map(launches.on_cpu_s, self._pids)) - before
        return wall_s / self._steps, cpu_s / self._steps

    def end(self) -> Proof:
        """End the training, and return what is known of it then."""
        for turn in self._turns:
            os.close(turn)
        self._job.await_end()
        run_dir = self._job.folder / "0" / "log" / "latest"
        events = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
        peak_bytes = max(event["peak_bytes"] for event in events if event["event"] == "exited")
        evidence = rankfile.evidence(str(run_dir), "0")
        counts: Mapping[str, int] = evidence["counts"] if evidence else {}
        return Proof(counts.get("allreduces"), peak_bytes)
