"""Finds the file that a misspelt path probably means; loaded only for a mistake."""

from __future__ import annotations

import os
from itertools import islice

from fleetrun.text import closest

# A folder of a million samples is not searched because of a typing error.
_MOST = 10_000
# Two letters changed places in `tarin.py`; `train` and `train.py`. Names that are less alike are
# other words.
_ALIKE = 0.7


def find(target: str, cwd: str) -> str | None:
    """Return the existing path most like TARGET, relative to CWD as TARGET is.

    Any part of TARGET may be misspelt, folders included.
    """
    path, rest = ("/", target[1:]) if target.startswith("/") else ("", target)
    parts = [part for part in rest.split("/") if part]
    for place, part in enumerate(parts):
        is_last = place == len(parts) - 1
        here = os.path.join(cwd, path)
        if _fits(os.path.join(here, part), is_last=is_last):
            name: str | None = part
        else:
            name = _closest(part, here, is_last=is_last)
        if name is None:
            return None
        path = os.path.join(path, name)
    return path if "/" in path or not target.startswith("./") else f"./{path}"


def _fits(path: str, *, is_last: bool) -> bool:
    return os.path.isfile(path) if is_last else os.path.isdir(path)


def _closest(part: str, folder: str, *, is_last: bool) -> str | None:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, _MOST)]
    except OSError:
        return None
    names = [name for name in names if _fits(os.path.join(folder, name), is_last=is_last)]
    if is_last and part.endswith(".py"):
        # Not train.py.orig, nor the log of it.
        names = [name for name in names if name.lower().endswith(".py")]
    spelt = {name.lower(): name for name in names}
    if is_last and "." not in part:
        # Most often it is the ending that was left out.
        for ending in (".sh", ".py"):
            spelt |= {low[: -len(ending)]: spelt[low] for low in spelt if low.endswith(ending)}
    elif is_last and part.endswith(".py"):
        # The ending, which all have, does not count.
        part = part.removesuffix(".py")
        spelt = {low[: -len(".py")]: name for low, name in spelt.items()}

    close = closest(part, spelt, _ALIKE)
    return spelt[close] if close else None
