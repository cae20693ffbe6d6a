"""The number of examples of a property test: few in every run, many in a long one."""

from __future__ import annotations

from hypothesis import settings

# The default. FEW is for scripts/check, and for the second run on another Python, which looks for
# differences only.
USUAL = 30
FEW = 6
MANY = 1000


def examples(number: int) -> settings:
    """Return the settings of a test with NUMBER examples instead of the default."""
    return settings(max_examples=max(1, number * settings().max_examples // USUAL))
