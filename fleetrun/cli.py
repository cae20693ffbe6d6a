"""The command line: turns arguments into a request, and errors into a line and an exit code."""

# Only sys here, and no syntax newer than Python 3.7: an old Python must reach the message that it
# is too old.
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from fleetrun import __version__, argv, colors, configfile, gone, request, slips
from fleetrun.argv import ParsedCommand
from fleetrun.engines import detect
from fleetrun.errors import EnvironmentFault, FleetrunError, UsageError
from fleetrun.job import launch as start
from fleetrun.model import Layer, Request
from fleetrun.plan.visible import visible
from fleetrun.printing import put
from fleetrun.records import entrance
from fleetrun.records.secrets import Hider
from fleetrun.records.variables import EXEC_OPTIONS
from fleetrun.run.observers import Caller
from fleetrun.suggestions import closest

if TYPE_CHECKING:
    from fleetrun.replay import Replay

Launch = Callable[[Request, Mapping[str, str]], int]

OLDEST_PYTHON = (3, 10)
UNFIT = 3
INTERRUPTED = 130
# 128 + SIGPIPE, as other commands end in `command | head`.
BROKEN_PIPE = 141
# The most letters that differ in a mistyped command, and the least similarity.
_SLIP, _ALIKE = 1, 0.7
# The names of other tools for commands of ours.
_COMMANDS_ELSEWHERE = {
    **dict.fromkeys(("run", "launch", "start"), ""),
    **dict.fromkeys(("list", "ls", "status", "jobs"), "ps"),
    **dict.fromkeys(("kill", "pkill", "killall", "halt", "shutdown", "quit"), "stop"),
    **dict.fromkeys(("cancel", "abort", "terminate"), "stop"),
    **dict.fromkeys(("watch", "monitor"), "top"),
    **dict.fromkeys(("dashboard", "web"), "ui"),
    **dict.fromkeys(("check", "diagnose"), "doctor"),
    **dict.fromkeys(("strategies", "presets"), "strategy list"),
    "tail": "logs",
    "test": "run_check",
    "help": "--help",
    "version": "--version",
}
# One mark of each engine in the table of engines/detect.py, which few launches load.
ENGINE_MARKS = frozenset(
    (
        *("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST"),
        *("PADDLE_TRAINERS", "PADDLE_MASTER", "LSB_JOBID", "PBS_JOBID", "JOB_ID"),
    )
)
COMPLETE_VARIABLE = "_FLEETRUN_COMPLETE"


def main(
    argv: "Sequence[str] | None" = None,
    *,
    environ: "Mapping[str, str] | None" = None,
    launch: "Launch | None" = None,
    caller: "Caller | None" = None,
) -> int:
    """Run the command line ARGV and return its exit code; report to a CALLER in Python."""
    problem = unfit(sys.platform, tuple(sys.version_info[:3]))
    if problem is not None:
        _complain(f"fleetrun: {problem}")
        return UNFIT
    words = sys.argv[1:] if argv is None else list(argv)
    variables = dict(os.environ) if environ is None else environ
    try:
        return _dispatch(words, variables, launch, caller)
    except KeyboardInterrupt:
        return INTERRUPTED
    except MemoryError:
        _complain("fleetrun: There is not enough memory to start: check `ulimit -v` and `free`.")
        return UNFIT
    except BrokenPipeError:
        # The reader (`| head`) has seen enough. Python would complain once more at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        # Not at the top: a launch has it from the one file, and an old Python cannot compile it.

        if not isinstance(error, FleetrunError):
            raise
        return _fail(error, words, variables, caller)


def _fail(
    error: "FleetrunError",
    words: "Sequence[str]",
    environ: "Mapping[str, str]",
    caller: "Caller | None",
) -> int:
    """Print or report ERROR, and return its exit code."""
    # The message may quote the value of any option.
    hide = Hider(environ, words)
    if caller is not None:
        caller.failed(error, hide(str(error)))
        return error.exit_code
    for sentence in getattr(error, "sentences", (str(error),)):
        _complain(f"{_prefix(words, environ)}{visible(hide(sentence))}")
    return error.exit_code


