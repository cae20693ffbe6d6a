"""The name that was meant, for messages about one that does not exist; only a mistake loads it."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def closest(name: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """Return the one of KNOWN that is most like NAME, or is its first word, whatever its case.

    LIKENESS is 0 to 1.

    >>> closest("NCCL_com_num", ["nccl_comm_num", "amp"]), closest("dgc", ["amp"])
    ('nccl_comm_num', None)
    >>> closest("gpus-per-node", ["gpus", "nodes"])
    'gpus'
    """
    spelt = {each.lower(): each for each in known}
    found = get_close_matches(name.lower(), spelt, n=1, cutoff=likeness)
    return spelt[found[0]] if found else spelt.get(re.split("[-_]", name.lower())[0])


def ending(name: str, known: Iterable[str], otherwise: str = "", prefix: str = "") -> str:
    """Return the end of a sentence about NAME, which does not exist; PREFIX is not part of KNOWN.

    >>> ending("ampp", ["amp"]), ending("x", ["amp"], "there is amp."), ending("x", ["amp"])
    ('; did you mean amp?', '; there is amp.', '.')
    """
    found = closest(name, known)
    if found is not None:
        return f"; did you mean {prefix}{found}?"
    return f"; {otherwise}" if otherwise else "."
