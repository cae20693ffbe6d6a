"""Command lines whose script is hardly meant as one: the rest of an option, or a command."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from fleetrun import text
from fleetrun.cli import elsewhere
from fleetrun.cli.argv import QUOTES, ParsedCommand
from fleetrun.cli.options import BY_SPELLING
from fleetrun.errors import UsageError
from fleetrun.model import Given

# The most letters that differ in a mistyped command, and the least similarity.
_SLIP, _ALIKE = 1, 0.7


def refuse(parsed: ParsedCommand, commands: Iterable[str]) -> None:
    """Raise UsageError if the script of PARSED is hardly one; COMMANDS are those of fleetrun."""
    if parsed.script is None:
        return
    target, args = parsed.script.target, parsed.script.args
    if parsed.script.form == "module":
        problem = _no_module(target)
        if problem is not None:
            raise UsageError(f"-m {target}: {problem}")
        return
    if not os.path.exists(target):
        problem = (
            _misspelt(target)
            or _assigned(target)
            or _rest_of_option(parsed.given[-1:], target, args)
        )
        if problem is not None:
            raise UsageError(problem)
    first = len(parsed.words) - len(args) - 1
    is_meant = first > 0 and parsed.words[first - 1] == "--"
    if target.isalpha() and not is_meant:
        _refuse_command(target, args, tuple(commands))


def _no_module(target: str) -> str | None:
    """Return why TARGET after -m is no module, or None."""
    if "/" in target:
        return "that is a path, not a module: leave -m out."
    if len(target.split()) > 1:
        return f"quotation marks make it one word: leave them out: -m {target}."
    if target.endswith(".ipynb"):
        return f"that is a notebook, not a module: run `jupyter nbconvert --to script {target}`."
    if target.endswith(".py") and os.path.exists(target):
        # Python would run it while it looks for a module `py` in it, and fail then.
        return f"a module's name has no .py: write {target} without -m, or -m {target[:-3]}."
    return None


def _misspelt(target: str) -> str | None:
    """Return how TARGET, which is taken as the script, differs from what was meant, or None."""
    taken, words = f'"{target}" is taken as the script', target.split()
    unquoted, plain = target.strip(QUOTES), text.without_slips(target)
    if unquoted != target and unquoted.startswith("--"):
        return f"{taken}, because its quotation marks are part of it: write {unquoted}."
    if target.startswith(tuple(text.LONG_DASHES)):
        meant = text.option_without_slips(target)
        return f"{taken}, because it starts with a long dash: write two hyphens, {meant}."
    if target.strip() != target:
        return f"{taken}, with its blank: write {target.strip()}."
    if plain != target and os.path.exists(plain):
        return f"there is no script {target}; without full-width characters there is {plain}."
    if len(words) > 1 and (target.startswith("-") or ".py" in target or _is_program(words[0])):
        return f"{taken}, because quotation marks make it one word: leave them out: {target}."
    return None


def _assigned(target: str) -> str | None:
    """Return that TARGET is an option without hyphens, or a variable, or None."""
    name, equals, _ = target.partition("=")
    if equals and name.replace("-", "_") in BY_SPELLING:
        return f'"{target}" is taken as the script: write --{target}.'
    if equals and name.isidentifier() and name.isupper():
        return f'"{target}" is taken as the script: write --env {target} for a variable of ranks.'
    return None


def _is_program(name: str) -> bool:
    """Whether this folder has a file NAME, or a shell would find the program."""
    return os.path.isfile(name) or any(
        os.access(f"{folder}/{name}", os.X_OK) for folder in os.get_exec_path()
    )


def _rest_of_option(given: Sequence[Given], target: str, args: Sequence[str]) -> str | None:
    """Return that TARGET and ARGS continue the value of GIVEN, the last option, or None."""
    if not given or given[0].name not in BY_SPELLING:
        return None
    last, option = given[0], BY_SPELLING[given[0].name]
    value = ""
    is_measure = option.kind.name == "duration" or option.metavar == "SIZE"
    if is_measure and target.isalpha() and last.raw[-1:].isdigit():
        value = f"{last.raw}{target}" if option.is_readable(last.raw + target) else ""
    elif option.kind.name == "list" and _is_listed(target):
        values = [last.raw]
        for word in (target, *args):
            if not _is_listed(word):
                break
            values.append(word)
        value = ",".join(",".join(values).replace(",", " ").split())
    if not value:
        return None
    return (
        f'"{target}" is taken as the script, because {last.typed} ends at the space: '
        f"write {last.typed}={value}."
    )


def _is_listed(word: str) -> bool:
    """Whether WORD looks like another item of a list: numbers or addresses."""
    return word[:1].isdigit() and not word.strip("0123456789,.-")


def _refuse_command(word: str, rest: Sequence[str], commands: Sequence[str]) -> None:
    """Refuse WORD, followed by REST, if it is nearly a command of ours or one of other launchers.

    A program of that name hardly trains; `fleetrun -- kill` runs it.
    """
    elsewhere.refuse_gone(word, f"fleetrun {word}", elsewhere.GONE_COMMANDS)
    meant = elsewhere.COMMANDS.get(word)
    if word == "help":
        meant, rest = (rest[0] if rest and rest[0] in commands else ""), ("--help",)
    elif meant is None:
        # Most programs are unlike any command, and skip the search.
        near = [
            command
            for command in commands
            if abs(len(command) - len(word)) <= _SLIP
            and (command[0] == word[0] or command[-1] == word[-1])
        ]
        if _is_program(word):
            # `true` is like `tune`.
            near = [name for name in near if name in {f"{word}s", word.removesuffix("s")}]
        meant = text.closest(word, near, _ALIKE)
    if meant is None:
        return
    if meant == "stop":
        rest = [name for name in rest if not name.startswith("-")]  # as in `kill -9`
    instead = " ".join(("fleetrun", *([meant, *rest] if meant else rest or ["train.py"])))
    raise UsageError(
        f"there is no command {word}; did you mean `{instead}`? "
        f"`fleetrun -- {word}` runs a program of that name."
    )
