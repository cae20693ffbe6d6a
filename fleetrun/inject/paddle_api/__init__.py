"""The only place for Paddle's private names: their table, their check, and typed functions.

The names are looked up once, when Paddle is imported and before anything is patched. A capability
that lacks one is left to Paddle's own behaviour, and fleetrun says so.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from .private_names import BUILDS_ON, FALLBACKS, NAMES, TESTED, PrivateName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import CodeType

# By capability: the fault of one of its names.
_faults: dict[str, str] = {}
_refused: set[str] = set()
_report: Callable[[str], None] = print


def check_names(report: Callable[[str], None]) -> None:
    """Look up every name of the table, its parameters and its attributes.

    REPORT is called with a clause for each capability that is requested and missing.
    """
    global _report  # one Paddle
    _report = report
    _faults.clear()
    _refused.clear()
    for name in NAMES:
        fault = _fault(name)
        if fault:
            for capability in name.capabilities:
                _faults.setdefault(capability, fault)


def has(capability: str) -> bool:
    """Whether this Paddle has all names of CAPABILITY; the first refusal is reported."""
    if not split_by(capability):
        return True
    if capability not in _refused:
        _refused.add(capability)
        _report(_clause(capability))
    return False


def split_by(capability: str) -> str:
    """Return why this rank, perhaps alone, lacks CAPABILITY and what it does; empty if not."""
    clause = _clause(capability)
    return clause and f"in this Paddle {clause}"


def refusal(capability: str) -> str:
    """Return the same if CAPABILITY was requested; empty otherwise."""
    return split_by(capability) if capability in _refused else ""


def sentence(clauses: Iterable[str]) -> str:
    """Return the sentence for the user that reports CLAUSES."""
    paddle = sys.modules.get("paddle")
    version = getattr(paddle, "__version__", "of unknown version")
    lacks = f"Paddle {version} lacks something here that fleetrun needs"
    if version not in TESTED:
        known = ", ".join(TESTED)
        lacks = f"Paddle {version} differs from the versions that fleetrun knows ({known})"
    return f"{lacks}. {'; '.join(clauses)}."


def _clause(capability: str) -> str:
    """Return what CAPABILITY, or one that it builds on, lacks, and what happens instead."""
    faults = map(_faults.get, (capability, *BUILDS_ON.get(capability, ())))
    fault = next(filter(None, faults), "")
    return fault and f"{fault}: {FALLBACKS[capability]}"


def _fault(name: PrivateName) -> str:
    value: Any = sys.modules.get(name.module)
    try:
        for part in name.path.split("."):
            value = _attribute(value, part.split("|"))
    except AttributeError:
        return f"{name} is missing"
    if name.parameters is None and not name.attributes:
        return ""
    code = _code(value)
    if code is None:
        return f"{name} is not a Python function"
    if name.parameters is not None:
        parameters = code.co_varnames[: code.co_argcount]
        if parameters[: len(name.parameters)] != name.parameters:
            return f"{name} takes ({', '.join(parameters)})"
    used = _names(code)
    unused = [attribute for attribute in name.attributes if attribute not in used]
    return f"{name} does not use {unused[0]}" if unused else ""


def _attribute(owner: Any, names: list[str]) -> Any:
    """Return the first of NAMES that OWNER has; from a class without calling a descriptor."""
    for name in names[:-1]:
        if hasattr(owner, name):
            names = [name]
    if isinstance(owner, type) and names[-1] in vars(owner):
        return vars(owner)[names[-1]]
    return getattr(owner, names[-1])


def _code(function: Any) -> CodeType | None:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return getattr(function, "__code__", None)


def _names(code: CodeType) -> set[str]:
    """Return all names and strings in CODE and the functions inside it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, str):
            names.add(constant)
        elif isinstance(constant, type(code)):
            names |= _names(constant)
    return names
