"""`fleetrun verify`: proves on the user's script that a strategy trains as plain Paddle does."""

from __future__ import annotations

import os
from pathlib import Path

import click

from fleetrun.cli import parser, types
from fleetrun.cli.options import find
from fleetrun.commands import trials
from fleetrun.commands.verify import training_runs, verification
from fleetrun.commands.verify.training_runs import MOVED, PLAIN, STRATEGY, VerifyRun, VerifySpec
from fleetrun.errors import UsageError
from fleetrun.printing import say
from fleetrun.rundir import variables
from fleetrun.strategy import load

_EXEC = "exec"
_MERGE = "gradient_merge"
# The same exit code as that of --strategy_strict.
_UNEQUAL = 5


def _verify(launch: parser.Launch, *, updates: int, repeats: int, timeout: float, out: str) -> int:
    """Return 0 if the strategy trains as plain Paddle does, 5 if not, 1 where a run fails."""
    spec = _spec(launch)._replace(updates=updates, repeats=repeats, timeout_s=timeout, out=out)
    # Launches by `exec`, and by ssh, are planned elsewhere.
    is_planned = not (spec.is_exec or spec.is_by_ssh)
    trials.check(launch, "verify --strategy=NAME", is_planned=is_planned)
    with trials.held_folder(spec.out):
        say(
            f"fleetrun verify: {updates} updates as plain Paddle and with {spec.name}; everything "
            f"is kept in {out}"
        )
        done = _train_all(spec)
        outcome = verification.judge(done)
        document = verification.document(spec, outcome, done)
        Path(out, "verify.json").write_text(document, encoding="utf-8")
    say(verification.text(spec, outcome))
    return 1 if outcome.fault else 0 if outcome.is_equal else _UNEQUAL


def _train_all(spec: VerifySpec) -> list[VerifyRun]:
    """Run the trainings of SPEC in turns.

    Where they differ, plain Paddle runs again, which shows its noise; and if it is equal to itself,
    once more with gradients moved by rounding, as sums in another order are not a mistake.
    """
    kinds = [PLAIN, STRATEGY] * spec.repeats
    done: list[VerifyRun] = []
    while kinds:
        kind = kinds.pop(0)
        number = 1 + sum(run.kind == kind for run in done)
        run = training_runs.run(spec, kind, f"{kind}-{number}")
        done.append(run)
        speed = f"{run.shown.speeds[0]:.4g} updates/s" if run.shown.speeds else "too short to time"
        name = spec.name if kind == STRATEGY else "plain Paddle"
        name += ", gradients moved by rounding" if kind == MOVED else ""
        say(f"  {name} {number}: {run.fault or speed}")
        if run.fault or kind == MOVED:
            break
        if kinds:
            continue
        # Where verify runs on each host, ranks may differ on another one, which waits for us.
        is_spread = any(run.ranks > len({key.rank for key in run.values}) for run in done)
        outcome = verification.judge(done)
        if is_spread or (outcome.diverging and not outcome.noisy):
            has_noise = sum(run.kind == PLAIN for run in done) > 1
            kinds.append(MOVED if has_noise else PLAIN)
    return done


def _spec(launch: parser.Launch) -> VerifySpec:
    """Return the request of LAUNCH; UsageError if it cannot be verified."""
    is_exec = launch.script[:1] == (_EXEC,) and not os.path.exists(_EXEC)
    others = tuple(
        given
        for given in launch.options
        if given.name != "strategy" and find(given.name).group != "strategy"
    )
    # An empty list also overrides a config file.
    plain = ("--strategy=", *launch._replace(options=others).words)
    request = parser.launch_request([*launch.words, "train.py"], os.environ)
    strategy = request.strategy
    if strategy is None or not strategy.settings:
        raise UsageError("nothing to verify: give --strategy, or --set.")
    environ = {**os.environ, variables.STRATEGY: ""}
    if parser.launch_request([*plain, "train.py"], environ).strategy is not None:
        raise UsageError(
            "the config file sets single fields of a strategy, so nothing is plain Paddle: give "
            "them as --set, or as --strategy=FILE."
        )
    if any(setting.name == _MERGE and setting.value is True for setting in strategy.settings):
        raise UsageError(
            f"plain Paddle has nothing to compare with {_MERGE}: each of its updates is of one "
            f"step. Verify the other fields with --set {_MERGE}=false."
        )
    sets = " ".join(f"--set {given.raw}" for given in launch.options if given.name == "set")
    return VerifySpec(
        plain=plain,
        strategy=launch.words,
        script=launch.script[1:] if is_exec else launch.script,
        is_exec=is_exec,
        name=", ".join(sets if name == load.SET else name for name in strategy.sources),
        fields=tuple(setting.name for setting in strategy.settings if setting.value is not False),
        is_by_ssh=bool(request.hosts or request.hostfile),
    )


command = parser.LaunchCommand(
    "verify",
    help="Train some updates as plain Paddle and as many with the strategy, and compare the "
    "weights of all ranks, the speed and the memory. The script is launched as it "
    "is; `exec COMMAND` compares the trainings that COMMAND launches. Exit code 0: equal, within "
    "the noise of two plain runs; 5: not equal; 1: a run failed.",
    options_metavar="--strategy NAME|FILE [OPTIONS] [LAUNCH OPTIONS] SCRIPT|exec COMMAND "
    "[ARGUMENTS]...",
    callback=click.pass_obj(_verify),
    params=[
        # The first half is compared one by one, the second half is timed.
        parser.option("updates", types.number(4), "Updates of each run.", default="20"),
        # From two on, speeds are compared.
        parser.option("repeats", types.number(1), "Runs of each, in turns.", default="1"),
        trials.TIMEOUT,
        parser.option("out", types.FOLDER, "Output: verify.json, runs/.", default="verify"),
    ],
)
