"""The command of a rank: how the script is started."""

from __future__ import annotations

import os

from fleetrun.model import Facts, Request, Script

# Paddle's check of its installation, which Paddle's launcher accepts in place of a script.
CHECK = "run_check"
_CHECKER = os.path.join(os.path.dirname(os.path.dirname(__file__)), "inject", "run_check.py")


# The endings of files that Python runs: scripts, archives (zipapp), and Paddle's own kind.
ENDINGS = (".py", ".pyz", ".pyxes")


def is_python(script: Script) -> bool:
    """Whether Python runs SCRIPT, as far as we start it."""
    return script.form == "module" or script.target == CHECK or script.target.endswith(ENDINGS)


def argv(request: Request, facts: Facts) -> tuple[str, ...]:
    """Return the command line of a rank; the script's arguments are unchanged."""
    script = request.script
    # Python would take a name that starts with a hyphen for an option of its own.
    path = f"./{script.target}" if script.target.startswith("-") else script.target
    if script.form == "file" and script.target == CHECK:
        return (facts.python, "-u", _CHECKER)
    coverage = ("-m", "coverage", "run", "--branch", "-p")
    before = coverage if facts.environ.get("WITH_COVERAGE") == "ON" else ()
    if script.form == "module":
        # Unbuffered, so that a log is complete up to a crash.
        return (facts.python, "-u", *before, "-m", script.target, *script.args)
    if script.target.endswith((".py", ".pyz")):
        return (facts.python, "-u", *before, path, *script.args)
    if script.target.endswith(".pyxes"):
        return (facts.python, path, *script.args)
    return (facts.program or script.target, *script.args)
