"""Splits a command line into our options and the user's script; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from fleetrun import text
from fleetrun.cli import elsewhere
from fleetrun.cli.option import Option, by_spelling
from fleetrun.cli.options import BY_SPELLING, KNOWN
from fleetrun.errors import UsageError
from fleetrun.model import Given, Script, flag
from fleetrun.strategy.load import PRESETS

# Fewer letters are more likely a typing error than an abbreviation.
_SHORTEST_PREFIX = 4
# Options that no script of Paddle's suites has itself.
_OF_LAUNCHERS = frozenset(
    (
        *("cluster_node_ips", "detach", "elastic_timeout", "flight_recorder", "hang_timeout"),
        *("heartbeat_timeout", "hostfile", "ips", "max_restart", "max_restarts"),
        *("metrics_period", "nnodes", "nproc_per_node", "rdzv_timeout", "selected_gpus"),
        *("strategy_mode", "strategy_strict", "tee"),
    )
)
# Options that end the command line: nothing after them is read.
_ENDING = ("help", "version")
# Those that a shell does not remove.
_TYPOGRAPHIC = ("\u2018", "\u2019", "\u201c", "\u201d")
QUOTES = "'\"" + "".join(_TYPOGRAPHIC)
# paddleformers-cli writes --gpus without a value.
_NO_DEVICES = (
    " Programs that start launches write this when they find no device on this host, or none in "
    "CUDA_VISIBLE_DEVICES and its like; without the option fleetrun trains on the CPU."
)


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
    if not any(given.name in (*_ENDING, "from_manifest") for given in parsed.given):
        raise UsageError(f"no script to run: {_where_the_script_is(parsed.given)}")
    return parsed


def _where_the_script_is(given: Sequence[Given]) -> str:
    """Return what to write where GIVEN is followed by no script."""
    if given and ".py" in given[-1].raw:
        typed, raw = given[-1].typed, given[-1].raw
        if " " in raw.strip():
            return f"{typed}={raw} is one word, because of its quotation marks: leave them out."
        if raw.endswith(".py"):
            return f"{typed} has taken {raw} as its value; write {typed}=VALUE {raw}."
    return "write `fleetrun [options] train.py [its arguments]`, or see `fleetrun --help`."


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
    for word, following in pairwise((*script.args, "")):
        name, equals, value = word.partition("=")
        name = name.lstrip("-").replace("-", "_").lower()
        # Scripts have a --strategy of their own, with other values than presets.
        listed = (value if equals else following).split(",")
        is_preset = name == "strategy" and not PRESETS.keys().isdisjoint(listed)
        if word.startswith("-") and (name in _OF_LAUNCHERS or is_preset):
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
            raw = _value_after(option, typed, words[at:])
            at += following is not None and option.takes_next(following)
        _refuse_slips(typed, raw, is_last=not equals and at == len(words))
        given.append(option.given(raw, typed, spelling=name))
    return ParsedCommand(tuple(given), None, tuple(notes), tuple(words), script_at, pending)


def _value_after(option: Option, typed: str, following: Sequence[str]) -> str:
    """Return the value of OPTION, which was TYPED without one, from the FOLLOWING words."""
    word = following[0] if following else ""
    meant = word[1:] or "".join(following[1:2]) or "VALUE"
    # `--set =5` lacks its key instead.
    if word.startswith("=") and (not option.is_pair or "=" in meant):
        raise UsageError(f"{typed} ends at the space before {word}: write {typed}={meant}.")
    if following and option.takes_next(word):
        return word
    if option.bare is None:
        raise UsageError(
            f"{typed} needs a value, and {word} looks like an option: "
            f"write {typed}=VALUE.{_NO_DEVICES if option.label == 'devices' else ''}"
        )
    return option.bare


def _refuse_slips(typed: str, raw: str, *, is_last: bool) -> None:
    """Raise UsageError if RAW, the value of TYPED, ends or is quoted as no shell would."""
    # A blank within the line may be the value of an unset variable.
    fault = text.blank_fault(raw) if raw.endswith("\r") or is_last else None
    if fault is not None:
        raise UsageError(f'{typed} "{raw}": {fault}')
    if raw.startswith(_TYPOGRAPHIC):
        raise UsageError(
            f"{typed}={raw}: the quotation marks are part of the value, because a shell removes "
            f"only straight ones: write {typed}={raw.strip(QUOTES)}."
        )


def _named(typed: str, names: dict[str, Option], notes: list[str], value: str) -> str:
    """Return the spelling that TYPED means, completely or by a unique prefix; VALUE follows it."""
    missing = f"no such option: {typed}"
    if text.without_slips(typed) != typed or typed[1:2] in tuple(text.LONG_DASHES):
        meant = text.option_without_slips(typed)
        raise UsageError(f"{missing}; it has full-width characters or long dashes: write {meant}.")
    if len(typed.split()) > 1:
        raise UsageError(
            f'no such option: "{typed}"; quotation marks make it one word: leave them out.'
        )
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
    if text.without_slips(name) != name:
        return f"; it has full-width characters: write {text.without_slips(name)}."
    otherwise = "`fleetrun --help=all` lists them all."
    if prefix and not typed.startswith("--"):
        otherwise = "for Python's own options write `fleetrun [options] python -u train.py`."
        if len(name) == 1:
            # A single letter resembles any short name.
            return f"; {otherwise}"
    return text.suggestion(name, names, otherwise, prefix)
