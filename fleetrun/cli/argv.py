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

    `script_at` is where the script starts; None: there is none yet.
    """

    given: tuple[Given, ...]
    script: Script | None = None
    notes: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    script_at: int | None = None

    def asks(self, name: str) -> bool:
        """Whether the option NAME was given."""
        return any(given.name == name for given in self.given)


def split(words: Sequence[str]) -> ParsedCommand:
    """Split WORDS into options and script; UsageError for an unknown option before the script.

    >>> parsed = split(["--gpus=0,1", "train.py", "--gpus=2", "--", ""])
    >>> [(given.name, given.spelling, given.raw) for given in parsed.given]
    [('devices', 'gpus', '0,1')]
    >>> parsed.script
    Script(form='file', target='train.py', args=('--gpus=2', '--', ''))
    """
    parsed = scan(words)
    if any(map(parsed.asks, _ENDING)):
        return parsed
    if parsed.script_at is None:
        hint = "write `fleetrun [options] train.py [its arguments]`, or see `fleetrun --help`."
        last = parsed.given[-1] if parsed.given else None
        if last is not None and last.raw.endswith(".py"):
            hint = f"{last.typed} has taken {last.raw}; write {last.typed}=VALUE {last.raw}."
        raise UsageError(f"no script to run: {hint}")
    first, *rest = words[parsed.script_at :]
    if first == "-m" and not rest:
        raise UsageError("-m needs a module: write `fleetrun [options] -m package.module`.")
    target, *args = rest if first == "-m" else (first, *rest)
    script = Script("module" if first == "-m" else "file", target, tuple(args))
    if not target:
        raise UsageError("the name of the script or module is empty; is a variable unset?")
    misplaced = tuple(
        f"{word} comes after {target}, so the script gets it; put fleetrun's options before "
        "the script."
        for word in args
        if word.startswith("--") and _underscored(word.partition("=")[0]) in _OF_LAUNCHERS
    )
    return parsed._replace(script=script, notes=(*parsed.notes, *misplaced))


def scan(words: Sequence[str], table: Iterable[Option] = KNOWN) -> ParsedCommand:
    """Read the options of TABLE at the head of WORDS; UsageError for an unknown one."""
    names = by_spelling(table)
    given: list[Given] = []
    notes: list[str] = []
    script_at, at = None, 0
    while at < len(words) and not (given and given[-1].name in _ENDING):
        word = words[at]
        if word in {"--", "-m"} or not word.startswith("-"):
            start = at + (word == "--")
            script_at = start if start < len(words) else None
            break
        typed, equals, raw = word.partition("=")
        following = words[at + 1] if at + 1 < len(words) else None
        name = "help" if word == "-h" else _named(typed, names, notes)
        option = names[name]
        at += 1
        if equals:
            pass
        elif following is not None and option.takes_next(following):
            raw, at = following, at + 1
        elif option.bare is not None:
            raw = option.bare
        elif following is None:
            raise UsageError(f"{typed} needs a value: {option.wanted}")
        else:
            problem = f"needs a value, and {following} looks like an option: write {typed}=VALUE."
            raise UsageError(f"{typed} {problem}")
        if raw.strip() or option.is_pair:
            given.append(option.given(raw, typed, spelling=name))
        else:
            notes.append(f"{typed} is empty and counts as not given.")
    return ParsedCommand(tuple(given), None, tuple(notes), tuple(words), script_at)


def _named(typed: str, names: dict[str, Option], notes: list[str]) -> str:
    """Return the spelling that TYPED means, completely or by a unique prefix."""
    name = _underscored(typed) if typed.startswith("--") else ""
    if name in names:
        return name
    refuse_gone(name, typed)
    starting = [known for known in names if name and known.startswith(name)]
    if len(name) >= _SHORTEST_PREFIX and len({names[known].label for known in starting}) == 1:
        notes.append(f"{typed} is read as {flag(starting[0])}.")
        return starting[0]
    near = ", ".join(f"--{known}" for known in starting)
    ending = f"; did you mean {near}?" if near else suggest(typed, names)
    raise UsageError(f"no such option: {typed}{ending}")


def _underscored(typed: str) -> str:
    return typed.lstrip("-").replace("-", "_")
