"""Commands that run another part of fleetrun as a separate process."""

from __future__ import annotations

import os
import sys

import fleetrun


def command(code: str) -> list[str]:
    """Return the command that runs CODE with this Python and this fleetrun.

    The job's folder is not on its path: modules there may have the same names as ours.
    """
    house = os.path.dirname(os.path.dirname(os.path.abspath(fleetrun.__file__)))
    return [sys.executable, "-c", f"import sys; sys.path[0] = {house!r}; {code}"]