def unfit(platform: str, version: "tuple[int, ...]") -> "str | None":
    """Return why fleetrun cannot run here; None if it can.

    >>> unfit("linux", (3, 9, 2))
    'Python 3.10 or newer is required; this is 3.9.2.'
    """
    if platform != "linux":
        return f"Linux is required to supervise processes; this is {platform}."
    if version < OLDEST_PYTHON:
        oldest, actual = (
            ".".join(map(str, version_tuple)) for version_tuple in (OLDEST_PYTHON, version)
        )
        return f"Python {oldest} or newer is required; this is {actual}."
    return None


def _dispatch(
    words: "list[str]",
    environ: "Mapping[str, str]",
    launch: "Launch | None",
    caller: "Caller | None",
) -> int:
    """Run the subcommand or the launch that the command line names."""
    if COMPLETE_VARIABLE in environ:
        from fleetrun.commands import answers  # only for Tab

        return answers.answer(environ[COMPLETE_VARIABLE])
    if words and _is_command(words[0]):
        from fleetrun.commands import parser

        return parser.run(words[0], words[1:])
    if words in ([], ["--help"], ["-h"], ["--version"]):
        return _answer(words, environ)

    if EXEC_OPTIONS in environ:
        words = [*entrance.options(environ), *words]
    parsed = argv.split(words)
    if parsed.asks("help"):
        return _help(parsed, environ)
    if parsed.asks("version"):
        return _version()
    return _launch(*_resolved(parsed, environ), launch, caller)


def _is_command(word: str) -> bool:
    """Whether WORD names a command."""
    # Most launches begin with an option or the name of a file.
    if not word.isalpha():
        return False
    from fleetrun.commands import COMMANDS

    return word in COMMANDS


def _resolved(
    parsed: "ParsedCommand", environ: "Mapping[str, str]"
) -> "tuple[Request, Mapping[str, str], detect.Detected | None]":
    """Return the request of PARSED, its environment, and the engine that has started us."""
    restored: tuple[tuple[str, str | None], ...] = ()
    layers: Mapping[str, Layer] = {}
    if parsed.asks("from_manifest"):
        again = _replayed(parsed, environ)
        parsed, environ, config = again.parsed, again.environ, again.config
        restored, layers = again.restored, again.layers
    else:
        config = configfile.find(parsed, environ)
    _check_script(parsed)
    detected_engines: list[detect.Detected] = []
    detect_place: Callable[[], detect.Detected] | None = None
    if not ENGINE_MARKS.isdisjoint(environ) and (listed := detect.rows(environ)):

        def detected() -> "detect.Detected":
            detected_engines.append(detect.read(listed, environ, _text))
            return detected_engines[0]

        detect_place = detected
    resolved = request.resolve(parsed, environ, config, layers, detect_place)
    resolved = resolved._replace(typed=parsed.words, restored=restored)
    return resolved, environ, detected_engines[0] if detected_engines else None


def _launch(
    request: "Request",
    environ: "Mapping[str, str]",
    engine: "detect.Detected | None",
    launch: "Launch | None",
    caller: "Caller | None",
) -> int:
    """Launch the job of REQUEST, started by ENGINE if that is not None."""
    if request.hosts or request.hostfile or request.include or request.exclude:
        from fleetrun.remote import head, sshjob

        if request.dry_run is None:
            if caller is not None:
                caller.gathering()
            return head.launch(request, environ)
        request = sshjob.as_listed(request)
    if launch is not None:
        return launch(request, environ)
    if engine is not None and request.dry_run is None:
        if caller is not None:
            caller.gathering()
        from fleetrun.remote import enginelaunch

        return enginelaunch.launch(request, environ, engine, caller)

    return start(request, environ, caller=caller)


def _answer(words: "Sequence[str]", environ: "Mapping[str, str]") -> int:
    """Answer WORDS, for which no table of options is needed."""
    if words == ["--version"]:
        return _version()
    from fleetrun.commands import help as text

    code = text.show("screen", "auto", environ)
    # The exit code of other tools without arguments.
    return code if words else 2


def _version() -> int:
    return put(f"fleetrun {__version__}\n")


def _help(parsed: "ParsedCommand", environ: "Mapping[str, str]") -> int:
    """Show the help text that PARSED requests."""
    from fleetrun.commands import help as text

    given = next(given for given in parsed.settings if given.option.name == "help")
    section = str(given.value())
    # --color may stand behind --help, where nothing is looked at otherwise.
    choice = colors.choice([word for word in parsed.words if word != given.typed])
    return text.show(section, choice, environ)


