"""The command `fleetrun`: a launch, or one of the commands; and an error as a line and a code."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from fleetrun import __version__
from fleetrun.cli import configfile, parser, request
from fleetrun.cli import help as help_page
from fleetrun.cli.argv import ParsedCommand, split
from fleetrun.cli.elsewhere import refuse_mistaken
from fleetrun.cli.options import BY_SPELLING, find
from fleetrun.engines import detect
from fleetrun.errors import FleetrunError, UsageError
from fleetrun.model import Request
from fleetrun.printing import put, remark
from fleetrun.run.observers import Caller
from fleetrun.rundir.secrets import Hider
from fleetrun.rundir.variables import COMPLETE, EXEC_OPTIONS

Launch = Callable[[Request, Mapping[str, str]], int]


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
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader (`| head`) has seen enough. Python would complain once more at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except FleetrunError as error:
        # The message may quote the value of any option.
        hide = Hider(variables, given)
        if caller is not None:
            caller.report(error=type(error).__name__, message=hide(str(error)))
            return error.exit_code
        for sentence in error.args:
            remark(hide(sentence))
        return error.exit_code


def _dispatch(
    given: list[str], environ: Mapping[str, str], launch: Launch | None, caller: Caller | None
) -> int:
    """Run the command or the launch of the command line GIVEN."""
    if COMPLETE in environ:
        from fleetrun.cli import shells  # a launch needs none of it

        return shells.answer(environ[COMPLETE])
    if given and given[0] in parser.COMMANDS:
        return parser.run(given)
    if not given:
        help_page.show("screen", environ)
        # The exit code of other tools without arguments.
        return UsageError.exit_code
    # Those of `fleetrun exec` above come first.
    parsed = split([*json.loads(environ.get(EXEC_OPTIONS) or "[]"), *given])
    if parsed.script is None:
        last = parsed.given[-1]
        if last.name == "help":
            return help_page.show(str(find("help").read(last)), environ)
        return put(f"fleetrun {__version__}\n")
    return _launch(parsed, environ, launch, caller)


def _launch(
    parsed: ParsedCommand,
    environ: Mapping[str, str],
    launch: Launch | None,
    caller: Caller | None,
) -> int:
    """Start the job that PARSED requests, on other hosts by ssh if it names them."""
    assert parsed.script is not None
    is_after_dashes = parsed.words[(parsed.script_at or 0) - 1] == "--"
    refuse_mistaken(parsed.script, BY_SPELLING, parser.COMMANDS, is_after_dashes=is_after_dashes)
    listed = detect.rows(environ)
    engine: list[detect.Detected] = []

    def detected() -> detect.Detected:
        engine.append(detect.read(listed, environ))
        return engine[0]

    file = configfile.find(parsed.given)
    made = request.resolve(parsed, environ, file, detected if listed else None)
    if made.hosts or made.hostfile:
        from fleetrun.remote import head  # only for jobs by ssh

        if caller is not None:
            caller.report()
        return head.launch(made, environ)
    if launch is not None:
        return launch(made, environ)
    if engine and made.dry_run is None:
        from fleetrun.remote import tasks  # only below an engine

        if caller is not None:
            caller.report()
        return tasks.launch(made, environ, engine[0], caller)
    from fleetrun.run import job  # takes longer than all of the help

    return job.launch(made, environ, caller=caller)
