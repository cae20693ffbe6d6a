"""Lists of hosts as Slurm writes them: names with ranges of numbers in brackets."""

# No `from __future__ import annotations` here, for the reason given in model.py.
from collections.abc import Iterator
from itertools import product
from math import prod

from fleetrun.text import is_digits

# More hosts than any cluster has: a typing error, not worth expanding.
MOST = 100_000


def expand(text: str) -> tuple[str, ...]:
    """Return the names that TEXT stands for, in its order; ValueError tells what is wrong.

    The notation is that of `scontrol show hostnames` (slurm.schedmd.com/scontrol.html).

    >>> expand("node[01-03,7],gpu5")
    ('node01', 'node02', 'node03', 'node7', 'gpu5')
    >>> expand("rack[0-1]n[8-9]-ib")
    ('rack0n8-ib', 'rack0n9-ib', 'rack1n8-ib', 'rack1n9-ib')
    """
    names: list[str] = []
    for word in _entries(text):
        pieces = [_choices(piece) for piece in _pieces(word)]
        if len(names) + prod(map(len, pieces)) > MOST:
            raise ValueError(f"{word} stands for more than {MOST:,} hosts")
        names += map("".join, product(*pieces))
    return tuple(names)


def _entries(text: str) -> Iterator[str]:
    """Split TEXT at the commas outside brackets."""
    start, is_inside = 0, False
    for at, letter in enumerate(text):
        if letter in "[]":
            if is_inside == (letter == "["):
                raise ValueError(f"the brackets of {text} do not match")
            is_inside = letter == "["
        elif letter == "," and not is_inside:
            yield _named(text[start:at], text)
            start = at + 1
    if is_inside:
        raise ValueError(f"the brackets of {text} do not match")
    yield _named(text[start:], text)


def _named(word: str, text: str) -> str:
    word = word.strip()
    if not word or any(letter.isspace() for letter in word):
        raise ValueError(f"{text or 'an empty text'} has no name where one belongs")
    return word


def _pieces(word: str) -> Iterator[str]:
    """Split WORD into plain text and bracketed parts, with their opening brackets.

    >>> list(_pieces("n[1-2]x"))
    ['n', '[1-2', 'x']
    """
    for piece in word.replace("[", "\0[").replace("]", "\0").split("\0"):
        if piece:
            yield piece


def _choices(piece: str) -> tuple[str, ...]:
    """Return the expansions of PIECE: itself, or each number of its ranges, with leading zeros."""
    if not piece.startswith("["):
        return (piece,)
    choices: list[str] = []
    for part in piece[1:].split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not all(is_digits(number) for number in (first, last)):
            raise ValueError(f"{part or 'nothing'} in {piece}] is not a range of numbers")
        low, high = int(first), int(last)
        if high < low or high - low >= MOST or len(choices) >= MOST:
            raise ValueError(f"{part} in {piece}] is not a range of numbers")
        choices += [str(number).zfill(len(first)) for number in range(low, high + 1)]
    return tuple(choices)
