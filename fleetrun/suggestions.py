"""Suggests the intended name in messages about one that does not exist."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches


def closest(name: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """Return the name of KNOWN most like NAME, or equal to its first word, ignoring case.

    LIKENESS is 0 to 1.

    >>> closest("NCCL_com_num", ["nccl_comm_num", "amp"]), closest("dgc", ["amp"])
    ('nccl_comm_num', None)
    >>> closest("gpus-per-node", ["gpus", "nodes"])
    'gpus'
    """
    spellings = {spelling.lower(): spelling for spelling in known}
    near = get_close_matches(name.lower(), spellings, n=1, cutoff=likeness)
    return spellings[near[0]] if near else spellings.get(re.split("[-_]", name.lower())[0])


def ending(name: str, known: Iterable[str], otherwise: str = "", prefix: str = "") -> str:
    """Return the end of a sentence about the unknown NAME; PREFIX is not part of KNOWN.

    >>> ending("ampp", ["amp"]), ending("x", ["amp"], "there is amp."), ending("x", ["amp"])
    ('; did you mean amp?', '; there is amp.', '.')
    """
    suggestion = closest(name, known)
    if suggestion is not None:
        return f"; did you mean {prefix}{suggestion}?"
    return f"; {otherwise}" if otherwise else "."
