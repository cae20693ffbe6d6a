"""`scripts/bench strategy`: what a strategy makes of the time of a training step.

Both sides of a comparison are launched and stay there; they train in turns, a few steps each,
while the other side waits and costs nothing. So both meet the same machine, whatever else it does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import links
import processes
import report
from peers import ROOT
from processes import HERE, Failed
from report import Goal, ms, quartered

from fleetrun.records import rankfile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

RANKS = 2
TRAINEE = str(HERE / "trainee.py")
PYTHONS = {
    "3.3.1": ROOT / ".venv" / "bin" / "python",
    "2.6.2": Path(
        os.environ.get("FLEETRUN_TEST_PADDLE26", ROOT / ".venv-paddle2.6" / "bin" / "python")
    ),
}
_END_S = 60


class Comparison(NamedTuple):
    """Two ways to launch the same training; the ratio is of the first one's time."""

    name: str
    first: tuple[str, ...]
    # None: the same processes, while they leave out what fleetrun does at each step.
    other: tuple[str, ...] | None
    models: tuple[str, ...]
    # The ratio to reach; None: only to be shown.
    limit: float | None = None
    # How many times as many turns: what differs little shows in many only.
    more_turns: int = 1
    # It is about a slow link between two hosts: how many Mbit/s it is for.
    mbits: tuple[int, ...] = ()
    # Steps that it needs before the first turn.
    warm_up: int = 0
    # The limit is for the whole 95 % interval of the ratio: it is not to lie above.
    is_of_interval: bool = False
    # The steps of a turn; 0: as they are asked for. What comes every so many steps is in the sum of
    # all turns, not in their median.
    steps: int = 0
    # Of both hosts together where there is a link.
    ranks: int = RANKS
    # The Paddles that know it.
    paddles: tuple[str, ...] = tuple(PYTHONS)


def _set(**fields: object) -> tuple[str, ...]:
    return tuple(f"--set={name}={json.dumps(value)}" for name, value in fields.items())


# As large as the buckets of Paddle's own reducer are without a word. The default check comes after
# the updates 1, 2, 4, ..., so it is in many of the first turns and hardly in a training; see
# "check" for what it costs.
_PADDLES = ("--check_ranks=0", *_set(fuse_grad_size_in_MB=25, last_comm_group_size_MB=1))
# Small enough for several of them.
_SMALL = _set(fuse_grad_size_in_MB=4, fuse_grad_size_in_num=32)
_ALL = ("many", "resnet", "large")
# How many steps of theirs take about as long as one of the others'.
_LIGHTER = {
    **dict.fromkeys(("many", "many-static", "adam", "adam-static", "momentum-static"), 5),
    "large": 2,
}
# The output of every fourth layer of the model tall.
_KEPT = tuple(f"relu_{layer}.tmp_0" for layer in range(3, 24, 4))

_PLAN = _set(fuse_grad_size_in_MB="plan")
_COUNTED = {1: "one gradient", 1000: "all gradients"}
# A plan is made in fewer.
_PLANNING_STEPS = 50