def _prefix(words: "Sequence[str]", environ: "Mapping[str, str]") -> str:
    """Return the prefix of an error, coloured if requested."""
    is_coloured = colors.on_stream(colors.choice(words), environ, sys.stderr)
    return colors.prefix(is_coloured=is_coloured, is_fault=True)


def _replayed(parsed: ParsedCommand, environ: Mapping[str, str]) -> "Replay":
    """Return the launch of the manifest that PARSED names, from inside its folder."""
    from fleetrun import replay

    again = replay.replay(parsed, environ)
    try:
        os.chdir(again.cwd)
    except OSError as error:
        raise EnvironmentFault(
            f"The manifest's folder {again.cwd} cannot be entered ({error.strerror})."
        ) from None
    noted = again.parsed._replace(notes=(*again.parsed.notes, *again.notes))
    return again._replace(parsed=noted)


def _check_script(parsed: "ParsedCommand") -> None:
    """Refuse a missing script that looks like the rest of an option."""
    if parsed.script is None:
        return
    target = parsed.script.target
    if parsed.script.form != "file":
        if "/" in target:
            raise UsageError(f"-m {target}: that is a path, not a module: leave -m out.")
        if len(target.split()) > 1:
            raise UsageError(
                f'-m "{target}": quotation marks make it one word: leave them out: -m {target}.'
            )
        if target.endswith(".ipynb"):
            raise UsageError(f"-m {target}: that is a notebook, not a module: leave -m out.")
        if target.endswith(".py") and os.path.exists(target):
            # Python would run it while it looks for a module `py` in it, and fail then.
            raise UsageError(
                f"-m {target}: a module's name has no .py: write {target} without -m, or "
                f"-m {target[:-3]}."
            )
        return
    if not os.path.exists(target):
        mistake = argv.mistaken_script(parsed) or _slip(target)
        if mistake is not None:
            raise UsageError(mistake)
    first = len(parsed.words) - len(parsed.script.args) - 1
    is_meant = first > 0 and parsed.words[first - 1] == "--"
    if target.isalpha() and not is_meant:
        _check_command(target, parsed.script.args)


def _slip(target: str) -> "str | None":
    """Return what was meant by TARGET, which does not exist, if a keyboard has changed it."""
    plain = slips.plain(target)
    if plain != target and os.path.exists(plain):
        return f"there is no script {target}; without full-width characters there is {plain}."
    words = target.split()
    if len(words) > 1 and (os.path.exists(words[0]) or _is_program(words[0])):
        return (
            f'"{target}" is taken as the script, because quotation marks make it one word: '
            f"leave them out: {target}."
        )
    return None


def _is_program(name: str) -> bool:
    """Whether this folder has a file NAME, or a shell would find the program."""
    return os.path.isfile(name) or any(
        os.access(f"{folder}/{name}", os.X_OK) for folder in os.get_exec_path()
    )


def _check_command(word: str, rest: "Sequence[str]") -> None:
    """Refuse WORD, followed by REST, if it is nearly a command of ours or one of other launchers.

    A program of that name hardly trains; `fleetrun -- kill` runs it.
    """
    from fleetrun.commands import COMMANDS

    gone.refuse(word, f"fleetrun {word}", gone.COMMANDS)
    meant = _COMMANDS_ELSEWHERE.get(word)
    if meant is None:
        # Most programs are unlike any command, and skip the search.
        near = [
            command
            for command in COMMANDS
            if abs(len(command) - len(word)) <= _SLIP
            and (command[0] == word[0] or command[-1] == word[-1])
        ]
        if near:
            plural = [name for name in near if name in {f"{word}s", word.removesuffix("s")}]
            # `true` is like `tune`, and a program.
            meant = closest(word, plural if _is_program(word) else near, _ALIKE)
    if meant is not None:
        if word == "help":
            meant, rest = (rest[0] if rest and rest[0] in COMMANDS else ""), ("--help",)
        elif meant == "stop":
            rest = [name for name in rest if not name.startswith("-")]  # as in `kill -9`
        instead = " ".join(("fleetrun", *([meant, *rest] if meant else rest or ["train.py"])))
        raise UsageError(
            f"there is no command {word}; did you mean `{instead}`? "
            f"`fleetrun -- {word}` runs a program of that name."
        )


def _text(path: str) -> str:
    """Return the text of the file PATH."""
    with open(path, encoding="utf-8") as file:
        return file.read()


def _complain(text: str) -> None:
    """Print an error on standard error; if that is closed, the exit code must do."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(text, file=sys.stderr, flush=True)
