"""The request of `fleetrun tune`: candidates, their number of steps, and the launch; pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fleetrun.cli import argv
from fleetrun.cli.options import find
from fleetrun.cli.parser import Launch
from fleetrun.commands import trials
from fleetrun.errors import UsageError
from fleetrun.model import Knob
from fleetrun.strategy import fields, load


class Candidate(NamedTuple):
    """One combination: the varied fields and their values, as text."""

    values: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        """As it would be typed."""
        return " ".join(f"{key}={value}" for key, value in self.values)


class TuneSpec(NamedTuple):
    """The candidates, their number of steps, and the launch to vary."""

    candidates: tuple[Candidate, ...]
    # Updates of the last round, and those of each run that are not timed.
    steps: int
    warmup: int
    repeats: int
    timeout_s: float
    out: str
    # The launch's own options as words, and the script with its arguments.
    launch: tuple[str, ...]
    script: tuple[str, ...]
    # Whether standard output is for the results as JSON alone.
    is_json: bool = False


def make(
    launch: Launch,
    *,
    vary: Sequence[str],
    steps: int,
    warmup: int,
    repeats: int,
    timeout: float,
    out: str,
    json: bool = False,
) -> TuneSpec:
    """Return the request of LAUNCH and tune's own options; UsageError if it cannot be tuned."""
    trials.refuse_taken(launch, "tune")
    for setting in launch.options:
        if setting.name in {"hosts", "hostfile"}:
            raise UsageError(
                f"tune takes no {setting.typed}: it measures on this host; start the job on "
                "several hosts with each strategy, and compare them with `fleetrun report`."
            )
    if not launch.script:
        raise UsageError(
            "no script to tune: write `fleetrun tune --vary nccl_comm_num=1,2 [options] train.py`."
        )
    if steps < warmup + trials.FEWEST_TIMED:
        raise UsageError(
            f"--steps={steps} leaves too few updates after --warmup={warmup}: "
            f"give at least {warmup + trials.FEWEST_TIMED}."
        )
    return TuneSpec(
        candidates=grid(vary),
        steps=steps,
        warmup=warmup,
        repeats=repeats,
        timeout_s=timeout,
        out=out or "tune",
        launch=tuple(f"{setting.typed}={setting.raw}" for setting in launch.options),
        script=launch.script,
        is_json=json,
    )


def grid(varied: Iterable[str]) -> tuple[Candidate, ...]:
    """Return every combination of the values in texts such as `a=1,2`.

    >>> [str(candidate) for candidate in grid(["a=1,2", "b=x,y"])]
    ['a=1 b=x', 'a=1 b=y', 'a=2 b=x', 'a=2 b=y']
    """
    axes: list[list[tuple[str, str]]] = []
    for text in varied:
        key, equals, listed = text.partition("=")
        values = list(dict.fromkeys(part.strip() for part in listed.split(",")))
        if not key.strip() or not equals or not all(values):
            raise UsageError(
                f"--vary={text}: give a field and its values, as in nccl_comm_num=1,2."
            )
        if key.strip() in {axis[0][0] for axis in axes}:
            raise UsageError(f"--vary={text}: {key.strip()} is varied twice.")
        axes.append([(key.strip(), value) for value in values])
    if not axes:
        raise UsageError(
            "nothing to tune: give at least one --vary, as in --vary nccl_comm_num=1,2."
        )
    return tuple(Candidate(values) for values in itertools.product(*axes))


def settle(spec: TuneSpec, variables: Mapping[str, str]) -> TuneSpec:
    """Return SPEC with full names after trying every value on its field; nothing runs yet.

    VARIABLES are the environment's, which may request a strategy, too.
    """
    base = _base(spec, variables)
    switches = {knob.name for knob in base if knob.value is True}
    candidates = []
    for candidate in spec.candidates:
        values = tuple((_full(key, switches), value) for key, value in candidate.values)
        for key, value in values:
            load.parse_set(f"{key}={value}")
        candidates.append(Candidate(values))
    return spec._replace(candidates=tuple(candidates))


def _base(spec: TuneSpec, variables: Mapping[str, str]) -> tuple[Knob, ...]:
    """Return the settings that are not varied."""
    given = argv.scan(spec.launch).given
    strategies = [item for item in given if item.name == "strategy"]
    if not strategies:
        strategies = find("strategy").of_environment(variables, ())
    sets = [item for item in given if item.name == "set"]
    return load.requested(load.names(strategies), sets, {}).strategy.knobs


def _full(key: str, switches: set[str]) -> str:
    """Return the full name of the part KEY of an enabled feature; KEY itself if not unique.

    >>> _full("k_steps", {"gradient_merge"}), _full("nccl_comm_num", set())
    ('gradient_merge_configs.k_steps', 'nccl_comm_num')
    """
    if key in fields.by_name(fields.STRATEGY):
        return key
    matches = [
        f"{field.name}.{key}"
        for field in fields.TABLE
        if field.name.removesuffix("_configs") in switches
        for part in field.keys
        if part.name == key
    ]
    return matches[0] if len(matches) == 1 else key