COMPARISONS = {
    "null": Comparison("nothing against nothing", (), (), ("many",)),
    "recommended": Comparison(
        "the preset recommended on one host, against Paddle alone",
        ("--strategy=recommended",),
        (),
        _ALL,
        1.0,
        is_of_interval=True,
    ),
    "reducer": Comparison(
        "the reducer that the strategy brings against Paddle's, equal buckets",
        _PADDLES,
        (),
        _ALL,
        1.0,
        is_of_interval=True,
    ),
    "overlap": Comparison(
        "two communicators that overlap, against one that does not",
        (*_SMALL, *_set(nccl_comm_num=2, sync_nccl_allreduce=False)),
        (*_SMALL, *_set(nccl_comm_num=1, sync_nccl_allreduce=True)),
        _ALL,
        1.0,
    ),
    "fusion": Comparison(
        "fused allreduces against one per gradient",
        _set(fuse_all_reduce_ops=True, fuse_grad_size_in_MB=32, fuse_grad_size_in_num=1000),
        _set(fuse_all_reduce_ops=False),
        ("many", "many-static"),
        1.0,
    ),
    "hooks": Comparison(
        "hooks at each step, against the same processes without",
        ("--check_ranks=0",),
        None,
        ("many", "many-static", "resnet"),
        1.01,
        more_turns=3,
    ),
    "check": Comparison(
        "the default check of the ranks, against the same processes without",
        ("--check_ranks=auto",),
        None,
        ("tiny", "many", "resnet", "wide"),
        1.01,
        steps=32,
    ),
    "armed": Comparison(
        "armed, but nothing to do for gradients, against not armed",
        ("--check_ranks=0",),
        (),
        ("many", "resnet"),
    ),
    **{
        f"plan-{count}": Comparison(
            f"planned buckets against those of {_COUNTED.get(count, f'{count} gradients')}",
            _PLAN,
            _set(fuse_grad_size_in_num=count, fuse_grad_size_in_MB=1024),
            ("layers",),
            1.02,
            mbits=(100, 1000),
            warm_up=_PLANNING_STEPS,
        )
        for count in (1, 4, 16, 1000)
    },
    "count": Comparison(
        "at most 8 gradients in one allreduce, against all",
        _set(fuse_grad_size_in_num=8, fuse_grad_size_in_MB=1024),
        _set(fuse_grad_size_in_num=1000, fuse_grad_size_in_MB=1024),
        ("many", "many-static", "resnet"),
    ),
    "bytes": Comparison(
        "at most 1 MB in one allreduce, against 64",
        _set(fuse_grad_size_in_MB=1, fuse_grad_size_in_num=1000),
        _set(fuse_grad_size_in_MB=64, fuse_grad_size_in_num=1000),
        ("resnet", "wide"),
    ),
    "communicators": Comparison(
        "two communicators in turn, against one",
        (*_SMALL, *_set(nccl_comm_num=2)),
        (*_SMALL, *_set(nccl_comm_num=1)),
        ("layers", "resnet", "wide"),
    ),
    "gradients": Comparison(
        "at most 8 layers in one allreduce, against all",
        _set(fuse_grad_size_in_TFLOPS=8, fuse_grad_size_in_num=1000, fuse_grad_size_in_MB=1024),
        _set(fuse_grad_size_in_TFLOPS=1000, fuse_grad_size_in_num=1000, fuse_grad_size_in_MB=1024),
        ("many", "many-static"),
    ),
    "last": Comparison(
        "at most 1 MB in the allreduce that goes out last, against 32",
        _set(last_comm_group_size_MB=1, fuse_grad_size_in_MB=32, fuse_grad_size_in_num=1000),
        _set(last_comm_group_size_MB=32, fuse_grad_size_in_MB=32, fuse_grad_size_in_num=1000),
        ("layers", "resnet"),
    ),
    "hierarchy": Comparison(
        "an allreduce in each host and one between them, against one of all four ranks",
        _set(use_hierarchical_allreduce=True, hierarchical_allreduce_inter_nranks=2),
        _set(use_hierarchical_allreduce=False),
        ("large",),
        mbits=(100, 1000),
        ranks=4,
    ),
    "levels": Comparison(
        "levels that are measured at the start, against one",
        _set(use_hierarchical_allreduce="auto"),
        _set(use_hierarchical_allreduce=False),
        ("layers", "large"),
        1.02,
        mbits=(100, 1000),
        ranks=4,
    ),
    "unused": Comparison(
        "looking for parameters that a step does not use, against not looking",
        _set(find_unused_parameters=True),
        _set(find_unused_parameters=False),
        ("many",),
    ),
    "wait": Comparison(
        "not waiting for an allreduce before the next, against waiting",
        (*_SMALL, *_set(sync_nccl_allreduce=False)),
        (*_SMALL, *_set(sync_nccl_allreduce=True)),
        ("layers", "resnet", "wide"),
    ),
    "merge": Comparison(
        "one update of four steps' gradients, against an update each step",
        _set(**{"gradient_merge": True, "gradient_merge_configs.k_steps": 4}),
        _set(gradient_merge=False),
        _ALL,
        steps=4,
    ),
    "optimizer": Comparison(
        "one operator that updates all parameters, against one each",
        _set(**{"build_strategy.fuse_all_optimizer_ops": True}),
        _set(**{"build_strategy.fuse_all_optimizer_ops": False}),
        ("adam", "adam-static"),
    ),
    "activation": Comparison(
        "sum and activation in one operator, against two",
        _set(**{"build_strategy.fuse_elewise_add_act_ops": True}),
        _set(**{"build_strategy.fuse_elewise_add_act_ops": False}),
        ("many-static", "tall-static"),
    ),
    "inplace": Comparison(
        "operators that overwrite their inputs, against those that do not",
        _set(**{"build_strategy.enable_inplace": True}),
        _set(**{"build_strategy.enable_inplace": False}),
        ("tall-static",),
        paddles=("2.6.2",),
    ),
    "recompute": Comparison(
        "activations of every fourth layer kept, against all",
        _set(**{"recompute": True, "recompute_configs.checkpoints": _KEPT}),
        _set(recompute=False),
        ("tall-static",),
    ),
    "sharding": Comparison(
        "each rank keeps half of the optimizer's state, against all of it",
        _set(**{"sharding": True, "sharding_configs.sharding_degree": RANKS}),
        _set(sharding=False),
        ("wide-adam-static",),
        paddles=("3.3.1",),
    ),
    "lars": Comparison(
        "LARS instead of Momentum, against Momentum",
        _set(**{"lars": True, "lars_configs.lars_coeff": 0.002}),
        _set(lars=False),
        ("momentum-static",),
    ),
    "lamb": Comparison(
        "LAMB instead of Adam, against Adam",
        _set(**{"lamb": True, "lamb_configs.lamb_weight_decay": 0.02}),
        _set(lamb=False),
        ("adam-static",),
    ),
    "localsgd": Comparison(
        "parameters averaged every four steps, against gradients each step",
        _set(**{"localsgd": True, "localsgd_configs.k_steps": 4}),
        _set(localsgd=False),
        ("many-static",),
        steps=4,
    ),
    "adaptive": Comparison(
        "parameters averaged at intervals that adapt to the loss, against gradients each step",
        _set(**{"adaptive_localsgd": True, "adaptive_localsgd_configs.init_k_steps": 4}),
        _set(adaptive_localsgd=False),
        ("many-static",),
        steps=4,
    ),
    "fp16": Comparison(
        "gradients sent in 16 bits against 32",
        _set(fuse_grad_size_in_MB="auto", fp16_allreduce=True),
        _set(fuse_grad_size_in_MB="auto"),
        ("large",),
        mbits=(100,),
        paddles=("2.6.2",),
    ),
    "bf16": Comparison(
        "gradients sent in 16 bits against 32",
        _set(fuse_grad_size_in_MB="auto", bf16_allreduce=True),
        _set(fuse_grad_size_in_MB="auto"),
        ("large",),
        0.6,
        mbits=(100,),
    ),
}


