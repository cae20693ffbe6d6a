"""`fleetrun exec`: runs a command, and launches where it would start Paddle's launcher."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys

import click

from fleetrun.cli import parser
from fleetrun.cli.options import find
from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.model import Given, flag
from fleetrun.plan.environment import with_island
from fleetrun.rundir.variables import EXEC, EXEC_OPTIONS

# Options that do not concern a launch, or only make sense in the command typed.
_NOT_HERE = ("version", "dry_run", "detach")
# Options that name files; the command may run in another folder.
_PATHS = ("config", "hostfile", "log_dir")


def _exec(launch: parser.Launch) -> int:
    """Become the command."""
    words = launch.script[1:] if launch.script[:1] == ("--",) else launch.script
    if not words:
        raise UsageError(
            "exec: give the command to run: `fleetrun exec [options] COMMAND [its arguments]`."
        )
    defaults = [_as_word(setting) for setting in launch.options]
    program = shutil.which(words[0])
    if program is None:
        raise UsageError(
            f"exec: {words[0]} is not a program that can be run: give one that is on the PATH, "
            "or its path."
        )
    environ = dict(os.environ)
    outer = json.loads(environ.get(EXEC_OPTIONS) or "[]")
    environ[EXEC] = sys.executable
    environ[EXEC_OPTIONS] = json.dumps([*outer, *defaults])
    environ["PYTHONPATH"] = with_island(environ.get("PYTHONPATH"))
    # Python ignores these two, and the program would inherit that.
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    try:
        os.execve(program, words, environ)  # noqa: S606 - what the user asks for
    except OSError as error:
        raise EnvironmentFault(f"exec: {program} cannot be run ({error.strerror}).") from None


def _as_word(given: Given) -> str:
    """Return GIVEN as a word of a command line that is valid in every folder."""
    option, raw = find(given.name), given.raw
    if option.label in _NOT_HERE:
        raise UsageError(f"exec: {given.typed} cannot be the default of launches; leave it out.")
    option.read(given)
    if option.label in _PATHS:
        raw = os.path.abspath(raw)
    elif option.label == "strategy":
        # Presets are names, not files here.
        parts = raw.split(",")
        raw = ",".join(os.path.abspath(part) if os.path.exists(part) else part for part in parts)
    return f"{flag(given.spelling)}={raw}"


command = parser.LaunchCommand(
    "exec",
    help="Run COMMAND. Wherever it starts Paddle's launcher (python -m "
    "paddle.distributed.launch, Paddle's own fleetrun, a call of launch()), fleetrun launches "
    "instead, with the launch options as defaults. The exit code, signals and output are those "
    "of COMMAND.",
    options_metavar="[LAUNCH OPTIONS] COMMAND [ARGUMENTS]...",
    callback=click.pass_obj(_exec),
)
