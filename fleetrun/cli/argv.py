"""Splits a command line into our options and the user's script; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fleetrun.cli.elsewhere import refuse_gone, suggest
from fleetrun.cli.option import Option, by_spelling
from fleetrun.cli.options import KNOWN
from fleetrun.errors import UsageError
from fleetrun.model import Given, Script, flag

# Fewer letters are more likely a typing error than an abbreviation.
_SHORTEST_PREFIX = 4
# Options that no script of Paddle's suites has itself.
_OF_LAUNCHERS = ("cluster_node_ips", "hostfile", "ips", "max_restart", "nnodes", "nproc_per_node")
# Options that end the command line: nothing after them is read.
_ENDING = ("help", "version")


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
        misplaced = tuple(
            f"{word} comes after {script.target}, so the script gets it; put fleetrun's options "
            "before the script."
            for word in script.args
            if word.startswith("--") and _underscored(word.partition("=")[0]) in _OF_LAUNCHERS
        )
        return parsed._replace(script=script, notes=(*parsed.notes, *misplaced))
    # A manifest contains the script.
    if any(parsed.asks(name) for name in (*_ENDING, "from_manifest")):
        return parsed
    hint = "write `fleetrun [options] train.py [its arguments]`, or see `fleetrun --help`."
    for given in parsed.given[-1:]:
        if given.raw.endswith(".py"):
            meant = f"write {given.typed}=VALUE {given.raw}."
            hint = f"{given.typed} has taken {given.raw} as its value; {meant}"
    raise UsageError(f"no script to run: {hint}")


def _script(words: Sequence[str]) -> Script:
    """Return the script that WORDS start with, and its arguments as they are."""
    first, rest = words[0], tuple(words[1:])
    if first == "run_check" and rest:
        raise UsageError(
            "run_check is Paddle's check of its installation and takes nothing after it; for a "
            "file of that name write ./run_check."
        )
    if first == "-m" and not rest:
        raise UsageError("-m needs a module: write `fleetrun [options] -m package.module`.")
    script = Script("module", rest[0], rest[1:]) if first == "-m" else Script("file", first, rest)
    if not script.target:
        raise UsageError("the name of the script or module is empty; is a variable unset?")
    return script


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
        if word.endswith("\r") or (word and not word.strip()):
            raise UsageError(
                f'"{word}": remove what follows the last character of a line of the command: a '
                "blank after its backslash, or the carriage return of Windows."
            )
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
        if raw.strip() or option.is_pair:
            given.append(option.given(raw, typed, spelling=name))
        else:
            notes.append(f"{typed} is empty and counts as not given.")
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
        cpu = " Without devices, leave the option out: fleetrun then trains on the CPU."
        raise UsageError(
            f"{typed} needs a value, and {word} looks like an option: write {typed}=VALUE."
            f"{cpu if option.label == 'devices' else ''}"
        )
    return option.bare


def _named(typed: str, names: dict[str, Option], notes: list[str], value: str) -> str:
    """Return the spelling that TYPED means, completely or by a unique prefix; VALUE follows it."""
    name = _underscored(typed) if typed.startswith("--") else ""
    if name in names:
        return name
    refuse_gone(name, typed)
    starting = [known for known in names if name and known.startswith(name)]
    if len(name) >= _SHORTEST_PREFIX and len({names[known].label for known in starting}) == 1:
        notes.append(f"{typed} is read as {flag(starting[0])}.")
        return starting[0]
    near = ", ".join(f"--{known}" for known in starting)
    ending = f"; did you mean {near}?" if near else suggest(typed, names, value=value)
    raise UsageError(f"no such option: {typed}{ending}")


def _underscored(typed: str) -> str:
    return typed.lstrip("-").replace("-", "_")
