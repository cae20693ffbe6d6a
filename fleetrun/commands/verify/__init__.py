"""`fleetrun verify`: proves on the user's script that a strategy trains as plain Paddle does."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import click

from fleetrun.cli import parser
from fleetrun.cli.options import find
from fleetrun.commands import trials
from fleetrun.commands.verify import training_runs, verification
from fleetrun.commands.verify.training_runs import VerifyRun, VerifySpec
from fleetrun.errors import UsageError
from fleetrun.host import probe
from fleetrun.printing import say
from fleetrun.rundir.variables import STRATEGY
from fleetrun.strategy import load

_EXEC = "exec"
_MERGE = "gradient_merge"
# The same exit code as that of --strategy_strict.
_UNEQUAL = 5


def _verify(launch: parser.Launch, **own: Any) -> int:  # noqa: ANN401 - as `make` has them
    """Return 0 if the strategy trains as plain Paddle does, 5 if not, 1 where a run fails."""
    probe.current_folder()
    spec = make(launch, dict(os.environ), **own)
    with trials.held_folder(spec.out):
        say(
            f"fleetrun verify: {spec.updates} updates as plain Paddle and with {spec.name}, in "
            f"turns; everything is kept in {spec.out}"
        )
        done = training_runs.run_all(spec, training_runs.run, say, _is_settled)
        outcome = verification.judge(done)
        trials.write(spec.out, {"verify.json": verification.document(spec, outcome, done)})
    say(verification.text(spec, outcome))
    return 1 if outcome.fault else 0 if outcome.is_equal else _UNEQUAL


def _is_settled(done: Sequence[VerifyRun]) -> bool:
    """Whether more runs can change what DONE have shown."""
    outcome = verification.judge(done)
    return bool(not outcome.parted or outcome.noisy)


def make(
    launch: parser.Launch,
    environ: dict[str, str],
    *,
    updates: int,
    repeats: int,
    timeout: float,
    out: str,
) -> VerifySpec:
    """Return the request of LAUNCH and verify's options; UsageError if it cannot be verified."""
    trials.refuse_taken(launch, "verify")
    script = launch.script
    if not script:
        raise UsageError(
            "no script to verify: write `fleetrun verify --strategy=NAME [options] train.py`."
        )
    is_exec = script[0] == _EXEC and not os.path.exists(_EXEC)
    words = tuple(f"{setting.typed}={setting.raw}" for setting in launch.options)
    others = [setting for setting in launch.options if find(setting.name).group != "strategy"]
    # An empty list also overrides a config file.
    plain = ("--strategy=", *(f"{setting.typed}={setting.raw}" for setting in others))
    request = parser.launch_request([*words, "train.py"], environ)
    strategy = request.strategy
    if strategy is None or not strategy.knobs:
        raise UsageError("nothing to verify: give --strategy, or --set.")
    if parser.launch_request([*plain, "train.py"], {**environ, STRATEGY: ""}).strategy is not None:
        raise UsageError(
            "the config file sets single fields of a strategy, so nothing is plain Paddle: give "
            "them as --set, or as --strategy=FILE."
        )
    if any(knob.name == _MERGE and knob.value is True for knob in strategy.knobs):
        raise UsageError(
            f"plain Paddle has nothing to compare with {_MERGE}: each of its updates is of one "
            f"step. Verify the other fields with --set {_MERGE}=false."
        )
    return VerifySpec(
        updates=updates,
        repeats=repeats,
        timeout_s=timeout,
        out=out,
        plain=plain,
        strategy=words,
        script=script[1:] if is_exec else script,
        is_exec=is_exec,
        name=", ".join(name if name != load.SET else _sets(launch) for name in strategy.sources),
        fields=tuple(knob.name for knob in strategy.knobs if knob.value is not False),
        is_by_ssh=bool(request.hosts or request.hostfile),
    )


def _sets(launch: parser.Launch) -> str:
    """Return the fields that LAUNCH sets one by one, as typed."""
    sets = [setting for setting in launch.options if setting.name == "set"]
    return " ".join(f"--set {setting.raw}" for setting in sets)


command = parser.LaunchCommand(
    "verify",
    help="Train some updates as plain Paddle and as many with the strategy, in turns, and compare "
    "the weights and losses of all ranks, the speed and the memory. The script is launched as it "
    "is; of `exec COMMAND`, the trainings that COMMAND launches are. Exit code 0: equal, within "
    "the noise of two plain runs; 5: not equal; 1: a run failed.",
    options_metavar="--strategy NAME|FILE [OPTIONS] [LAUNCH OPTIONS] SCRIPT|exec COMMAND "
    "[ARGUMENTS]...",
    callback=click.pass_obj(_verify),
    params=[
        parser.option(
            "updates",
            "int",
            "Updates of each run: the first half is compared one by one, the second half is "
            "timed, and the last one is compared, too.",
            default="20",
            minimum=4,
        ),
        parser.option("repeats", "int", "Runs of each kind, in turns.", default="2", minimum=2),
        trials.TIMEOUT,
        parser.option(
            "out",
            "text",
            "Where everything goes: verify.json, runs/.",
            default="verify",
            metavar="DIR",
            path="dir",
        ),
    ],
)
