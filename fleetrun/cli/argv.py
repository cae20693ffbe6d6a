"""Splits a command line into our options and the user's script; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fleetrun.cli import elsewhere, gone
from fleetrun.cli.option import Option, by_spelling
from fleetrun.cli.options import BY_SPELLING, KNOWN, is_device_list
from fleetrun.errors import UsageError
from fleetrun.model import Given, Script, flag
from fleetrun.plan import kinds
from fleetrun.strategy.load import PRESETS
from fleetrun.text import (
    LONG_DASHES,
    blank_fault,
    closest,
    is_digits,
    option_without_slips,
    suggestion,
    without_slips,
)

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
# Those that a shell does not remove: typographic ones, and straight ones within others.
_TYPOGRAPHIC = ("\u2018", "\u2019", "\u201c", "\u201d")
_QUOTES = "'\"" + "".join(_TYPOGRAPHIC)


class ParsedCommand(NamedTuple):
    """A parsed command line: our options in order, and the script with its arguments untouched."""

    given: tuple[Given, ...]
    script: Script | None
    notes: tuple[str, ...] = ()
    words: tuple[str, ...] = ()

    def asks(self, name: str) -> bool:
        """Whether the option NAME was given."""
        return any(given.name == name for given in self.given)


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


def split(words: Sequence[str], table: Iterable[Option] = KNOWN) -> ParsedCommand:
    """Split WORDS into options and script; UsageError for an unknown option before the script.

    >>> parsed = split(["--gpus=0,1", "train.py", "--gpus=2", "--", ""])
    >>> [(given.name, given.spelling, given.raw) for given in parsed.given]
    [('devices', 'gpus', '0,1')]
    >>> parsed.script
    Script(form='file', target='train.py', args=('--gpus=2', '--', ''))
    """
    head = scan(words, table)
    refuse_pending(head)
    # A manifest contains the script.
    ended = any(given.name in (*_ENDING, "from_manifest") for given in head.given)
    if head.script_at is None and not ended:
        last = head.given[-1] if head.given else None
        if last is not None and " " in last.raw.strip() and ".py" in last.raw:
            raise UsageError(
                f"no script to run: {last.typed}={last.raw} is one word, because of its quotation "
                "marks: leave them out."
            )
        if last is not None and last.raw.endswith(".py"):
            raise UsageError(
                f"no script to run: {last.typed} has taken {last.raw} as its value; "
                f"write {last.typed}=VALUE {last.raw}."
            )
        raise UsageError(
            "no script to run: write `fleetrun [options] train.py [its arguments]`, "
            "or see `fleetrun --help`."
        )
    script = None if head.script_at is None else _script(words[head.script_at :])
    notes = head.notes if script is None else (*head.notes, *_misplaced(script))
    return ParsedCommand(head.given, script, notes, tuple(words))


def refuse_pending(head: ParsedOptions) -> None:
    """Raise UsageError if the last option of HEAD lacks its value."""
    if head.pending is not None:
        raise UsageError(f"{head.pending_typed} needs a value: {head.pending.wanted}")


def _misplaced(script: Script) -> tuple[str, ...]:
    """Return a note for each argument of SCRIPT that only launchers take, or that is a slip."""
    notes = [
        f"{arg} comes after {script.target}, so the script gets it; put fleetrun's options "
        "before the script."
        for arg, value in zip(script.args, [*script.args[1:], ""], strict=False)
        if _is_of_launcher(arg, value)
    ]
    # A script may be given a blank as the value of its option.
    last, before = script.args[-1:], script.args[-2:-1]
    wrong = blank_fault(last[0]) if last and not "".join(before).startswith("-") else None
    ended = next((arg for arg in script.args if arg.endswith("\r")), None)
    if ended is not None:
        wrong, last = blank_fault(ended), (ended,)
    if wrong is not None:
        notes.append(f'{script.target} gets the argument "{last[0]}": {wrong}')
    return tuple(notes)


def _is_of_launcher(arg: str, value: str) -> bool:
    """Whether ARG, an argument of the script before VALUE, is an option that only launchers have.

    >>> [_is_of_launcher(*words) for words in (("--max-restart=3", ""), ("--strategy", "amp"),
    ...  ("--strategy=greedy", ""), ("max_restart", "3"), ("-nnodes", "2"))]
    [True, True, False, False, True]
    """
    if not without_slips(arg).startswith("-"):
        return False
    typed, equals, joined = without_slips(arg).partition("=")
    name = typed.lstrip("-").replace("-", "_").lower()
    if name in _OF_LAUNCHERS:
        return True
    if name != "strategy":
        return False

    return (joined if equals else value).partition(",")[0] in PRESETS


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


def scan(words: Sequence[str], table: Iterable[Option] = KNOWN) -> ParsedOptions:
    """Read our options at the head of WORDS."""
    names = by_spelling(table)
    given: list[Given] = []
    notes: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        _check_word(word)
        if word == "--":
            after = at + 1
            return ParsedOptions(tuple(given), tuple(notes), after if after < len(words) else None)
        if not word.startswith("-") or word == "-m":
            return ParsedOptions(tuple(given), tuple(notes), at)
        at += 1
        typed, equals, raw = word.partition("=")
        value = raw if equals or at == len(words) else words[at]
        name = "help" if word == "-h" else _match(typed, names, notes, value)
        option = names.get(name) or names["devices"]
        if not equals:
            _check_blank(option, typed, words[at : at + 2])
            if at < len(words) and _is_value(option, words[at]):
                raw = words[at]
                at += 1
                _check_value(typed, raw, is_last=at == len(words))
            elif option.bare is None:
                if at == len(words):
                    return ParsedOptions(tuple(given), tuple(notes), None, option, typed)
                raise UsageError(
                    f"{typed} needs a value, and {words[at]} looks like an option: "
                    f"write {typed}=VALUE.{_unfound(option)}"
                )
            else:
                raw = option.bare
        given.append(option.given(_unquoted(typed, raw), typed, spelling=name))
        if option.label in _ENDING:
            break
    return ParsedOptions(tuple(given), tuple(notes), None)


def _check_word(word: str) -> None:
    """Raise UsageError if WORD is a blank, or ends in a carriage return."""
    wrong = blank_fault(word)
    if wrong is not None:
        raise UsageError(f'"{word}": {wrong}')


def _check_value(typed: str, raw: str, *, is_last: bool) -> None:
    """Do the same for RAW, the value of TYPED; a blank one may be that of an unset variable."""
    wrong = blank_fault(raw) if raw.endswith("\r") or is_last else None
    if wrong is not None:
        raise UsageError(f'{typed} "{raw}": {wrong}')


def _check_blank(option: Option, typed: str, following: Sequence[str]) -> None:
    """Raise UsageError if FOLLOWING, the words after OPTION as TYPED, begin with its `=`."""
    word = "".join(following[:1])
    meant = word[1:] or "".join(following[1:]) or "VALUE"
    # `--set =5` lacks its key instead.
    if word.startswith("=") and (not option.is_pair or "=" in meant):
        raise UsageError(f"{typed} ends at the space before {word}: write {typed}={meant}.")


def _unquoted(typed: str, raw: str) -> str:
    """Return RAW, the value of TYPED; UsageError if it is quoted as on a page."""
    if raw.startswith(_TYPOGRAPHIC):
        raise UsageError(
            f"{typed}={raw}: the quotation marks are part of the value, because a shell removes "
            f"only straight ones: write {typed}={raw.strip(_QUOTES)}."
        )
    return raw


def _unfound(option: Option) -> str:
    """Return why a program that launches may have given OPTION without a value."""
    if option.label != "devices":
        return ""
    # paddleformers-cli does.
    return (
        " Programs that start launches write this when they find no device on this host, or "
        "none in CUDA_VISIBLE_DEVICES and its like; without the option fleetrun trains on the CPU."
    )


def mistaken_script(parsed: ParsedCommand) -> str | None:
    """Return why the script, which does not exist, was hardly meant as one, or None.

    >>> mistaken_script(split(["--gpus", "0", "1", "train.py"]))
    '"1" is taken as the script, because --gpus ends at the space: write --gpus=0,1.'
    """
    if parsed.script is None or parsed.script.form != "file":
        return None
    target = parsed.script.target
    return _misspelt(target) or _misread(parsed, target, parsed.script.args)


def _misspelt(target: str) -> str | None:
    """Return how TARGET, which is taken as the script, differs from what was meant, or None."""
    unquoted = target.strip(_QUOTES)
    if unquoted != target and unquoted.startswith("--"):
        return (
            f"{target} is taken as the script, because its quotation marks are part of it: "
            f"write {unquoted}."
        )
    if target.startswith(tuple(LONG_DASHES)):
        return (
            f'"{target}" is taken as the script, because it starts with a long dash: '
            f"write two hyphens, {option_without_slips(target)}."
        )
    if target.strip() != target:
        return f'"{target}" is taken as the script, with its blank: write {target.strip()}.'
    if len(target.split()) > 1 and (target.startswith("-") or ".py" in target):
        return (
            f'"{target}" is taken as the script, because quotation marks make it one word: '
            f"leave them out: {target}."
        )
    return None


def _misread(parsed: ParsedCommand, target: str, args: tuple[str, ...]) -> str | None:
    """Return why TARGET, followed by ARGS, is rather a variable, or the rest of an option."""
    name, equals, _ = target.partition("=")
    is_option = name.replace("-", "_") in BY_SPELLING
    if equals and (is_option or (name.isidentifier() and name.isupper())):
        meant = f"--{target}" if is_option else f"--env {target} for a variable of ranks"
        return f'"{target}" is taken as the script: write {meant}.'
    last = parsed.given[-1] if parsed.given else None
    value = last and _continued(last, (target, *args))
    if not last or not value:
        return None
    return (
        f'"{target}" is taken as the script, because {last.typed} ends at the space: '
        f"write {last.typed}={value}."
    )


def _continued(given: Given, words: Sequence[str]) -> str:
    """Return the value that GIVEN and the WORDS after it look like; empty if none."""
    option = BY_SPELLING.get(given.name)
    if option is None:
        return ""
    if words[0].isalpha() and _is_unit(option, given.raw, words[0]):
        return f"{given.raw}{words[0]}"
    if option.kind.name != "list" or not _is_listed(words[0]):
        return ""
    values = [given.raw]
    for word in words:
        if not _is_listed(word):
            break
        values.append(word)
    return ",".join(part for value in values for part in value.replace(",", " ").split())


def _is_unit(option: Option, number: str, word: str) -> bool:
    """Whether WORD is the unit of NUMBER, the value of OPTION: seconds, MB."""
    if option.kind.name != "duration" and option.metavar != "SIZE":
        return False
    return number[-1:].isdigit() and option.is_readable(number + word)


def _is_listed(word: str) -> bool:
    """Whether WORD looks like another item of a list: numbers or addresses."""
    return word[:1].isdigit() and not word.strip("0123456789,.-")


def _is_value(option: Option, word: str) -> bool:
    """Whether WORD, the next one after OPTION, is its value."""
    # A negative number is a value; any other word with a hyphen is more likely an option.
    is_number = is_digits(word[1:]) and option.bare is None
    return option.takes_next(word) and (is_number or not word.startswith("-"))


def _match(typed: str, names: dict[str, Option], notes: list[str], value: str) -> str:
    """Return the spelling that TYPED means, completely or by a unique prefix; VALUE follows it."""
    if without_slips(typed) != typed or typed[1:2] in tuple(LONG_DASHES):
        raise UsageError(
            f"no such option: {typed}; it has full-width characters or long dashes: write "
            f"{option_without_slips(typed)}."
        )
    if len(typed.split()) > 1:
        raise UsageError(
            f'no such option: "{typed}"; quotation marks make it one word: leave them out.'
        )
    name = typed[2:].replace("-", "_") if typed.startswith("--") else ""
    if name in names:
        return name
    gone.refuse(name, typed)
    starting = sorted(known for known in names if name and known.startswith(name))
    if f"{name}s" in starting:
        # Rather than other options with this prefix.
        starting = [f"{name}s"]
    if len({names[known].label for known in starting}) == 1 and len(name) >= _SHORTEST_PREFIX:
        option = names[starting[0]]
        full = option.label if option.label in starting else starting[0]
        notes.append(f"{typed} is read as {flag(full)}.")
        return full
    if typed.startswith("--") and starting:
        listed = ", ".join(f"--{known}" for known in starting)
        hint = f"did you mean {listed}?" if len(starting) == 1 else f"it could be {listed}."
        raise UsageError(f"no such option: {typed}; {hint}")
    if typed.startswith("--") and is_device_list(name, value):
        # `--cluter_node_ips=1` is not a kind; names that plan/devices knows are compared there.
        aliases = [
            known
            for known, option in names.items()
            if known != option.label and not known.startswith("selected_") and known != "np"
        ]
        if not (elsewhere.meant(typed, value) or closest(name, aliases, _LIKE_AN_ALIAS)):
            return name.removeprefix("selected_")
    raise UsageError(f"no such option: {typed}{suggest(typed, names, value=value)}")


def suggest(typed: str, names: Iterable[str], prefix: str = "--", value: str = "") -> str:
    """Return the end of a sentence: the name most like TYPED, or where to look.

    >>> suggest("--nporc_per_node", BY_SPELLING)
    '; did you mean --nproc_per_node?'
    """
    hint = elsewhere.meant(typed if prefix else f"--{typed}", value)
    if hint is not None:
        return f"; {hint}"
    name = typed.lstrip("-").replace("-", "_")
    if without_slips(name) != name:
        return f"; it has full-width characters: write {without_slips(name)}."
    otherwise = "`fleetrun --help=all` lists them all."
    if prefix and not typed.startswith("--"):
        otherwise = "for Python's own options write `fleetrun [options] python -u train.py`."
        if len(name) == 1:
            # A single letter resembles any short name.
            names = ()
    kinds_too = [*names, *(f"{kind}s" for kind in kinds.VENDORS)] if names else []
    return suggestion(name, kinds_too, otherwise, prefix)


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
