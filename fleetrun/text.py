"""Reads typed values from text and writes them; text that any terminal can show; likely names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from unicodedata import east_asian_width

_YES = frozenset(("1", "true", "yes", "on", "y", "t"))
FALSE_WORDS = frozenset(("0", "false", "no", "off", "n", "f"))
# Anything larger is a typing error.
_LARGEST = 1e300


def parse_bool(value: object) -> bool | None:
    """Return VALUE as a boolean; None if it is not one.

    >>> parse_bool("Yes"), parse_bool(0), parse_bool(False), parse_bool("2")
    (True, False, False, None)
    """
    if isinstance(value, str):
        word = value.strip().lower()
        return True if word in _YES else False if word in FALSE_WORDS else None
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    return None


def parse_number(
    value: object, *, is_whole: bool, minimum: float | None, maximum: float
) -> int | float | None:
    """Return VALUE as a number from MINIMUM to MAXIMUM; None if that is impossible or lossy.

    >>> [parse_number(text, is_whole=True, minimum=1, maximum=9) for text in ("8", 8.5, "nan")]
    [8, None, None]
    """
    # Python also reads the digits of other scripts, and underscores between digits.
    if not isinstance(value, int | float | str) or isinstance(value, bool):
        return None
    if isinstance(value, str) and (not value.isascii() or "_" in value):
        return None
    try:
        number = int(value) if is_whole and isinstance(value, str) else float(value)
    except (ValueError, OverflowError):
        return None
    # Neither NaN nor infinity is a setting.
    if not (-_LARGEST if minimum is None else minimum) <= number <= min(maximum, _LARGEST):
        return None
    if is_whole and number != int(number):
        return None
    return int(number) if is_whole else number


def number_in_words(
    *, is_whole: bool, minimum: float | None, maximum: float | None, unit: str = ""
) -> str:
    """Return the allowed numbers in words, for an error message.

    >>> number_in_words(is_whole=True, minimum=1, maximum=65536, unit="MB")
    'a whole number of MB from 1 to 65536'
    """
    words = ("a whole number" if is_whole else "a number") + (f" of {unit}" if unit else "")
    if maximum is not None:
        return f"{words} from {minimum or 0:g} to {maximum:g}"
    return words if minimum is None else f"{words}, {minimum:g} or more"


_UNITS_S = {"d": 86400, "h": 3600, "min": 60, "m": 60, "s": 1, "ms": 0.001}
# More digits are a typing error.
_DIGITS, _RANGE_DIGITS = r"\d{1,12}(?:\.\d{0,12})?", 9
_DURATION = rf"(?:{_DIGITS}\s*(?:{'|'.join(_UNITS_S)})\s*)+"


def format_size(count: float) -> str:
    """Return COUNT bytes with a unit.

    >>> [format_size(count) for count in (512, 64 * 2**20, 23.54 * 2**30, 1023 * 2**10)]
    ['512 B', '64 MiB', '23.5 GiB', '1023 KiB']
    """
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if count < 1024:
            break
        count, unit = count / 1024, larger
    return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"


def parse_size(text: str) -> int | None:
    """Return the bytes of TEXT, whose units are powers of 1024; None if invalid.

    >>> parse_size("1.5G"), parse_size("100 MiB"), parse_size("much")
    (1610612736, 104857600, None)
    """
    match = re.fullmatch(rf"({_DIGITS})\s*([kmgt]?)(?:i?b)?", text.strip().lower(), re.ASCII)
    return int(float(match[1]) * 1024 ** " kmgt".find(match[2] or " ")) if match else None


def counted(count: int, noun: str) -> str:
    """Return COUNT and NOUN, in the plural unless COUNT is 1.

    >>> counted(1, "host"), counted(2, "host"), counted(0, "process")
    ('1 host', '2 hosts', '0 processes')
    """
    ending = "es" if noun.endswith("s") else "s"
    return f"{count} {noun}{ending * (count != 1)}"


def format_duration(seconds: float) -> str:
    """Return SECONDS with units.

    >>> [format_duration(seconds) for seconds in (3.21, 75, 7384, 200000)]
    ['3.2 s', '1 min 15 s', '2 h 03 min', '2 d 07 h']
    """
    for unit, part, part_s in (("d", "h", 3600), ("h", "min", 60), ("min", "s", 1)):
        number, rest = divmod(int(seconds) // part_s, _UNITS_S[unit] // part_s)
        if number > 0:
            return f"{number:.0f} {unit} {rest:02.0f} {part}"
    return f"{seconds:.1f} s"


def parse_duration(text: str) -> float | None:
    """Return the seconds of TEXT; None if invalid. A plain number is seconds.

    >>> [parse_duration(text) for text in ("90", "1h30m", "1.5 min", "soon")]
    [90.0, 5400.0, 90.0, None]
    """
    word = text.strip().lower()
    if re.fullmatch(_DURATION, word, re.ASCII):
        parts = re.findall(rf"({_DIGITS})\s*([a-z]+)", word)
        return sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    return parse_number(word, is_whole=False, minimum=None, maximum=_LARGEST)


def format_ranges(numbers: Iterable[int], between: str = ", ") -> str:
    """Write NUMBERS in order, consecutive ones as ranges.

    >>> format_ranges([0, 1, 2, 5, 7, 6]), format_ranges((0, 1, 32), ",")
    ('0-2, 5-7', '0-1,32')
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return between.join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def is_digits(text: str) -> bool:
    """Whether TEXT has the digits 0-9 alone; `isdigit` also takes superscripts and other scripts'.

    >>> is_digits("12"), is_digits("²"), is_digits("-1"), is_digits("")
    (True, False, False, False)
    """
    return text.isascii() and text.isdigit()


