"""The command of a rank: how the script is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fleetrun.model import Facts, Request


def argv(request: Request, facts: Facts) -> tuple[str, ...]:
    """Return the command line of every rank; what follows the script stays as typed."""
    script = request.script
    coverage: tuple[str, ...] = ()
    if facts.environ.get("WITH_COVERAGE") == "ON":
        coverage = ("-m", "coverage", "run", "--branch", "-p")
    if script.form == "module":
        # Not buffered, so that a log is complete up to the moment of a crash.
        return (facts.python, "-u", *coverage, "-m", script.target, *script.args)
    if script.target.endswith(".py"):
        return (facts.python, "-u", *coverage, script.target, *script.args)
    if script.target.endswith(".pyxes"):
        return (facts.python, script.target, *script.args)
    return (facts.program or script.target, *script.args)
