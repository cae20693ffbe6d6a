"""The checks: each launches the job, and compares what was predicted with what is seen."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, NamedTuple

from fields_tried import trials, version
from launches import ROOT, Done, Machine, distance, ended, launch

from fleetrun.strategy import fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fields_tried import Trial

# Sums in another order; the weights are of size 1.
CLOSE = 1e-4
# Sums of 16 bits in another order.
CLOSE_HALF = 2e-2
GROUPS_OF = 2
# Shorter than the other launches have: it is what is looked at.
STUCK_S = 15

HIERARCHICAL = (
    "--set=use_hierarchical_allreduce=true",
    f"--set=hierarchical_allreduce_inter_nranks={GROUPS_OF}",
)


class Result(NamedTuple):
    """What was predicted and seen; `is_right` is None where it could not be tried."""

    predicted: str
    seen: str
    is_right: bool | None
    detail: str = ""


class Check(NamedTuple):
    """A check by its name, and the ranks that it needs at least."""

    name: str
    run: Callable[[Machine, Path], Result]
    needs: int = 1


def all_checks(paddle: str, device: str) -> Iterator[Check]:
    """Yield every check, the quickest and most telling ones first."""
    yield Check("plain dygraph", plain())
    yield Check("plain static", plain("--static"))
    yield Check("recommended dygraph", as_plain("--strategy=recommended"), needs=2)
    yield Check(
        "recommended static", as_plain("--strategy=recommended", words=("--static",)), needs=2
    )
    yield Check("hierarchical dygraph", as_plain(*HIERARCHICAL), needs=4)
    yield Check("hierarchical static", hierarchical_static(paddle, device), needs=4)
    yield Check(
        "O2 with master gradients",
        as_plain("--strategy=recommended", words=("--o2",), close=CLOSE_HALF),
        needs=2,
    )
    yield Check("a collective that never ends", stuck, needs=2)
    for trial in trials(paddle, device):
        yield Check(f"{trial.graph} {trial.name}", _tried(trial), needs=2)
    yield Check("scripts/bench strategy", bench, needs=2)
    yield Check("tests marked gpu", gpu_tests)


def hierarchical_static(paddle: str, device: str) -> Callable[[Machine, Path], Result]:
    """Return a check of two levels in static graphs, which Paddle 3 cannot have on GPUs."""
    field = next(field for field in fields.TABLE if field.name == "use_hierarchical_allreduce")
    known = fields.outcome(field, paddle=version(paddle), graph="static", device=device)
    if known.status != fields.REFUSED:
        return as_plain(*HIERARCHICAL, words=("--static",))

    def run(machine: Machine, folder: Path) -> Result:
        done = launch(machine, folder, *HIERARCHICAL, words=("--static",))
        is_right = done.code != 0 and field.name in done.output
        return Result("refused by name", f"exit code {done.code}", is_right, done.output[-2000:])

    return run


def failure(done: Done) -> Result | None:
    """Return what is wrong with a launch whose ranks did not all train; None if they did."""
    if done.code == 0 and all(done.trained):
        return None
    return Result(
        "exit code 0", f"exit code {done.code}", is_right=False, detail=done.output[-4000:]
    )


# How each kind trains without a strategy, which does not change from check to check.
_plain: dict[tuple[str, ...], Done] = {}


def without_strategy(machine: Machine, folder: Path, words: tuple[str, ...]) -> Done:
    """Train without a strategy, once for all checks."""
    if words not in _plain:
        # Over gloo Paddle's own static graphs do not train: the nearest is one sum a gradient.
        is_helped = machine.device == "cpu" and "--static" in words
        options = ("--set=fuse_all_reduce_ops=false",) if is_helped else ()
        _plain[words] = launch(machine, folder, *options, words=words)
    return _plain[words]


def plain(*words: str) -> Callable[[Machine, Path], Result]:
    """Return a check that trains without a strategy, and whether the ranks end up equal."""

    def run(machine: Machine, folder: Path) -> Result:
        done = without_strategy(machine, folder, words)
        bad = failure(done)
        if bad is not None:
            return bad
        apart = max(distance(done.trained[0], other) for other in done.trained)
        where = {str(rank["device"]).partition(":")[0] for rank in done.trained}
        seen = f"ranks differ by {apart:.1e}, on {'/'.join(sorted(where))}"
        is_right = apart <= CLOSE and where == {machine.device}
        return Result(f"equal ranks on {machine.device}", seen, is_right)

    return run


def as_plain(
    *options: str, words: tuple[str, ...] = (), close: float = CLOSE
) -> Callable[[Machine, Path], Result]:
    """Return a check that OPTIONS give the weights of a training without them."""

    def run(machine: Machine, folder: Path) -> Result:
        without = without_strategy(machine, folder / "without", words)
        done = launch(machine, folder / "with", *options, words=words)
        bad = failure(without) or failure(done)
        if bad is not None:
            return bad
        apart = max(distance(without.trained[0], other) for other in done.trained)
        refused = [
            f"{knob['name']}: {knob['status']} ({knob['reason']})"
            for knob in done.proofs[0].get("knobs", [])
            if knob["status"] not in {"effective", "no_difference"}
        ]
        counted = done.proofs[0].get("counts", {}).get("allreduces", "no")
        seen = f"differ by {apart:.1e}, {counted} allreduces a step"
        return Result("the weights of plain", seen, apart <= close, "; ".join(refused))

    return run


def _tried(trial: Trial) -> Callable[[Machine, Path], Result]:
    def run(machine: Machine, folder: Path) -> Result:
        words = ("--static",) if trial.graph == "static" else ()
        options = [f"--set={setting}" for setting in trial.settings]
        done = launch(machine, folder / "with", *options, words=words)
        bad = failure(done)
        if bad is not None:
            return bad
        knobs = {knob["name"]: knob for knob in done.proofs[0].get("knobs", [])}
        knob = knobs.get(trial.name, {"status": "no word", "reason": ""})
        status = str(knob["status"]).replace("_", " ")
        first = done.trained[0]
        predicted, seen = [trial.predicted], [status]
        # Where nobody knew, whatever is seen is news and no mistake.
        is_right = trial.predicted in {status, "untested"}
        if status == "effective":
            wanted = (
                ("allreduces", trial.allreduces and trial.allreduces(first["gradients"])),
                ("groups", trial.groups),
            )
            for what, number in wanted:
                if number is not None:
                    predicted.append(f"{number} {what}")
                    seen.append(f"{first[what]} {what}")
                    is_right = is_right and first[what] == number
        # With sharding, each rank has parameters of its own.
        is_split = trial.name == "sharding"
        apart = 0.0 if is_split else max(distance(first, other) for other in done.trained)
        if trial.is_same:
            without = without_strategy(machine, folder / "without", words)
            bad = failure(without)
            if bad is not None:
                return bad
            apart = max(distance(without.trained[0], other) for other in done.trained)
        seen.append(f"weights differ by {apart:.1e}")
        return Result(
            ", ".join(predicted), ", ".join(seen), is_right and apart <= CLOSE, str(knob["reason"])
        )

    return run


def stuck(machine: Machine, folder: Path) -> Result:
    """See a job called hung in which a rank waits on its device for others that never come."""
    done = launch(machine, folder, f"--hang_timeout={STUCK_S}", words=("--stuck",))
    events = [event["event"] for event in done.events]
    seen = "hung" if "hung" in events else f"exit code {done.code} after {', '.join(events)}"
    return Result("hung", seen, "hung" in events and done.code != 0, done.output[-2000:])


def bench(machine: Machine, folder: Path) -> Result:
    """Measure what a strategy makes of a step."""
    folder.mkdir(parents=True)
    numbers = folder / "bench.json"
    options = ["--repeats=1", "--turns=4", f"--json={numbers}"]
    if machine.device == "cpu":
        options.append("--cpu")
    code, output = ended([str(ROOT / "scripts/bench"), "strategy", *options])
    if code or not numbers.exists():
        return Result("numbers", f"exit code {code}", is_right=False, detail=output[-4000:])
    results = json.dumps(json.loads(numbers.read_text(encoding="utf-8")))
    return Result("numbers", "numbers, in the JSON", is_right=True, detail=results)


def gpu_tests(machine: Machine, _folder: Path) -> Result:
    """Run the tests that are marked gpu."""
    if machine.device == "cpu":
        return Result("they pass", "no GPU", is_right=None)
    argv = ("-m", "pytest", "-q", "--gpu", "-m", "gpu", str(ROOT / "tests"))
    code, output = ended([sys.executable, *argv])
    return Result("they pass", output.strip().rpartition("\n")[2], code == 0, output[-4000:])
