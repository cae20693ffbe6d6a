"""The types of option values: what each reads, and what it allows in words; pure."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

import click
from click.shell_completion import CompletionItem

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
Item = CompletionItem[str]

# The largest time or count, and the last port.
_MOST, LAST_PORT = 10**9, 65535
# Enough for any host; keeps `--tee=0-9999999999` from filling the memory.
_MOST_RANKS = 1 << 16
# The first two steps allocate and compile; all that are recorded are kept in memory.
_PROFILED_STEPS, _MOST_PROFILED = "3-7", 1000


class Type(click.ParamType):  # type: ignore[type-arg]  # click 8.1 takes none
    """How a value is read: PARSE returns it, or None for a text that is not WANTED.

    WORDS are for completion. COMPLETE is `file` or `dir`: the value is a path, or several with
    commas, and the shell completes it.
    """

    def __init__(
        self,
        name: str,
        parse: Callable[[str], Value] = str,
        wanted: str = "",
        *,
        words: tuple[str, ...] = (),
        complete: str = "",
    ) -> None:
        self.name = name
        self.parse = parse
        self.wanted = wanted
        self.words = words
        self.complete = complete

    def read(self, text: str) -> Value:
        """Return the value of TEXT; ValueError says what is allowed."""
        value = self.parse(text)
        if value is None:
            raise ValueError(self.wanted)
        return value

    def shell_complete(
        self, ctx: click.Context | None, param: click.Parameter | None, incomplete: str
    ) -> list[Item]:
        """Return the words that start with INCOMPLETE, and let the shell complete a path."""
        del ctx, param
        # Files come first: bash would drop what precedes them.
        paths = [CompletionItem(incomplete, type=self.complete)] if self.complete else []
        earlier, comma, last = incomplete.rpartition(",")
        return [*paths, *among(self.words, last, earlier + comma)]


def among(words: Iterable[str], incomplete: str, before: str = "") -> list[Item]:
    """Return the WORDS that start with INCOMPLETE, after BEFORE in the same word."""
    return [CompletionItem(before + word) for word in words if word.startswith(incomplete)]


def number(minimum: int, maximum: int | None = None, words: tuple[str, ...] = ()) -> Type:
    """Return the type of a whole number from MINIMUM to MAXIMUM, or one of WORDS."""
    most = _MOST if maximum is None else maximum

    def parse(text: str) -> Value:
        word = text.strip().lower()
        is_word = word in words
        return word if is_word else parse_number(word, is_whole=True, minimum=minimum, maximum=most)

    wanted = f"give {number_in_words(is_whole=True, minimum=minimum, maximum=maximum)}"
    ending = f", or one of {', '.join(words)}." if words else "."
    return Type("int", parse, wanted + ending, words=words)


def seconds(minimum: float = 0, *, or_zero: bool = False) -> Type:
    """Return the type of a time of MINIMUM seconds or more, and 0 if OR_ZERO: 90, or 1h30m."""

    def parse(text: str) -> Value:
        value = parse_duration(text)
        is_allowed = value is not None and minimum <= value <= _MOST
        return value if is_allowed or (or_zero and value == 0) else None

    wanted = f"{'0 or ' * or_zero}a number of seconds, {minimum:g} or more"
    return Type("duration", parse, f"give {wanted}, or a time such as 90s, 30m or 1h30m.")


def choice(*words: str, synonyms: Mapping[str, str] | None = None) -> Type:
    """Return the type of one of WORDS; SYNONYMS are other words for them."""
    meant = {word: word for word in words} | dict(synonyms or {})
    wanted = f"give one of {', '.join(words)}."
    return Type("choice", lambda text: meant.get(text.strip().lower()), wanted, words=words)


def _items(text: str) -> tuple[str, ...]:
    return tuple(text.replace(",", " ").split())


def _variable(text: str) -> str | None:
    key, equals, _ = text.partition("=")
    return text if equals and key.isascii() and key.isidentifier() else None


def _ranks(text: str) -> str | None:
    """Return ranks, ranges written out: all, or numbers with commas."""
    if text.strip() == "all":
        return "all"
    spans = [parse_range(part) for part in _items(text)]
    if not spans or any(span is None or span.stop > _MOST_RANKS for span in spans):
        return None
    return ",".join(map(str, dict.fromkeys(number for span in spans for number in span or ())))


BOOL = Type("bool", parse_bool, "give true or false.", words=("true", "false"))
# Never takes the word after it.
FLAG = Type("flag", parse_bool, "give true or false.", words=("true", "false"))
TEXT, FREE = Type("text", str.strip), Type("text")
FILE, FOLDER = Type("text", complete="file"), Type("text", complete="dir")
LIST = Type("list", _items)
VARIABLE = Type("pairs", _variable, "give KEY=VALUE, where KEY is letters, digits and underscores.")
RANKS = Type("list", _ranks, "give all, or ranks such as 0,3 or 0-3.", words=("all",))


# -- values of their own kind ---------------------------------------------------------------------


def _host_count(text: str) -> str | None:
    low, colon, high = text.strip().partition(":")
    # Python refuses to read numbers of thousands of digits.
    is_count = all(is_digits(bound) and len(bound) < 10 for bound in (low, high if colon else low))
    is_valid = is_count and 1 <= int(low) <= int(high if colon else low)
    return text.strip() if is_valid else None


def _wrapper(text: str) -> str | None:
    numbers, _, command = text.partition(":")
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    listed = _ranks(numbers)
    return f"{listed}: {shlex.join(words)}" if listed and words else None


def _profiled(text: str) -> str | None:
    """Return ranks, as above, with the first and the last step that they record."""
    numbers, colon, steps = text.partition(":")
    listed, span = _ranks(numbers), parse_range(steps if colon else _PROFILED_STEPS)
    if not listed or span is None or not span.start or len(span) > _MOST_PROFILED:
        return None
    return f"{listed}:{span.start}-{span.stop - 1}"


def _pattern(text: str) -> str | None:
    with suppress(re.error, OverflowError):
        re.compile(os.fsencode(text))
        return text
    return None


def _log_size(text: str) -> int | None:
    size = parse_size(text)
    return None if size is None or 0 < size < 1024 * 1024 else size


def _job_name(text: str) -> str | None:
    """Return TEXT if it can be part of a folder's name."""
    name = text.strip()
    is_valid = name.isprintable() and not set(name) & set("/ ") and not name.startswith(".")
    return name if is_valid else None


PATTERN = Type("text", _pattern, "this is not a regular expression.")
PORT = number(1, LAST_PORT)
HOST_COUNT = Type("text", _host_count, "give a number of hosts, 1 or more, or MIN:MAX.")
WRAPPER = Type("text", _wrapper, "give 'RANKS: COMMAND', such as '0: nsys profile'.")
PROFILED = Type(
    "text",
    _profiled,
    "give ranks and steps, such as 0,3:10-14; steps count from 1, and are at most "
    f"{_MOST_PROFILED}.",
)
LOG_SIZE = Type("text", _log_size, "give 1M or more, as 100M or 2G, or 0 for no limit.")
JOB_NAME = Type("text", _job_name, "give a name without slashes and spaces, and no dot first.")
