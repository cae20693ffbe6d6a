"""The options that `fleetrun exec` gives to the launches below it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from fleetrun.rundir.variables import EXEC_OPTIONS


def options(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the options that `fleetrun exec` was given, as words of a command line."""
    text = environ.get(EXEC_OPTIONS)
    if not text:
        return ()
    words = json.loads(text)
    return tuple(map(str, words))
