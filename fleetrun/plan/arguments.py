"""Which words of a command line must not be shown, and what could bring them back."""

# No `from __future__ import annotations` here, for the reason given in model.py.
from collections.abc import Sequence
from typing import NamedTuple

from fleetrun.plan import secrets

# Numbers up to this long are sizes and ids (`--max_token 4096`), not keys.
_SHORT = 6
_PLAIN_WORDS = frozenset(("", "true", "false", "yes", "no", "none", "null", "auto"))


class Hidden(NamedTuple):
    """The place of a word that is not shown; after `before` belongs what `variable` holds."""

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
    flag = ""
    for at, word in enumerate(words):
        before, name, value = _secret_in(word, flag)
        flag = word if word.startswith("-") and "=" not in word else ""
        if value is None:
            continue
        # An address without its user and password still says something.
        shown[at] = before + (secrets.HIDDEN if name else secrets.redact("", value))
        name = name or before[:-1].rpartition("=")[2] or f"FLEETRUN_ARG_{at}"
        variable = _variable(name, value, known)
        known[variable] = value
        hidden.append(Hidden(at, before, variable))
    return tuple(shown), tuple(hidden)


def _secret_in(word: str, flag: str) -> tuple[str, str, str | None]:
    """Return what stands before WORD's secret, its name ("" for an address), and the secret."""
    if flag and not word.startswith("-") and _is_secret(flag, word):
        return "", flag, word
    before, rest = "", word
    while True:
        name, equals, value = rest.partition("=")
        if not equals or not _is_name(name):
            break
        before += f"{name}="
        if _is_secret(name, value):
            return before, name, value
        rest = value
    if secrets.redact("", word) == word:
        return "", "", None
    return before, "", rest


def _is_name(text: str) -> bool:
    return text.strip("-+~@") != "" and all(char.isalnum() or char in "_-./:+~@" for char in text)


def _is_secret(name: str, value: str) -> bool:
    """Whether VALUE is the secret that NAME promises; models have tokens too, and sort keys."""
    if not secrets.is_secret(name):
        return False
    is_plain = (
        value.lower() in _PLAIN_WORDS
        or (len(value) <= _SHORT and value.lstrip("-").replace(".", "", 1).isdigit())
        or (value[:1] + value[-1:] in ("<>", "[]"))
    )
    return not (name.startswith("-") and is_plain and not secrets.has_stem(name))


def _variable(name: str, value: str, known: dict[str, str]) -> str:
    """Name the variable that may hold VALUE; KNOWN ones may hold something else already.

    >>> _variable("--db-password", "a", {}), _variable("HF_TOKEN", "a", {"HF_TOKEN": "b"})
    ('DB_PASSWORD', 'HF_TOKEN_2')
    """
    if not (name.isidentifier() and name.isascii()):
        letters = "".join(c if c.isascii() and c.isalnum() else " " for c in name).upper()
        name = "_".join(letters.split())
        name = name if name.isidentifier() else f"FLEETRUN_{name}"
    variable, number = name, 1
    while known.get(variable, value) != value:
        number += 1
        variable = f"{name}_{number}"
    return variable
