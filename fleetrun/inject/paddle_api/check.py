"""Compares the table of private names with the Paddle at hand, once, when it has been imported."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from . import self_tests
from .private_names import BUILDS_ON, FALLBACKS, NAMES, TESTED, PrivateName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import CodeType

# By capability, what is wrong with a name of it, or with what it builds on.
_faults: dict[str, str] = {}
_self_tested: set[str] = set()
_refused: set[str] = set()
_report: Callable[[str], None] = print


def check_names(report: Callable[[str], None]) -> None:
    """Look for every name of the table, its parameters and its attributes.

    REPORT is called for each capability that is asked for and is not there, with a clause.
    """
    global _report  # one Paddle
    _report = report
    for known in (_faults, _self_tested, _refused):
        known.clear()
    for name in NAMES:
        found = _fault(name)
        if found:
            for capability in name.capabilities:
                _faults.setdefault(capability, found)


def has(capability: str) -> bool:
    """Whether this Paddle is as CAPABILITY needs it; the first call runs its self-test.

    Reports it the first time that it is not.
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
    """Be without each capability that the self-tests have refused on any rank, from now on.

    ALL_GATHER returns what each rank has given; all ranks call it. Ranks that differ would wait for
    each other. REPORT gets a clause for each capability that is found missing from now on.
    """
    global _report  # one Paddle
    _report = report
    own = {each: _faults[each] for each in self_tests.ON_DEVICE if not _works(each)}
    for rank, faults in enumerate(all_gather(own)):
        for capability, fault in faults.items():
            _faults.setdefault(capability, f"{fault} of rank {rank}")


def sentence(clauses: Iterable[str]) -> str:
    """Return the sentence for the user that reports CLAUSES."""
    paddle = sys.modules.get("paddle")
    version = getattr(paddle, "__version__", "of unknown version")
    known = ", ".join(TESTED)
    differs = f"Paddle {version} differs from the versions that fleetrun knows ({known})"
    return f"{differs}. {'; '.join(clauses)}."


def refusal(capability: str) -> str:
    """Return why CAPABILITY is not used and what happens instead; empty if it was not refused."""
    if capability not in _refused:
        return ""
    return f"in this Paddle {_faults[capability]}: {FALLBACKS[capability]}"


def _works(capability: str) -> bool:
    if capability not in _faults and capability not in _self_tested:
        _self_tested.add(capability)
        failure = self_tests.failure(capability)
        if failure:
            _faults[capability] = failure
    return capability not in _faults


def _fault(name: PrivateName) -> str:
    found: Any = sys.modules.get(name.module)
    try:
        for part in name.path.split("."):
            found = _attribute(found, part.split("|"))
    except AttributeError:
        return f"{name} is missing"
    if name.parameters is None and not name.attributes:
        return ""
    code = _code(found)
    if code is None:
        return f"{name} is not a Python function"
    if name.parameters is not None:
        taken = code.co_varnames[: code.co_argcount]
        if taken[: len(name.parameters)] != name.parameters:
            return f"{name} takes ({', '.join(taken)})"
    known = _names(code)
    lost = [each for each in name.attributes if each not in known]
    return f"{name} does not use {lost[0]}" if lost else ""


def _attribute(found: Any, names: list[str]) -> Any:
    """Return the first of NAMES that FOUND has; of classes not what a descriptor returns."""
    for name in names[:-1]:
        if hasattr(found, name):
            names = [name]
    if isinstance(found, type) and names[-1] in vars(found):
        return vars(found)[names[-1]]
    return getattr(found, names[-1])


def _code(function: Any) -> CodeType | None:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return getattr(function, "__code__", None)


def _names(code: CodeType) -> set[str]:
    """Return all names and strings in CODE and the functions inside it."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, str):
            found.add(constant)
        elif isinstance(constant, type(code)):
            found |= _names(constant)
    return found
