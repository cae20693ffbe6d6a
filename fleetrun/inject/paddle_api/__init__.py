"""Checks whether this Paddle has the private names that fleetrun uses, and reads gradients.

The names are looked up once, when Paddle is imported and before anything is patched. A capability
that lacks one is left to Paddle's own behaviour, and fleetrun says so.
"""

from __future__ import annotations

import sys
from typing import Any

from .private_names import BUILDS_ON, NAMES, TESTED, PrivateName

# By capability: the first name that it lacks.
_missing: dict[str, str] = {}
# The capabilities that were requested and are missing, in order.
_refused: dict[str, None] = {}


def check_names() -> None:
    """Look up every name of the table."""
    _missing.clear()
    _refused.clear()
    for name in NAMES:
        if not _is_there(name):
            for capability in name.capabilities:
                _missing.setdefault(capability, str(name))


def _is_there(name: PrivateName) -> bool:
    value: Any = sys.modules.get(name.module)
    for part in name.path.split("."):
        # A class may have a descriptor that cannot be read from it.
        if not hasattr(value, part) and part not in getattr(value, "__dict__", ()):
            return False
        value = getattr(value, part, None)
    return True


def has(capability: str) -> bool:
    """Whether this Paddle has all names of CAPABILITY; a refusal is remembered."""
    if lack(capability):
        _refused[capability] = None
        return False
    return True


def lack(capability: str) -> str:
    """Return why this rank, perhaps alone, lacks CAPABILITY and what it does; empty if not."""
    clause = _clause(capability)
    return clause and f"in this Paddle {clause}"


def refusal(capability: str) -> str:
    """Return the same if CAPABILITY was requested; empty otherwise."""
    return lack(capability) if capability in _refused else ""


def remark() -> str:
    """Return the sentence about all capabilities that were requested and are missing."""
    if not _refused:
        return ""
    version = getattr(sys.modules.get("paddle"), "__version__", "of unknown version")
    lacks = f"Paddle {version} lacks something here that fleetrun needs"
    if version not in TESTED:
        known = ", ".join(TESTED)
        lacks = f"Paddle {version} differs from the versions that fleetrun knows ({known})"
    return f"{lacks}. {'; '.join(map(_clause, _refused))}."


def _clause(capability: str) -> str:
    """Return what CAPABILITY, or one that it builds on, lacks, and what happens instead."""
    builds_on = BUILDS_ON.get(capability, ())
    missing = next((_missing[name] for name in (capability, *builds_on) if name in _missing), "")
    return missing and f"{missing} is missing: {capability}"
