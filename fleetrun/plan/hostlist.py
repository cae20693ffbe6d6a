"""Lists of hosts as Slurm writes them: names with ranges of numbers in brackets."""

from __future__ import annotations

import re
from itertools import product
from math import prod

from fleetrun.text import is_digits

# More hosts than any cluster has: a typing error, not worth expanding.
MOST = 100_000
_NAME = r"(?:[^\s,\[\]]|\[[^\[\]]*\])+"


def expand(text: str) -> tuple[str, ...]:
    """Return the names that TEXT stands for, in its order; ValueError tells what is wrong.

    The notation is that of `scontrol show hostnames` (slurm.schedmd.com/scontrol.html).

    >>> expand("node[01-03,7],gpu5")
    ('node01', 'node02', 'node03', 'node7', 'gpu5')
    >>> expand("rack[0-1]n[8-9]-ib")
    ('rack0n8-ib', 'rack0n9-ib', 'rack1n8-ib', 'rack1n9-ib')
    """
    if not re.fullmatch(rf"\s*{_NAME}\s*(?:,\s*{_NAME}\s*)*", text):
        raise ValueError(f"{text or 'an empty text'} is no list of names, as n[1-2],m3")
    names: list[str] = []
    for word in re.findall(_NAME, text):
        pieces = [_choices(piece) for piece in re.findall(r"\[[^\]]*|[^\[\]]+", word)]
        if len(names) + prod(map(len, pieces)) > MOST:
            raise ValueError(f"{word} stands for more than {MOST:,} hosts")
        names += map("".join, product(*pieces))
    return tuple(names)


def _choices(piece: str) -> tuple[str, ...]:
    """Return the expansions of PIECE: itself, or each number of its ranges, with leading zeros."""
    if not piece.startswith("["):
        return (piece,)
    choices: list[str] = []
    for part in piece[1:].split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        is_range = is_digits(first) and is_digits(last)
        if not is_range or not 0 <= int(last) - int(first) < MOST - len(choices):
            raise ValueError(f"{part or 'nothing'} in {piece}] is not a range of numbers")
        choices += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return tuple(choices)
