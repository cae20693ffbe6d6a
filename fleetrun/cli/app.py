"""The command `fleetrun`: a launch, or one of the commands; and an error as a line and a code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from fleetrun import __version__
from fleetrun.cli import parser
from fleetrun.cli.argv import split
from fleetrun.cli.launch import ResolvedLaunch, resolve
from fleetrun.cli.options import find
from fleetrun.errors import EnvironmentFault, FleetrunError, UsageError
from fleetrun.model import Request
from fleetrun.printing import AUTO, color_choice, is_colored_stream, message_prefix, put
from fleetrun.run import job
from fleetrun.run.observers import Caller
from fleetrun.rundir import entrance
from fleetrun.rundir.secrets import Hider
from fleetrun.rundir.variables import COMPLETE, EXEC_OPTIONS
from fleetrun.text import visible

Launch = Callable[[Request, Mapping[str, str]], int]

INTERRUPTED = 130
# 128 + SIGPIPE, as other commands end in `command | head`.
BROKEN_PIPE = 141


def main(
    argv: Sequence[str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    launch: Launch | None = None,
    caller: Caller | None = None,
) -> int:
    """Run the command line ARGV and return its exit code; report to a CALLER in Python."""
    given = sys.argv[1:] if argv is None else list(argv)
    variables = dict(os.environ) if environ is None else environ
    try:
        return _dispatch(given, variables, launch, caller)
    except KeyboardInterrupt:
        return INTERRUPTED
    except MemoryError:
        _complain("fleetrun: There is not enough memory to start: check `ulimit -v` and `free`.")
        return EnvironmentFault.exit_code
    except BrokenPipeError:
        # The reader (`| head`) has seen enough. Python would complain once more at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except FleetrunError as error:
        return _fail(error, given, variables, caller)


def _fail(
    error: FleetrunError, given: list[str], environ: Mapping[str, str], caller: Caller | None
) -> int:
    """Print or report ERROR, and return its exit code."""
    # The message may quote the value of any option.
    hide = Hider(environ, given)
    if caller is not None:
        caller.failed(error, hide(str(error)))
        return error.exit_code
    is_coloured = is_colored_stream(color_choice(given), environ, sys.stderr)
    prefix = message_prefix(is_coloured=is_coloured, is_fault=True)
    for sentence in getattr(error, "sentences", (str(error),)):
        _complain(f"{prefix}{visible(hide(sentence))}")
    return error.exit_code


def _dispatch(
    given: list[str], environ: Mapping[str, str], launch: Launch | None, caller: Caller | None
) -> int:
    """Run the command or the launch of the command line GIVEN."""
    if COMPLETE in environ:
        from fleetrun.cli import shells  # only for Tab

        return shells.answer(environ[COMPLETE])
    if given and given[0] in parser.COMMANDS:
        return parser.run(given[0], given[1:])
    if not given:
        from fleetrun.cli import help as help_page

        help_page.show("screen", AUTO, environ)
        # The exit code of other tools without arguments.
        return UsageError.exit_code
    if EXEC_OPTIONS in environ:
        given = [*entrance.options(environ), *given]
    parsed = split(given)
    if parsed.asks("help"):
        asked = next(item for item in parsed.given if item.name == "help")
        # --color may stand behind --help, where nothing is looked at otherwise.
        rest = [word for word in given if word != asked.typed]
        from fleetrun.cli import help as help_page

        return help_page.show(str(find("help").read(asked)), color_choice(rest), environ)
    if parsed.asks("version"):
        return put(f"fleetrun {__version__}\n")
    return _start(resolve(parsed, environ), launch, caller)


def _start(resolved: ResolvedLaunch, launch: Launch | None, caller: Caller | None) -> int:
    """Start the job of RESOLVED, on other hosts by ssh if it names them."""
    request, environ, engine = resolved
    if request.hosts or request.hostfile:
        from fleetrun.remote import head, sshjob  # only for jobs by ssh

        if request.dry_run is None:
            if caller is not None:
                caller.gathering()
            return head.launch(request, environ)
        request = sshjob.as_listed(request)
    if launch is not None:
        return launch(request, environ)
    if engine is not None and request.dry_run is None:
        from fleetrun.remote import enginelaunch  # only below an engine

        if caller is not None:
            caller.gathering()
        return enginelaunch.launch(request, environ, engine, caller)
    return job.launch(request, environ, caller=caller)


def _complain(text: str) -> None:
    """Print an error on standard error; if that is closed, the exit code must do."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(text, file=sys.stderr, flush=True)
