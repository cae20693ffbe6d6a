"""Messages for scripts that call functions which this Paddle lacks."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys, types
sys.modules["paddle"] = types.SimpleNamespace(__version__="3.3.1")
from fleetrun.inject.static import refusals
refusals.explain_older_programs()
raise TypeError({error!r})
"""


def end(error: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(error=error)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    return done.stderr.splitlines()


def test_a_script_that_calls_what_older_programs_lack_is_told_after_its_traceback() -> None:
    error = "(InvalidType) matmul(): argument (position 1) must be Value, but got Variable"
    *_, last, told = end(error)
    assert last == f"TypeError: {error}"
    assert told == (
        "fleetrun: Paddle 3.3.1 cannot build this in its older program representation, which "
        "static fleet needs and which lacks paddle.matmul."
    )


def test_other_errors_end_as_ever() -> None:
    assert end("no")[-1] == "TypeError: no"