class Proof(NamedTuple):
    """What is known of a launch when it has ended."""

    # What the strategy counted in rank 0, such as allreduces; nothing without a strategy.
    counts: Mapping[str, Any]
    # What showed that a knob took effect, by its name.
    evidence: Mapping[str, str]
    # The most memory that a rank of the first host has held.
    peak_bytes: int


class Turn(NamedTuple):
    """What a step took in one turn, in seconds; the processor's are of all ranks together."""

    wall_s: float
    cpu_s: float


class Seen(NamedTuple):
    """One comparison of one model, by turns of each side."""

    comparison: str
    model: str
    first: list[Turn]
    other: list[Turn]
    # The ratio of each pair of launches: processes differ a little from the day of their birth.
    launches: list[float]
    # None: it was the same launch.
    proofs: tuple[Proof, Proof | None]

    @property
    def ratios(self) -> list[float]:
        """Return how the times of the two sides compare, turn by turn."""
        return [
            first.wall_s / other.wall_s for first, other in zip(self.first, self.other, strict=True)
        ]

    @property
    def cpu_ratios(self) -> list[float]:
        """Return how the work of the two sides compares: a busy machine blurs it less."""
        return [
            first.cpu_s / other.cpu_s for first, other in zip(self.first, self.other, strict=True)
        ]


