"""Splits a command line into our options and the user's script; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fleetrun import text
from fleetrun.cli import elsewhere
from fleetrun.cli.option import Option, by_spelling
from fleetrun.cli.options import BY_SPELLING, KNOWN, is_device_list
from fleetrun.errors import UsageError
from fleetrun.model import Given, Script, flag
from fleetrun.plan import kinds
from fleetrun.strategy.load import PRESETS

# Fewer letters are more likely a typing error than an abbreviation.
_SHORTEST_PREFIX = 4
# How similar a name must be to an alias to be a misspelling, not a kind of device.
_LIKE_AN_ALIAS = 0.85
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
TYPOGRAPHIC = ("\u2018", "\u2019", "\u201c", "\u201d")
QUOTES = "'\"" + "".join(TYPOGRAPHIC)


class ParsedOptions(NamedTuple):
    """The part of a command line that is fleetrun's own.

    `script_at` is where the script starts (None: there is none yet); `pending` is a last option
    that still lacks its value.
    """

    given: tuple[Given, ...]
    notes: tuple[str, ...]
    script_at: int | None
    pending: Option | None = None
    pending_typed: str = ""

    def refuse_pending(self) -> None:
        """Raise UsageError if the last option lacks its value."""
        if self.pending is not None:
            raise UsageError(f"{self.pending_typed} needs a value: {self.pending.wanted}")


class ParsedCommand(NamedTuple):
    """A parsed command line: our options in order, and the script with its arguments untouched."""

    given: tuple[Given, ...]
    script: Script | None
    notes: tuple[str, ...] = ()
    words: tuple[str, ...] = ()

    def asks(self, name: str) -> bool:
        """Whether the option NAME was given."""
        return any(given.name == name for given in self.given)


def split(words: Sequence[str], table: Iterable[Option] = KNOWN) -> ParsedCommand:
    """Split WORDS into options and script; UsageError for an unknown option before the script.

    >>> parsed = split(["--gpus=0,1", "train.py", "--gpus=2", "--", ""])
    >>> [(given.name, given.spelling, given.raw) for given in parsed.given]
    [('devices', 'gpus', '0,1')]
    >>> parsed.script
    Script(form='file', target='train.py', args=('--gpus=2', '--', ''))
    """
    head = scan(words, table)
    head.refuse_pending()
    if head.script_at is not None:
        script = _script(words[head.script_at :])
        notes = (*head.notes, *_misplaced(script))
        return ParsedCommand(head.given, script, notes, tuple(words))
    # A manifest contains the script.
    if not any(given.name in (*_ENDING, "from_manifest") for given in head.given):
        raise UsageError(f"no script to run: {_where_the_script_is(head.given)}")
    return ParsedCommand(head.given, None, head.notes, tuple(words))


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


def _misplaced(script: Script) -> tuple[str, ...]:
    """Return a note for each argument of SCRIPT that only launchers take, or that is a slip."""
    notes = []
    for at, arg in enumerate(script.args):
        word, following = text.without_slips(arg), "".join(script.args[at + 1 : at + 2])
        name = word.partition("=")[0].lstrip("-").replace("-", "_").lower()
        is_ours = name in _OF_LAUNCHERS or (name == "strategy" and _is_preset(word, following))
        if word.startswith("-") and is_ours:
            notes.append(
                f"{arg} comes after {script.target}, so the script gets it; put fleetrun's options "
                "before the script."
            )
        fault = text.blank_fault(arg)
        # A script may be given a blank as the value of its option.
        is_value = at > 0 and script.args[at - 1].startswith("-") and not arg.endswith("\r")
        if fault is not None and not is_value and arg in {script.args[-1], arg.rstrip("\r") + "\r"}:
            notes.append(f'{script.target} gets the argument "{arg}": {fault}')
            break
    return tuple(notes)


def _is_preset(word: str, following: str) -> bool:
    """Whether WORD, an option, or FOLLOWING after it has the name of a preset.

    Scripts have a --strategy of their own, with other values.
    """
    _, equals, value = word.partition("=")
    return any(name.strip() in PRESETS for name in (value if equals else following).split(","))


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


def scan(words: Sequence[str], table: Iterable[Option] = KNOWN) -> ParsedOptions:
    """Read our options at the head of WORDS."""
    names = by_spelling(table)
    given: list[Given] = []
    notes: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        fault = text.blank_fault(word)
        if fault is not None:
            raise UsageError(f'"{word}": {fault}')
        if word == "--":
            after = at + 1 if at + 1 < len(words) else None
            return ParsedOptions(tuple(given), tuple(notes), after)
        if not word.startswith("-") or word == "-m":
            return ParsedOptions(tuple(given), tuple(notes), at)
        at += 1
        typed, equals, raw = word.partition("=")
        following = words[at] if at < len(words) else None
        name = "help" if word == "-h" else _named(typed, names, notes, raw or following or "")
        option = names.get(name) or names["devices"]
        if not equals and option.needs_next(following):
            if following is None:
                return ParsedOptions(tuple(given), tuple(notes), None, option, typed)
            raise UsageError(
                f"{typed} needs a value, and {following} looks like an option: "
                f"write {typed}=VALUE.{_NO_DEVICES if option.label == 'devices' else ''}"
            )
        if not equals:
            _refuse_lone_equals(option, typed, words[at : at + 2])
            raw = option.bare or ""
            if following is not None and option.takes_next(following):
                raw, at = following, at + 1
        _refuse_slips(typed, raw, is_last=not equals and at == len(words))
        given.append(option.given(raw, typed, spelling=name))
        if option.label in _ENDING:
            break
    return ParsedOptions(tuple(given), tuple(notes), None)


# paddleformers-cli writes it without a value.
_NO_DEVICES = (
    " Programs that start launches write this when they find no device on this host, or none in "
    "CUDA_VISIBLE_DEVICES and its like; without the option fleetrun trains on the CPU."
)


def _refuse_slips(typed: str, raw: str, *, is_last: bool) -> None:
    """Raise UsageError if RAW, the value of TYPED, ends or is quoted as no shell would."""
    # A blank within the line may be the value of an unset variable.
    fault = text.blank_fault(raw) if raw.endswith("\r") or is_last else None
    if fault is not None:
        raise UsageError(f'{typed} "{raw}": {fault}')
    if raw.startswith(TYPOGRAPHIC):
        raise UsageError(
            f"{typed}={raw}: the quotation marks are part of the value, because a shell removes "
            f"only straight ones: write {typed}={raw.strip(QUOTES)}."
        )


def _refuse_lone_equals(option: Option, typed: str, following: Sequence[str]) -> None:
    """Raise UsageError if FOLLOWING, the words after OPTION as TYPED, begin with its `=`."""
    word = "".join(following[:1])
    meant = word[1:] or "".join(following[1:]) or "VALUE"
    # `--set =5` lacks its key instead.
    if word.startswith("=") and (not option.is_pair or "=" in meant):
        raise UsageError(f"{typed} ends at the space before {word}: write {typed}={meant}.")


def _named(typed: str, names: dict[str, Option], notes: list[str], value: str) -> str:
    """Return the spelling that TYPED means, completely or by a unique prefix; VALUE follows it."""
    if text.without_slips(typed) != typed or typed[1:2] in tuple(text.LONG_DASHES):
        raise UsageError(
            f"no such option: {typed}; it has full-width characters or long dashes: write "
            f"{text.option_without_slips(typed)}."
        )
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
    if starting:
        listed = ", ".join(f"--{known}" for known in starting)
        hint = f"did you mean {listed}?" if len(starting) == 1 else f"it could be {listed}."
        raise UsageError(f"no such option: {typed}; {hint}")
    if name and is_device_list(name, value) and not elsewhere.hint(typed, value):
        # `--cluter_node_ips=1` is not a kind.
        aliases = [
            known
            for known, option in names.items()
            if known not in {option.label, "np"} and not known.startswith("selected_")
        ]
        if not text.closest(name, aliases, _LIKE_AN_ALIAS):
            return name.removeprefix("selected_")
    raise UsageError(f"no such option: {typed}{suggest(typed, names, value=value)}")


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
    if prefix and not typed.startswith("--"):
        otherwise = "for Python's own options write `fleetrun [options] python -u train.py`."
        if len(name) == 1:
            # A single letter resembles any short name.
            return f"; {otherwise}"
    else:
        otherwise = "`fleetrun --help=all` lists them all."
    kinds_too = [*names, *(f"{kind}s" for kind in kinds.VENDORS)]
    return text.suggestion(name, kinds_too, otherwise, prefix)
