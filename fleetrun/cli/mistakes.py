"""Command lines whose script is hardly meant as one: the rest of an option, or a command."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

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
    if parsed.script is None or parsed.script_at is None:
        return
    form, target, args = parsed.script
    if form == "module":
        for problem in _no_module(target):
            raise UsageError(f"-m {target}: {problem}")
        return
    if not os.path.exists(target):
        last = parsed.given[-1:]
        for problem in (*_misspelt(target), *_rest_of_option(last, target, args)):
            raise UsageError(problem)
    is_meant = parsed.words[parsed.script_at - 1 : parsed.script_at] == ("--",)
    if target.isalpha() and not is_meant:
        _refuse_command(target, args, tuple(commands))


def _no_module(target: str) -> Iterator[str]:
    """Yield why TARGET after -m is no module."""
    if "/" in target:
        yield "that is a path, not a module: leave -m out."
    if len(target.split()) > 1:
        yield f"quotation marks make it one word: leave them out: -m {target}."
    if target.endswith(".ipynb"):
        yield f"that is a notebook, not a module: run `jupyter nbconvert --to script {target}`."
    if target.endswith(".py") and os.path.exists(target):
        # Python would run it while it looks for a module `py` in it, and fail then.
        yield f"a module's name has no .py: write {target} without -m, or -m {target[:-3]}."


def _misspelt(target: str) -> Iterator[str]:
    """Yield how TARGET, which is taken as the script, differs from what was meant."""
    taken, words = f'"{target}" is taken as the script', target.split()
    unquoted, plain = target.strip(QUOTES), text.without_slips(target)
    if unquoted != target and unquoted.startswith("--"):
        yield f"{taken}, because its quotation marks are part of it: write {unquoted}."
    if target.startswith(tuple(text.LONG_DASHES)):
        meant = text.option_without_slips(target)
        yield f"{taken}, because it starts with a long dash: write two hyphens, {meant}."
    if target.strip() != target:
        yield f"{taken}, with its blank: write {target.strip()}."
    if plain != target and os.path.exists(plain):
        yield f"there is no script {target}; without full-width characters there is {plain}."
    if len(words) > 1 and (target.startswith("-") or ".py" in target or _is_program(words[0])):
        yield f"{taken}, because quotation marks make it one word: leave them out: {target}."
    name, equals, _ = target.partition("=")
    if equals and name.replace("-", "_") in BY_SPELLING:
        yield f"{taken}: write --{target}."
    if equals and name.isidentifier() and name.isupper():
        yield f"{taken}: write --env {target} for a variable of ranks."


def _is_program(name: str) -> bool:
    """Whether this folder has a file NAME, or a shell would find the program."""
    return os.path.isfile(name) or any(
        os.access(f"{folder}/{name}", os.X_OK) for folder in os.get_exec_path()
    )


def _rest_of_option(given: Sequence[Given], target: str, args: Sequence[str]) -> Iterator[str]:
    """Yield that TARGET and ARGS continue the value of GIVEN, the last option."""
    for last in given:
        option = BY_SPELLING[last.name]
        value = ""
        is_measure = option.kind.name == "duration" or option.metavar == "SIZE"
        if is_measure and target.isalpha() and last.raw[-1:].isdigit():
            with suppress(UsageError):
                option.read(last._replace(raw=last.raw + target))
                value = last.raw + target
        elif option.kind.name == "list" and _is_listed(target):
            values = [last.raw]
            for word in (target, *args):
                if not _is_listed(word):
                    break
                values.append(word)
            value = ",".join(",".join(values).replace(",", " ").split())
        if value:
            yield (
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
