"""Splits a command line into our options and the user's script; pure but for mistaken scripts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fleetrun import text
from fleetrun.cli import elsewhere
from fleetrun.cli.option import Option, by_spelling
from fleetrun.cli.options import BY_SPELLING, KNOWN
from fleetrun.errors import UsageError
from fleetrun.model import Given, Script, flag

# Fewer letters are more likely a typing error than an abbreviation.
_SHORTEST_PREFIX = 4
# The least similarity of a mistyped command.
_ALIKE = 0.8
# Options that no script of Paddle's suites has itself.
_OF_LAUNCHERS = ("cluster_node_ips", "hostfile", "ips", "max_restart", "nnodes", "nproc_per_node")
# Options that end the command line: nothing after them is read.
_ENDING = ("help", "version")
# What no script's name begins with, but a mistyped option does.
_OF_OPTIONS = ("-", "'", '"', "\u2018", "\u201c", *text.LONG_DASHES)


class ParsedCommand(NamedTuple):
    """A parsed command line: our options in order, and the script with its arguments untouched.

    `script_at` is where the script starts (None: there is none yet); `pending` is a last option
    that still lacks its value.
    """

    given: tuple[Given, ...]
    script: Script | None = None
    notes: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    script_at: int | None = None
    pending: Option | None = None

    def asks(self, name: str) -> bool:
        """Whether the option NAME was given."""
        return any(given.name == name for given in self.given)

    def refuse_pending(self) -> None:
        """Raise UsageError if the last option lacks its value."""
        if self.pending is not None:
            raise UsageError(f"{self.words[-1]} needs a value: {self.pending.wanted}")


def split(words: Sequence[str]) -> ParsedCommand:
    """Split WORDS into options and script; UsageError for an unknown option before the script.

    >>> parsed = split(["--gpus=0,1", "train.py", "--gpus=2", "--", ""])
    >>> [(given.name, given.spelling, given.raw) for given in parsed.given]
    [('devices', 'gpus', '0,1')]
    >>> parsed.script
    Script(form='file', target='train.py', args=('--gpus=2', '--', ''))
    """
    parsed = scan(words)
    parsed.refuse_pending()
    if parsed.script_at is not None:
        script = _script(words[parsed.script_at :])
        return parsed._replace(script=script, notes=(*parsed.notes, *_misplaced(script)))
    # A manifest contains the script.
    if any(given.name in (*_ENDING, "from_manifest") for given in parsed.given):
        return parsed
    hint = "write `fleetrun [options] train.py [its arguments]`, or see `fleetrun --help`."
    for given in parsed.given[-1:]:
        if given.raw.endswith(".py"):
            hint = f"{given.typed} has taken {given.raw} as its value; "
            hint += f"write {given.typed}=VALUE {given.raw}."
    raise UsageError(f"no script to run: {hint}")


def _script(words: Sequence[str]) -> Script:
    """Return the script that WORDS start with, and its arguments as they are."""
    first, rest = words[0], tuple(words[1:])
    if not first:
        raise UsageError("the script name is empty; is a variable unset?")
    if first == "run_check" and rest:
        raise UsageError(
            "run_check is Paddle's check of its installation and takes nothing after it; for a "
            "file of that name write ./run_check."
        )
    if first != "-m":
        return Script("file", first, rest)
    if not rest:
        raise UsageError("-m needs a module: write `fleetrun [options] -m package.module`.")
    if not rest[0]:
        raise UsageError("-m: the module's name is empty; is a variable unset?")
    return Script("module", rest[0], rest[1:])


def _misplaced(script: Script) -> Iterable[str]:
    """Yield a note for each argument of SCRIPT that only launchers take."""
    for word in script.args:
        name = word.partition("=")[0].lstrip("-").replace("-", "_")
        if word.startswith("-") and name in _OF_LAUNCHERS:
            yield (
                f"{word} comes after {script.target}, so the script gets it; put fleetrun's "
                "options before the script."
            )


def refused(words: Sequence[str], message: str) -> str | None:
    """Return the first of WORDS, a script's arguments, that is our option and that MESSAGE names.

    >>> refused(["--lr=1", "--gpus", "0"], "error: unrecognized arguments: --gpus 0")
    '--gpus'
    """
    for word in words:
        typed = word.partition("=")[0]
        name = typed.lstrip("-").replace("-", "_")
        if word.startswith("-") and name in BY_SPELLING and typed in message:
            return typed
    return None


# -- our options ---------------------------------------------------------------------------------


def scan(words: Sequence[str], table: Iterable[Option] = KNOWN) -> ParsedCommand:
    """Read the options of TABLE at the head of WORDS; UsageError for an unknown one."""
    names = by_spelling(table)
    given: list[Given] = []
    notes: list[str] = []
    script_at: int | None = None
    pending: Option | None = None
    at = 0
    while at < len(words) and not (given and given[-1].name in _ENDING):
        word = words[at]
        fault = text.blank_fault(word)
        if fault is not None:
            raise UsageError(f'"{word}": {fault}')
        if word == "-m" or not word.startswith("-"):
            script_at = at
            break
        at += 1
        if word == "--":
            script_at = at if at < len(words) else None
            break
        typed, equals, raw = word.partition("=")
        following = words[at] if at < len(words) else None
        name = "help" if word == "-h" else _named(typed, names, notes, raw or following or "")
        option = names[name]
        if not equals and following is None and option.bare is None:
            pending = option
            break
        if not equals:
            raw = _value_after(option, typed, following or "")
            at += following is not None and option.takes_next(following)
        given.append(option.given(raw, typed, spelling=name))
    return ParsedCommand(tuple(given), None, tuple(notes), tuple(words), script_at, pending)


def _value_after(option: Option, typed: str, word: str) -> str:
    """Return the value of OPTION, which was TYPED without one, before WORD."""
    # `--set =5` lacks its key instead.
    if word.startswith("=") and not option.is_pair:
        meant = word[1:] or "VALUE"
        raise UsageError(f"{typed} ends at the space before {word}: write {typed}={meant}.")
    if option.takes_next(word):
        return word
    if option.bare is None:
        raise UsageError(
            f"{typed} needs a value, and {word} looks like an option: write {typed}=VALUE. "
            "Without devices, leave the option out: fleetrun then trains on the CPU."
            if option.label == "devices"
            else f"{typed} needs a value, and {word} looks like an option: write {typed}=VALUE."
        )
    return option.bare


def _named(typed: str, names: dict[str, Option], notes: list[str], value: str) -> str:
    """Return the spelling that TYPED means, completely or by a unique prefix; VALUE follows it."""
    missing = f"no such option: {typed}"
    if text.without_slips(typed) != typed:
        meant = text.option_without_slips(typed)
        raise UsageError(f"{missing}; it has full-width characters or long dashes: write {meant}.")
    name = typed[2:].replace("-", "_") if typed.startswith("--") else ""
    if name in names:
        return name
    elsewhere.refuse_gone(name, typed)
    starting = sorted(known for known in names if name and known.startswith(name))
    if f"{name}s" in starting:
        # Rather than other options with this prefix.
        starting = [f"{name}s"]
    if len({names[known].label for known in starting}) == 1 and len(name) >= _SHORTEST_PREFIX:
        label = names[starting[0]].label
        full = label if label in starting else starting[0]
        notes.append(f"{typed} is read as {flag(full)}.")
        return full
    if len(starting) == 1:
        raise UsageError(f"{missing}; did you mean --{starting[0]}?")
    if starting:
        listed = ", ".join(f"--{known}" for known in starting)
        raise UsageError(f"{missing}; it could be {listed}.")
    raise UsageError(f"{missing}{suggest(typed, names, value=value)}")


def suggest(typed: str, names: Iterable[str], prefix: str = "--", value: str = "") -> str:
    """Return the end of a sentence: the name most like TYPED, or where to look.

    >>> suggest("--nporc_per_node", BY_SPELLING)
    '; did you mean --nproc_per_node?'
    """
    hint = elsewhere.hint(typed if prefix else f"--{typed}", value)
    if hint is not None:
        return f"; {hint}"
    name = typed.lstrip("-").replace("-", "_")
    otherwise = "`fleetrun --help=all` lists them all."
    if prefix and not typed.startswith("--"):
        otherwise = "for Python's own options write `fleetrun [options] python -u train.py`."
        if len(name) == 1:
            # A single letter resembles any short name.
            return f"; {otherwise}"
    return text.suggestion(name, names, otherwise, prefix)


# -- scripts that are hardly meant as one ----------------------------------------------------------


def refuse_mistaken(parsed: ParsedCommand, commands: Iterable[str]) -> None:
    """Raise UsageError if the script of PARSED is hardly one; COMMANDS are those of fleetrun."""
    if parsed.script is None or parsed.script_at is None:
        return
    form, target, args = parsed.script
    is_one_word = len(target.split()) == 1
    if form == "module":
        if not is_one_word or "/" in target or target.endswith((".py", ".ipynb")):
            problem = "a module's name has no slash, blank or .py; leave -m out for a file."
            raise UsageError(f"-m {target}: {problem}")
        return
    if not os.path.exists(target):
        _refuse_missing(parsed.given[-1:], target, is_one_word=is_one_word)
    if target.isalpha() and parsed.words[parsed.script_at - 1 : parsed.script_at] != ("--",):
        _refuse_command(target, args, tuple(commands))


def _refuse_missing(given: Iterable[Given], target: str, *, is_one_word: bool) -> None:
    """Raise UsageError if TARGET, no file, is more likely an option or a value of GIVEN."""
    taken = f'"{target}" is taken as the script'
    name, equals, _ = target.partition("=")
    if equals and name.replace("-", "_") in BY_SPELLING:
        raise UsageError(f"{taken}: write --{target}.")
    if equals and name.isidentifier() and name.isupper():
        raise UsageError(f"{taken}: write --env {target} for a variable of ranks.")
    if target.startswith(_OF_OPTIONS) or not is_one_word:
        raise UsageError(
            f"{taken}: write an option with two plain hyphens, and neither options nor the script "
            "with blanks or quotation marks that are part of them."
        )
    for last in given:
        option = BY_SPELLING[last.name]
        is_number = target[:1].isdigit() and not target.strip("0123456789,.-")
        if option.kind.name == "list" and is_number:
            raise UsageError(
                f"{taken}, because {last.typed} ends at the space: "
                f"write {last.typed}={last.raw},{target}."
            )


def _refuse_command(word: str, rest: Sequence[str], commands: Sequence[str]) -> None:
    """Raise UsageError if WORD, followed by REST, is nearly one of COMMANDS, or another tool's.

    A program of that name hardly trains; `fleetrun -- kill` runs it.
    """
    elsewhere.refuse_gone(word, f"fleetrun {word}", elsewhere.GONE_COMMANDS)
    meant = elsewhere.COMMANDS.get(word) or text.closest(word, commands, _ALIKE)
    if word == "help":
        meant, rest = (rest[0] if rest and rest[0] in commands else ""), ("--help",)
    if meant is None and word not in elsewhere.COMMANDS:
        return
    if meant == "stop":
        rest = [name for name in rest if not name.startswith("-")]  # as in `kill -9`
    instead = " ".join(("fleetrun", *([meant, *rest] if meant else rest or ["train.py"])))
    raise UsageError(
        f"there is no command {word}; did you mean `{instead}`? "
        f"`fleetrun -- {word}` runs a program of that name."
    )
