"""The secrets of a command line, which are not shown, and the variables that can restore them."""

# No `from __future__ import annotations` here, for the reason given in model.py.
from collections.abc import Sequence
from typing import NamedTuple

from fleetrun.rundir import secrets, variables


class Hidden(NamedTuple):
    """An argument with a secret: its index, the text `before` the secret, and its `variable`."""

    at: int
    before: str
    variable: str


def conceal(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[Hidden, ...]]:
    """Return WORDS without secrets, and what was hidden.

    >>> conceal(["--env=HF_TOKEN=abc", "train.py", "--db-password", "xyz", "--max_token", "512"])[0]
    ('--env=HF_TOKEN=***', 'train.py', '--db-password', '***', '--max_token', '512')
    >>> conceal(["--token=abc"])[1]
    (Hidden(at=0, before='--token=', variable='TOKEN'),)
    """
    shown = list(words)
    hidden: list[Hidden] = []
    known: dict[str, str] = {}
    for at, before, name, value in secrets.in_arguments(words):
        # An address without its user and password still says something.
        shown[at] = before + (secrets.HIDDEN if name else secrets.redact("", value))
        variable = _variable(name or before[:-1].rpartition("=")[2], at, value, known)
        known[variable] = value
        hidden.append(Hidden(at, before, variable))
    return tuple(shown), tuple(hidden)


def _variable(name: str, at: int, value: str, known: dict[str, str]) -> str:
    """Name the variable that may hold VALUE, word AT; KNOWN ones may hold other things already.

    >>> _variable("--db-password", 1, "a", {}), _variable("HF_TOKEN", 1, "a", {"HF_TOKEN": "b"})
    ('DB_PASSWORD', 'HF_TOKEN_2')
    """
    name = name or f"{variables.SECRET_ARGUMENT}{at}"
    if not (name.isidentifier() and name.isascii()):
        letters = "".join(c if c.isascii() and c.isalnum() else " " for c in name).upper()
        name = "_".join(letters.split())
        name = name if name.isidentifier() else f"{variables.SECRET}{name}"
    variable, number = name, 1
    while known.get(variable, value) != value:
        number += 1
        variable = f"{name}_{number}"
    return variable