_ABOUT = """\
Train small models with two ranks, with and without a strategy. Both sides are launched and train
in turns, so the ratios hold on a busy machine, too; but processes of one and the same command
differ by some per cent (see "null"): for less than that take many --repeats. Ranks use GPUs where
there are two."""


def add_to(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this benchmark to SUBCOMMANDS."""
    comparisons = "\n".join(
        f"  {key:8}  {comparison.name}" for key, comparison in COMPARISONS.items()
    )
    parser = subcommands.add_parser(
        "strategy",
        help="what a strategy makes of a training step",
        description=f"{_ABOUT}\n\nwhat is compared:\n{comparisons}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--paddle", choices=PYTHONS, default="3.3.1", help="which Paddle (3.3.1)")
    parser.add_argument("--repeats", type=int, default=5, help="launches of each side (5)")
    parser.add_argument("--turns", type=int, default=20, help="turns of each launch (20)")
    parser.add_argument(
        "--steps", type=int, default=1, help="steps of a turn; of a light model more (1)"
    )
    parser.add_argument("--warm-up", type=int, default=6, help="steps before the first turn (6)")
    parser.add_argument(
        "--only", type=_some, metavar="LIST", help="some comparisons: fusion,reducer:resnet"
    )
    parser.add_argument(
        "--mbits",
        type=int,
        choices=sorted(
            {mbits for comparison in COMPARISONS.values() for mbits in comparison.mbits}
        ),
        help="what is for a link of so many Mbit/s between two hosts, which are namespaces (root)",
    )
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    parser.set_defaults(run=run)


def _some(text: str) -> set[str]:
    """Return the comparisons, or comparisons of one model, that TEXT lists."""
    known = {
        f"{name}:{model}" for name, comparison in COMPARISONS.items() for model in comparison.models
    }
    chosen = set(text.split(","))
    if unknown := chosen - known - set(COMPARISONS):
        what = ", ".join(sorted(unknown))
        raise argparse.ArgumentTypeError(f"there is no {what}: choose of {', '.join(COMPARISONS)}")
    return chosen


_HEADS = (
    "model",
    "ms a step",
    "against",
    "ratio (quartiles)",
    "by launches",
    "CPU ratio",
    "allreduces",
    "against",
    "MB",
    "against",
)


def run(chosen: argparse.Namespace) -> int:
    """Measure, show, and write what CHOSEN says."""
    python = PYTHONS[chosen.paddle]
    if not os.access(python, os.X_OK):
        print(f"There is no Paddle {chosen.paddle} at {python}.", file=sys.stderr)
        return 3
    processes.adopt_orphans()
    versions = {"python": sys.version.split()[0], "paddle": chosen.paddle}
    document: dict[str, Any] = {"machine": report.machine(), "versions": versions}
    document["link"] = f"{chosen.mbits} Mbit/s" if chosen.mbits else ""
    print(report.headline(document))
    seen: list[Seen] = []
    failures: dict[str, str] = {}
    for name, comparison in COMPARISONS.items():
        if chosen.mbits not in (comparison.mbits or (None,)):
            continue
        if chosen.paddle not in comparison.paddles:
            continue
        some = _measure(chosen, python, name, failures)
        seen += some
        if some:
            print(report.table(f"{comparison.name}, median", _HEADS, [_row(pair) for pair in some]))
    report.unmeasured(failures)
    goals = _goals(seen)
    print(report.goals(goals))
    document["comparisons"] = [
        {
            "comparison": pair.comparison,
            "model": pair.model,
            "launches": pair.launches,
            "proofs": [proof and proof._asdict() for proof in pair.proofs],
            "options": [COMPARISONS[pair.comparison].first, COMPARISONS[pair.comparison].other],
            "about": COMPARISONS[pair.comparison].name,
            "confident": _confident(pair.ratios),
            "one": [turn._asdict() for turn in pair.first],
            "other": [turn._asdict() for turn in pair.other],
            "ratios": pair.ratios,
            "ratio": median(pair.ratios),
            "cpu_ratio": median(pair.cpu_ratios),
        }
        for pair in seen
    ]
    document["failures"] = failures
    document["goals"] = [goal._asdict() for goal in goals]
    report.write(chosen, document)
    return 0


def _row(seen: Seen) -> list[str]:
    proofs = [proof or seen.proofs[0] for proof in seen.proofs]
    return [
        seen.model,
        ms(median(turn.wall_s for turn in seen.first)),
        ms(median(turn.wall_s for turn in seen.other)),
        quartered(seen.ratios),
        f"{min(seen.launches):.3f}-{max(seen.launches):.3f}",
        quartered(seen.cpu_ratios),
        *(str(proof.counts.get("allreduces", "-")) for proof in proofs),
        *(report.mb(proof.peak_bytes) for proof in proofs),
    ]


def _goals(seen: Sequence[Seen]) -> list[Goal]:
    goals = []
    for comparison_run in seen:
        comparison = COMPARISONS[comparison_run.comparison]
        if comparison.limit is None:
            continue
        what = f"{comparison.name}: {comparison_run.model}"
        if comparison.steps:
            ratio = sum(turn.wall_s for turn in comparison_run.first) / sum(
                turn.wall_s for turn in comparison_run.other
            )
            measured = f"{ratio:.3f} x in all"
        else:
            ratio, (low, high) = median(comparison_run.ratios), _confident(comparison_run.ratios)
            measured = f"{ratio:.3f} x, 95 %: {low:.3f}-{high:.3f}"
            ratio = low if comparison.is_of_interval else ratio
        goals.append(Goal(what, f"<= {comparison.limit:g} x", measured, ratio <= comparison.limit))
    return goals


def _confident(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the interval that has the median of all RATIOS there could be, with 95 %.

    >>> _confident([1.3, 1.0, 1.1, 0.9, 1.2, 0.8, 1.4, 0.7, 1.5])
    (0.8, 1.4)
    """
    several = sorted(ratios)
    # The number of ratios below the median is binomial, nearly normal.
    first = max(0, int(len(several) / 2 - 0.98 * len(several) ** 0.5))
    return several[first], several[-1 - first]


# -- measuring -------------------------------------------------------------------------------------


def _measure(
    chosen: argparse.Namespace, python: Path, name: str, failures: dict[str, str]
) -> list[Seen]:
    """Measure the comparison NAME with each of its models, REPEATS times in turns."""
    only = chosen.only or {name}
    models = [model for model in COMPARISONS[name].models if {name, f"{name}:{model}"} & only]
    rounds: dict[str, list[Seen]] = defaultdict(list)
    for number in range(chosen.repeats):
        for model in models:
            report.progress(f"repeat {number + 1} of {chosen.repeats}: {name}, {model}")
            try:
                rounds[model].append(_pair(chosen, python, name, model))
            except Failed as failure:
                failures[f"{name}, {model}"] = str(failure)
    report.progress("")
    return [_joined(some) for some in rounds.values() if some]


def _joined(seen: Sequence[Seen]) -> Seen:
    return seen[-1]._replace(
        launches=[ratio for pair in seen for ratio in pair.launches],
        first=[turn for pair in seen for turn in pair.first],
        other=[turn for pair in seen for turn in pair.other],
    )


def _pair(chosen: argparse.Namespace, python: Path, name: str, model: str) -> Seen:
    """Launch both sides, and let them train in turns; who goes first changes every time."""
    comparison = COMPARISONS[name]
    steps = comparison.steps or chosen.steps * _LIGHTER.get(model, 1)
    took: dict[bool, list[Turn]] = {True: [], False: []}
    with processes.place() as (folder, base), ExitStack() as stack:
        base["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
        if chosen.cpu:
            base["CUDA_VISIBLE_DEVICES"] = ""
        warm_up = max(chosen.warm_up, comparison.warm_up)
        worker = (TRAINEE, model, str(steps), str(warm_up))
        hosts: tuple[tuple[str, ...], ...] = ((),)
        here = f"--nproc_per_node={comparison.ranks // (2 if chosen.mbits else 1)}"
        if chosen.mbits:
            hosts = stack.enter_context(links.linked(chosen.mbits, folder / "hosts"))
        sides: dict[bool, Side] = {}
        for is_first, options in ((True, comparison.first), (False, comparison.other)):
            if options is None:
                continue
            where = links.options(int(is_first)) if chosen.mbits else ()
            command = (str(python), "-m", "fleetrun", *where, here, *options, *worker)
            place = folder / ("one" if is_first else "other")
            commands = [(*host, *command) for host in hosts]
            launched = _launched(commands, place, base, comparison.ranks)
            sides[is_first] = stack.enter_context(launched)
        for turn in range(chosen.turns * comparison.more_turns):
            for is_first in (True, False) if turn % 2 == 0 else (False, True):
                side = sides.get(is_first)
                took[is_first].append(
                    sides[True].train(steps, hooks=False) if side is None else side.train(steps)
                )
        proofs = {is_first: side.end() for is_first, side in sides.items()}
    seen = Seen(name, model, took[True], took[False], [], (proofs[True], proofs.get(False)))
    return seen._replace(launches=[median(seen.ratios)])


class Side:
    """One launch, whose ranks train when they are told to."""

    def __init__(
        self,
        launchers: list[subprocess.Popen[bytes]],
        place: Path,
        reports: processes.Reports,
        turns: list[int],
    ) -> None:
        self._launchers = launchers
        self._place = place
        self._reports = reports
        self._turns = turns
        self._ranks = len(turns)
        self._pids: list[int] = []

    def hear(self, word: str) -> list[float]:
        """Return the numbers that the ranks say with WORD, when all have said it."""
        output = self._place / "0" / "output"
        return self._reports.expect(word, self._ranks, self._launchers[:1], output)

    def get_ready(self) -> None:
        """Wait until every rank waits for its turn."""
        self._pids = [int(pid) for pid in self.hear("ready")]

    def train(self, steps: int, *, hooks: bool = True) -> Turn:
        """Train for a turn of STEPS, and return what one of them took."""
        before = sum(map(processes.on_cpu_s, self._pids))
        for turn in self._turns:
            os.write(turn, b"." if hooks else b"-")
        wall_s = max(self.hear("took"))
        cpu_s = sum(map(processes.on_cpu_s, self._pids)) - before
        return Turn(wall_s / steps, cpu_s / steps)

    def end(self) -> Proof:
        """End the training, and return what is known of it then."""
        while self._turns:
            os.close(self._turns.pop())
        for number, launcher in enumerate(self._launchers):
            try:
                code = launcher.wait(_END_S)
            except subprocess.TimeoutExpired:
                raise Failed("it did not end with its ranks") from None
            if code:
                last = processes.last_word(self._place / str(number) / "output")
                raise Failed(f"exit code {code}: {last}")
        return _proof(self._place / "0" / "log" / "latest")


def _proof(run_dir: Path) -> Proof:
    events = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    peak_bytes = max(event["peak_bytes"] for event in events if event["event"] == "exited")
    told = rankfile.evidence(str(run_dir), "0")
    if told is None:
        return Proof({}, {}, peak_bytes)
    evidence = {
        knob["name"]: knob["evidence"]
        for knob in told["knobs"]
        if knob["status"] in {"effective", "no_difference"}
    }
    return Proof(told["counts"], evidence, peak_bytes)


@contextmanager
def _launched(
    commands: Sequence[Sequence[str]], place: Path, base: Mapping[str, str], ranks: int
) -> Iterator[Side]:
    """Launch COMMANDS, one for each host, in PLACE; their RANKS are then ready."""
    place.mkdir()
    reports = processes.Reports(place)
    pipes = [place / f"turns.{rank}" for rank in range(ranks)]
    for pipe in pipes:
        os.mkfifo(pipe)
    # Both ends, so that no pipe waits for its other end, or finds none.
    turns = [os.open(pipe, os.O_RDWR | os.O_NONBLOCK) for pipe in pipes]
    env = {**base, **reports.env, "BENCH_TURNS": str(place / "turns")}
    launchers = []
    for number, command in enumerate(commands):
        own = place / str(number)
        own.mkdir()
        launchers.append(processes.start(command, own, env))
    try:
        side = Side(launchers, place, reports, turns)
        side.get_ready()
        yield side
    finally:
        reports.close()
        for end in turns:
            os.close(end)
        for launcher in launchers:
            if launcher.poll() is None:
                launcher.kill()
            launcher.wait()
