"""From the words of a launch to its request, and what is hardly a script."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fleetrun.cli import configfile, gone, request
from fleetrun.cli.argv import ParsedCommand, mistaken_script
from fleetrun.cli.parser import COMMANDS
from fleetrun.engines import detect
from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.model import Layer, Request
from fleetrun.text import closest, without_slips
from fleetrun.yamlfile import text_of

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


class ResolvedLaunch(NamedTuple):
    """A request, with the environment that it was made from, and the engine that started us."""

    request: Request
    environ: Mapping[str, str]
    engine: detect.Detected | None = None


def resolve(parsed: ParsedCommand, environ: Mapping[str, str]) -> ResolvedLaunch:
    """Return the request of PARSED in ENVIRON; UsageError if it is not valid."""
    restored: tuple[tuple[str, str | None], ...] = ()
    layers: Mapping[str, Layer] = {}
    if parsed.asks("from_manifest"):
        from fleetrun.cli import replay  # reads manifests

        again = replay.replay(parsed, environ)
        _enter(again.cwd)
        parsed = again.parsed._replace(notes=(*again.parsed.notes, *again.notes))
        environ, file = again.environ, again.config
        restored, layers = again.restored, again.layers
    else:
        file = configfile.find(parsed.given, environ)
    check_script(parsed)
    listed = detect.rows(environ)
    engine: list[detect.Detected] = []

    def detected() -> detect.Detected:
        engine.append(detect.read(listed, environ, lambda path: text_of(path, "the list of hosts")))
        return engine[0]

    made = request.resolve(parsed, environ, file, layers, detected if listed else None)
    given = configfile.beside(file, parsed.given)
    made = made._replace(typed=parsed.words, given=given, restored=restored)
    return ResolvedLaunch(made, environ, engine[0] if engine else None)


def _enter(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError as error:
        raise EnvironmentFault(
            f"The manifest's folder {folder} cannot be entered ({error.strerror})."
        ) from None


# -- what is hardly a script ----------------------------------------------------------------------


def check_script(parsed: ParsedCommand) -> None:
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
        mistake = mistaken_script(parsed) or _slip(target)
        if mistake is not None:
            raise UsageError(mistake)
    first = len(parsed.words) - len(parsed.script.args) - 1
    is_meant = first > 0 and parsed.words[first - 1] == "--"
    if target.isalpha() and not is_meant:
        _check_command(target, parsed.script.args)


def _slip(target: str) -> str | None:
    """Return what was meant by TARGET, which does not exist, if a keyboard has changed it."""
    plain = without_slips(target)
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


def _check_command(word: str, rest: Sequence[str]) -> None:
    """Refuse WORD, followed by REST, if it is nearly a command of ours or one of other launchers.

    A program of that name hardly trains; `fleetrun -- kill` runs it.
    """
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
