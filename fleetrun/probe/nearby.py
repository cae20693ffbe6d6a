"""A file whose name is nearly the one that is not there; only a mistake loads it."""

from __future__ import annotations

import os
from itertools import islice

# A folder of a million samples is not searched for a slip of the keyboard.
_MOST = 10_000
# Two letters changed places in `tarin.py`; `train` and `train.py`. Less alike is another word.
_ALIKE = 0.7


def find(target: str, cwd: str) -> str | None:
    """Return the path most like TARGET, which is none, written from CWD as TARGET is.

    Every part of it may be misspelt, the folders too.
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
        # The ending, which all have, makes nothing alike.
        part = part.removesuffix(".py")
        spelt = {low[: -len(".py")]: name for low, name in spelt.items()}
    from fleetrun.suggestions import closest

    close = closest(part, spelt, _ALIKE)
    return spelt[close] if close else None
