"""How many examples a property test tries: some in every run, many in a long one."""

from __future__ import annotations

from hypothesis import settings

# Of a test that says nothing else. FEW is for scripts/check, and for a second run on another
# Python, which looks for what is different there.
USUAL = 30
FEW = 6
MANY = 1000


def examples(number: int) -> settings:
    """Return the settings of a test that tries NUMBER where others try the usual number."""
    return settings(max_examples=max(1, number * settings().max_examples // USUAL))


def at_most(number: int) -> int:
    """Return NUMBER, or the share of it that a profile with fewer examples wants.

    It is for tests that draw at random without Hypothesis.
    """
    return min(number, max(1, number * settings().max_examples // USUAL))
