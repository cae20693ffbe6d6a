"""What `fleetrun tune` is asked for: its own options, taken out of a launch's command line."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

from fleetrun import argv, options
from fleetrun.errors import UsageError
from fleetrun.options import Given, Option
from fleetrun.strategy import asked, fields, load

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from fleetrun.model import Knob

HELP = """\
Usage: fleetrun tune --vary KEY=A,B,... [--vary ...] [options] [launch options] train.py [args]

Train a few steps with every combination of the values, the better half longer, and rank them.
The script is launched as it is, with the launch options and one --set KEY=VALUE for each --vary.

  --vary KEY=A,B,...   A field of the strategy and the values to try (repeatable). Of parts of what
                       the strategy switches on, the name will do: k_steps=1,2,4.
  --steps N            Optimizer updates of the last round (30).
  --warmup N           Updates at the start of each run that are not timed (5).
  --repeats N          Runs of each candidate in a round, taken in turns (2).
  --timeout SECONDS    After so long a run has failed (600).
  --out DIR            Where everything goes: best.yaml, tune.json, tune.html, trials/ (tune).
"""
# Fewer timed updates than this tell nothing.
FEWEST_TIMED = 3

_GROUP = "Tune"
OWN = (
    Option("vary", "text", _GROUP, "", metavar="KEY=A,B"),
    Option("steps", "int", _GROUP, "", default="30", minimum=2),
    Option("warmup", "int", _GROUP, "", default="5", minimum=0),
    Option("repeats", "int", _GROUP, "", default="2", minimum=1),
    Option("timeout", "float", _GROUP, "", default="600", minimum=1),
    Option("out", "text", _GROUP, "", default="tune", metavar="DIR"),
)
_NAMES = frozenset(option.name for option in OWN)
# Runs are to be told apart by what tune gives them.
_TAKEN = {
    "log_dir": "the logs of every run are kept under --out",
    "dry_run": "there is nothing to measure then",
    "from_manifest": "give the launch's own options",
}


class Candidate(NamedTuple):
    """One combination: the varied fields and their values, as text."""

    values: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        """As it would be typed."""
        return " ".join(f"{key}={value}" for key, value in self.values)


class Wanted(NamedTuple):
    """What to try, for how long, and the launch that is varied."""

    candidates: tuple[Candidate, ...]
    steps: int
    warmup: int
    repeats: int
    timeout_s: float
    out: str
    # The launch's own options, and the script with its arguments.
    launch: tuple[str, ...]
    script: tuple[str, ...]


def parse(words: Sequence[str]) -> Wanted | None:
    """Return what WORDS ask for; None if it is for help.

    >>> wanted = parse(["--vary=a=1,4", "--steps", "9", "--gpus=0,1", "train.py", "--steps=3"])
    >>> [str(candidate) for candidate in wanted.candidates], wanted.steps
    (['a=1', 'a=4'], 9)
    >>> wanted.launch, wanted.script
    (('--gpus=0,1',), ('train.py', '--steps=3'))
    """
    head = argv.scan(words, (*options.TABLE, *OWN))
    if any(given.option.name == "help" for given in head.settings):
        return None
    if head.pending is not None:
        raise UsageError(f"{head.pending.typed} needs a value.")
    for given in head.settings:
        if given.option.name in _TAKEN:
            raise UsageError(f"tune takes no {given.typed}: {_TAKEN[given.option.name]}.")
    if head.script_at is None:
        raise UsageError(
            "no script to tune: write `fleetrun tune --vary KEY=A,B [options] train.py`."
        )
    given_values = {given.option.name: given for given in head.settings}
    numbers = {
        option.name: _number(option, given_values.get(option.name))
        for option in OWN
        if option.kind in {"int", "float"}
    }
    steps, warmup = int(numbers["steps"]), int(numbers["warmup"])
    if steps < warmup + FEWEST_TIMED:
        raise UsageError(
            f"--steps={steps} leaves too few updates after --warmup={warmup}: "
            f"give at least {warmup + FEWEST_TIMED}."
        )
    varied = [given.raw for given in head.settings if given.option.name == "vary"]
    out = given_values.get("out")
    # A `--` that ended our options is kept: what comes after it may look like one.
    dashes = ("--",) if list(words[: head.script_at][-1:]) == ["--"] else ()
    return Wanted(
        candidates=grid(varied),
        steps=steps,
        warmup=warmup,
        repeats=int(numbers["repeats"]),
        timeout_s=numbers["timeout"],
        out=(out.raw if out else "") or "tune",
        launch=tuple(
            f"{given.typed}={given.raw}"
            for given in head.settings
            if given.option.name not in _NAMES
        ),
        script=(*dashes, *words[head.script_at :]),
    )


def grid(varied: list[str]) -> tuple[Candidate, ...]:
    """Return every combination of the values in texts such as `a=1,2`.

    >>> [str(candidate) for candidate in grid(["a=1,2", "b=x,y"])]
    ['a=1 b=x', 'a=1 b=y', 'a=2 b=x', 'a=2 b=y']
    """
    axes: list[list[tuple[str, str]]] = []
    for text in varied:
        key, equals, listed = text.partition("=")
        values = list(dict.fromkeys(part.strip() for part in listed.split(",")))
        if not key.strip() or not equals or not all(values):
            raise UsageError(f"--vary={text}: give a field and its values, KEY=A,B,...")
        if key.strip() in {axis[0][0] for axis in axes}:
            raise UsageError(f"--vary={text}: {key.strip()} is varied twice.")
        axes.append([(key.strip(), value) for value in values])
    if not axes:
        raise UsageError("nothing to tune: give at least one --vary KEY=A,B.")
    return tuple(Candidate(values) for values in itertools.product(*axes))


def settle(wanted: Wanted, variables: Mapping[str, str]) -> Wanted:
    """Return WANTED with full names, every value tried on its field; nothing has run yet.

    VARIABLES are the environment's, where a strategy may be asked for, too.
    """
    switches = {knob.name for knob in _base(wanted, variables) if knob.value is True}
    candidates = []
    for candidate in wanted.candidates:
        values = tuple((_full(key, switches), value) for key, value in candidate.values)
        for key, value in values:
            load.parse_set(f"{key}={value}")
        candidates.append(Candidate(values))
    return wanted._replace(candidates=tuple(candidates))


def _base(wanted: Wanted, variables: Mapping[str, str]) -> Iterable[Knob]:
    """Return what is asked for whatever is varied."""
    head = argv.scan(wanted.launch, options.TABLE)
    given = [one for one in head.settings if one.option.name == "strategy"]
    if not given and variables.get("FLEETRUN_STRATEGY"):
        option = next(one for one in options.TABLE if one.name == "strategy")
        name = "$FLEETRUN_STRATEGY"
        given = [Given(option, variables[name[1:]], name, name)]
    layers = [load.read(each.name) for each in asked.names(given)]
    sets = [load.parse_set(one.raw) for one in head.settings if one.option.name == "set"]
    return load.combine(layers, sets).strategy.knobs


def _full(key: str, switches: set[str]) -> str:
    """Return the name of the part KEY of what is switched on; KEY itself where it is none, or many.

    >>> _full("k_steps", {"gradient_merge"}), _full("nccl_comm_num", set())
    ('gradient_merge_configs.k_steps', 'nccl_comm_num')
    """
    if key in fields.by_name(fields.STRATEGY):
        return key
    found = [
        f"{field.name}.{key}"
        for field in fields.TABLE
        if field.name.removesuffix("_configs") in switches
        for part in field.keys
        if part.name == key
    ]
    return found[0] if len(found) == 1 else key


def _number(option: Option, given: options.Given | None) -> float:
    raw = given.raw if given is not None else option.default or ""
    try:
        value = float(raw) if option.kind == "float" else int(raw)
    except ValueError:
        raise UsageError(f"{option.flag}={raw}: give a number.") from None
    if not value >= (option.minimum or 0) or value == float("inf"):
        raise UsageError(f"{option.flag}={raw}: give at least {option.minimum:g}.")
    return value
