"""The types of option values: what each reads, and what it allows in words; pure."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from unicodedata import normalize

import click
from click.shell_completion import CompletionItem

from fleetrun.errors import UsageError
from fleetrun.text import (
    is_digits,
    number_in_words,
    parse_bool,
    parse_duration,
    parse_number,
    parse_range,
    parse_size,
)

Value = str | int | float | bool | tuple[str, ...] | None
Reader = Callable[[str], Value]
Item = CompletionItem[str]

# The largest time or count, and the last port.
_MOST, LAST_PORT = 1e9, 65535
# Enough for any host; keeps `--tee=0-9999999999` from filling the memory.
_MOST_RANKS = 1 << 16
# The first two steps allocate and compile; all that are recorded are kept in memory.
_PROFILED_STEPS, _MOST_PROFILED = "3-7", 1000


class Type(click.ParamType):  # type: ignore[type-arg]  # click 8.1 takes none
    """How a value is read: READ returns it, or raises ValueError with what is allowed.

    WANTED says what is allowed; FITS says whether a word that follows an option with an optional
    value is its value; WORDS are for completion. COMPLETE is `file` or `dir`: the value is a path,
    and the shell completes it. IS_FREE: the text may have any characters, as a path may.
    """

    def __init__(
        self,
        name: str,
        read: Reader = str,
        wanted: str = "",
        *,
        fits: Callable[[str], bool] = lambda _word: False,
        words: tuple[str, ...] = (),
        complete: str = "",
        is_free: bool = False,
    ) -> None:
        self.name = name
        self._read = read
        self.wanted = wanted
        self.fits = fits
        self.words = words
        self.complete = complete
        self._is_free = is_free or complete != ""

    def read(self, text: str) -> Value:
        """Return the value of TEXT; ValueError says what is allowed."""
        if not self._is_free and normalize("NFKC", text) != text:
            raise ValueError(f"it has full-width characters: write {normalize('NFKC', text)}.")
        # Arguments and paths cannot hold it.
        if "\0" in text:
            raise ValueError("it contains a NUL character; remove it.")
        return self._read(text)

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Value:
        """Return VALUE, an argument of a command, as READ does; UsageError for a wrong one."""
        del param
        try:
            return self.read(str(value))
        except ValueError as error:
            raise UsageError(f"{place(ctx)}{value}: {error}") from None

    def shell_complete(
        self, ctx: click.Context | None, param: click.Parameter | None, incomplete: str
    ) -> list[Item]:
        """Return the words that start with INCOMPLETE, or let the shell complete a path."""
        del ctx, param
        if self.complete:
            return [CompletionItem(incomplete, type=self.complete)]
        return among(self.words, incomplete)


def place(ctx: click.Context | None) -> str:
    """Return the command of CTX, in which a mistake was made, as the beginning of a sentence."""
    return "" if ctx is None else f"{ctx.command_path.removeprefix('fleetrun ')}: "


def among(words: Iterable[str], incomplete: str, before: str = "") -> list[Item]:
    """Return the WORDS that start with INCOMPLETE, after BEFORE in the same word."""
    return [CompletionItem(before + word) for word in words if word.startswith(incomplete)]


def read_as(read: Reader, *, words: tuple[str, ...] = (), is_free: bool = False) -> Type:
    """Return the type of texts that READ reads."""
    return Type("text", read, words=words, is_free=is_free)


def number(
    *,
    is_whole: bool = True,
    minimum: float | None = None,
    maximum: float | None = None,
    words: tuple[str, ...] = (),
) -> Type:
    """Return the type of a number from MINIMUM to MAXIMUM, or one of WORDS.

    >>> number(minimum=1, words=("auto",)).read("auto"), number(minimum=1).read("8")
    ('auto', 8)
    """
    in_words = number_in_words(is_whole=is_whole, minimum=minimum, maximum=maximum)
    wanted = f"give {in_words}" + (f", or one of {', '.join(words)}." if words else ".")
    most = _MOST if maximum is None else maximum

    def read(text: str) -> Value:
        word = text.strip().lower()
        value = parse_number(word, is_whole=is_whole, minimum=minimum, maximum=most)
        if value is None and word not in words:
            raise ValueError(wanted)
        return word if value is None else value

    return Type("int" if is_whole else "float", read, wanted, words=words)


def seconds(minimum: float = 0) -> Type:
    """Return the type of a time of MINIMUM seconds or more.

    >>> seconds().read("1h30m")
    5400.0
    """
    wanted = f"give a number of seconds, {minimum:g} or more, or a time such as 90s, 30m or 1h30m."

    def read(text: str) -> Value:
        value = parse_duration(text)
        if value is None or not minimum <= value <= _MOST:
            raise ValueError(wanted)
        return value

    return Type("duration", read, wanted)


def choice(
    *words: str, synonyms: Mapping[str, str] | None = None, is_optional: bool = False
) -> Type:
    """Return the type of one of WORDS; SYNONYMS are other words for them.

    IS_OPTIONAL: a following word may be the value of an optional one.
    """
    meant = {word: word for word in words} | dict(synonyms or {})
    wanted = f"give one of {', '.join(words)}."

    def read(text: str) -> Value:
        if text.strip().lower() not in meant:
            raise ValueError(wanted)
        return meant[text.strip().lower()]

    return Type(
        "choice", read, wanted, words=words, fits=lambda word: is_optional and word in meant
    )


def _boolean(text: str) -> bool:
    value = parse_bool(text)
    if value is None:
        raise ValueError("give true or false.")
    return value


def _items(text: str) -> tuple[str, ...]:
    return tuple(text.replace(",", " ").split())


_KEY_VALUE = "give KEY=VALUE, where KEY is letters, digits and underscores."


def _variable(text: str) -> str:
    key, equals, _ = text.partition("=")
    if not equals or not (key.isascii() and key.isidentifier()):
        raise ValueError(_KEY_VALUE)
    return text


def ranks(text: str) -> str:
    """Return ranks, ranges written out: all, or numbers with commas.

    >>> ranks("0-2, 5")
    '0,1,2,5'
    """
    if text.strip() == "all":
        return "all"
    numbers: dict[int, None] = {}
    for part in _items(text) or [""]:
        span = parse_range(part)
        if span is None or span.stop > _MOST_RANKS:
            raise ValueError("give all, or ranks such as 0,3 or 0-3.")
        numbers |= dict.fromkeys(span)
    return ",".join(map(str, numbers))


def _is_rank_list(word: str) -> bool:
    """Whether WORD, which follows an optional value, can only be ranks and not the script."""
    return word == "all" or (word[:1].isdigit() and not word.strip("0123456789,-:"))


BOOL = Type(
    *("bool", _boolean, "give true or false."),
    fits=lambda word: parse_bool(word) is not None,
    words=("true", "false"),
)
# Never takes the word after it.
FLAG = Type("flag", _boolean, "give true or false.", words=("true", "false"))
TEXT, FREE = Type("text", str.strip), Type("text", is_free=True)
FILE, FOLDER = Type("text", complete="file"), Type("text", complete="dir")
LIST, FILES = Type("list", _items), Type("list", _items, complete="file")
VARIABLE = Type("pairs", _variable, _KEY_VALUE, is_free=True)
RANKS = Type("list", ranks, words=("all",), fits=_is_rank_list)


# -- values of their own kind ---------------------------------------------------------------------


def host_count(text: str) -> str:
    """Return a number of hosts, or a minimum and a maximum: `2` or `2:4`."""
    low, colon, high = text.strip().partition(":")
    # Python refuses to read numbers of thousands of digits.
    is_count = all(is_digits(bound) and len(bound) < 10 for bound in (low, high if colon else low))
    if not is_count or int(low) < 1:
        raise ValueError("give a number of hosts, 1 or more.")
    if colon and int(high) < int(low):
        raise ValueError("give the smaller number of hosts first.")
    return text.strip()


def wrapper(text: str) -> str:
    """Return ranks, as above, and the command that wraps theirs.

    >>> wrapper("0-1:nsys  profile")
    '0,1: nsys profile'
    """
    numbers, colon, command = text.partition(":")
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"the command cannot be read: {error}.") from None
    if not colon or not words:
        raise ValueError("give 'RANKS: COMMAND', such as '0: nsys profile'.")
    return f"{ranks(numbers)}: {shlex.join(words)}"


def profiled(text: str) -> str:
    """Return ranks, as above, and the first and the last step that they record.

    >>> profiled("0-1:20")
    '0,1:20-20'
    """
    numbers, colon, steps = text.partition(":")
    span = parse_range(steps if colon else _PROFILED_STEPS)
    if span is None or not span.start or len(span) > _MOST_PROFILED:
        wanted = "give ranks and steps, such as 0,3:10-14; steps count from 1, and are at most "
        raise ValueError(f"{wanted}{_MOST_PROFILED}.")
    return f"{ranks(numbers)}:{span.start}-{span.stop - 1}"


def pattern(text: str) -> str:
    """Return TEXT if it is a regular expression."""
    try:
        re.compile(os.fsencode(text))
    except (re.error, OverflowError) as error:
        raise ValueError(f"this is not a regular expression ({error}).") from None
    return text


PATTERN = read_as(pattern, is_free=True)


def log_size(text: str) -> int:
    """Return the bytes of TEXT."""
    size = parse_size(text)
    if size is None or 0 < size < 1024 * 1024:
        raise ValueError("give 1M or more, as 100M or 2G, or 0 for no limit.")
    return size


def job_name(text: str) -> str:
    """Return TEXT if it can be the name of a job, which is part of a folder's name."""
    text = text.strip()
    if not text.isprintable() or set(text) & set("/ ") or text.startswith("."):
        raise ValueError("give a name without slashes and spaces, and no dot at its start.")
    return text