def parse_range(text: str) -> range | None:
    """Return the numbers of TEXT, a number or a range; None if invalid or descending.

    >>> parse_range("0-3"), parse_range("7"), parse_range("3-1"), parse_range("a")
    (range(0, 4), range(7, 8), None, None)
    """
    first, dash, last = (part.strip() for part in text.partition("-"))
    last = last if dash else first
    is_valid = all(is_digits(part) and len(part) <= _RANGE_DIGITS for part in (first, last))
    return (range(int(first), int(last) + 1) if is_valid else range(0)) or None


# A line may end after blanks, and before or after a character of two columns, together with its
# opening brackets and punctuation.
_WIDE = "\u2e80-\u9fff\uff00-\uffef\u3001-\u303f"
_STOPS = "\uff0c\u3002\uff1a\uff1b\u3001\uff09\uff1f\uff01"
_PIECE = rf"\uff08*(?:[^\s{_WIDE}]+|[{_WIDE}])[{_STOPS}]*|\s+"


def visible(text: str) -> str:
    r"""Return TEXT with control and unprintable characters escaped.

    >>> print(visible("a\nb\x1b[1m é"))
    a\nb\x1b[1m é
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def visible_lines(text: str) -> str:
    """Return TEXT with each of its lines made visible, tabs as blanks."""
    return "\n".join(visible(line.expandtabs()) for line in text.split("\n"))


def display_width(text: str) -> int:
    """Return the width of TEXT in columns of a terminal.

    >>> display_width("job"), display_width("训练")
    (3, 4)
    """
    return len(text) + sum(east_asian_width(char) in "WF" for char in text)


def wrapped(text: str, room: int, indent: str = "") -> list[str]:
    """Break TEXT between words into lines of ROOM columns, 0: one line; INDENT begins the others.

    >>> wrapped("每个设备一个进程 on one host", 10, "  ")
    ['每个设备一', '  个进程', '  on one', '  host']
    """
    if room <= 0:
        return [text] if text else []
    lines, empty = [""], ""
    for piece in re.findall(_PIECE, text):
        if lines[-1] != empty and room < display_width(lines[-1] + piece.rstrip()):
            lines[-1] = lines[-1].rstrip()
            lines.append(empty := indent)
        if lines[-1] != empty or not piece.isspace():
            lines[-1] += " " * len(piece) if piece.isspace() else piece
    return [*lines[:-1], lines[-1].rstrip()] if lines[-1] else []


def sentence(words: str) -> str:
    """Return WORDS with a capital letter, unless a file name or option comes first.

    >>> sentence("rank 0 is late."), sentence("fleetrun.yaml:1: grace=soon")
    ('Rank 0 is late.', 'fleetrun.yaml:1: grace=soon')
    """
    is_word = words.partition(" ")[0].rstrip(",:").isalpha()
    return words[:1].upper() + words[1:] if is_word else words


def closest(name: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """Return the name of KNOWN most like NAME, or equal to its first word, ignoring case."""
    from difflib import get_close_matches  # takes a millisecond, and only mistakes need it

    spellings = {spelling.lower(): spelling for spelling in known}
    near = get_close_matches(name.lower(), spellings, n=1, cutoff=likeness)
    return spellings[near[0]] if near else spellings.get(re.split("[-_]", name.lower())[0])


def suggestion(name: str, known: Iterable[str], otherwise: str = "", prefix: str = "") -> str:
    """Return the end of a sentence about the unknown NAME; PREFIX is not part of KNOWN.

    >>> suggestion("ampp", ["amp"]), suggestion("x", ["amp"]), suggestion("x", ["amp"], "use amp.")
    ('; did you mean amp?', '.', '; use amp.')
    """
    suggestion = closest(name, known)
    if suggestion is not None:
        return f"; did you mean {prefix}{suggestion}?"
    return f"; {otherwise}" if otherwise else "."
