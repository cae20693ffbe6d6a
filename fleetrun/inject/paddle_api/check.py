"""Compares the table of private names with the imported Paddle, once."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from . import self_tests
from .private_names import BUILDS_ON, FALLBACKS, NAMES, TESTED, PrivateName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import CodeType

# By capability: the fault of one of its names, or of a capability that it builds on.
_faults: dict[str, str] = {}
_self_tested: set[str] = set()
_refused: set[str] = set()
_report: Callable[[str], None] = print


def check_names(report: Callable[[str], None]) -> None:
    """Look up every name of the table, its parameters and its attributes.

    REPORT is called with a clause for each capability that is requested and missing.
    """
    global _report  # one Paddle
    _report = report
    for cache in (_faults, _self_tested, _refused):
        cache.clear()
    for name in NAMES:
        fault = _fault(name)
        if fault:
            for capability in name.capabilities:
                _faults.setdefault(capability, fault)


def has(capability: str) -> bool:
    """Whether this Paddle supports CAPABILITY; the first call runs its self-test.

    The first refusal is reported.
    """
    for needed in BUILDS_ON.get(capability, ()):
        if not _works(needed):
            _faults.setdefault(capability, _faults[needed])
    if _works(capability):
        return True
    if capability not in _refused:
        _refused.add(capability)
        _report(f"{_faults[capability]}: {FALLBACKS[capability]}")
    return False


def agree(
    all_gather: Callable[[dict[str, str]], Sequence[dict[str, str]]], report: Callable[[str], None]
) -> None:
    """Disable each capability that the self-tests have refused on any rank.

    ALL_GATHER returns the argument of every rank and must be called by all: ranks that differ would
    wait for each other. REPORT gets a clause for each capability that is refused from now on.
    """
    global _report  # one Paddle
    _report = report
    own = {
        capability: _faults[capability]
        for capability in self_tests.ON_DEVICE
        if not _works(capability)
    }
    for rank, faults in enumerate(all_gather(own)):
        for capability, fault in faults.items():
            _faults.setdefault(capability, f"{fault} of rank {rank}")


def sentence(clauses: Iterable[str]) -> str:
    """Return the sentence for the user that reports CLAUSES."""
    paddle = sys.modules.get("paddle")
    version = getattr(paddle, "__version__", "of unknown version")
    lacks = f"Paddle {version} lacks something here that fleetrun needs"
    if version not in TESTED:
        known = ", ".join(TESTED)
        lacks = f"Paddle {version} differs from the versions that fleetrun knows ({known})"
    return f"{lacks}. {'; '.join(clauses)}."


def refusal(capability: str) -> str:
    """Return why CAPABILITY is not used and what happens instead; empty if it was not refused."""
    if capability not in _refused:
        return ""
    return f"in this Paddle {_faults[capability]}: {FALLBACKS[capability]}"


def split_by(capability: str) -> str:
    """Return why this rank, perhaps alone, lacks CAPABILITY; empty if not, or if ranks `agree`.

    Only a test that was run already counts.
    """
    if capability in self_tests.ON_DEVICE and self_tests.are_on_device():
        return ""
    faults = map(_faults.get, (capability, *BUILDS_ON.get(capability, ())))
    fault = next(filter(None, faults), "")
    return fault and f"in this Paddle {fault}: {FALLBACKS[capability]}"


def _works(capability: str) -> bool:
    if capability not in _faults and capability not in _self_tested:
        _self_tested.add(capability)
        failure = self_tests.failure(capability)
        if failure:
            _faults[capability] = failure
    return capability not in _faults


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
