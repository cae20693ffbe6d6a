"""Converts text to typed values and back: booleans, numbers, sizes, durations, ranges; pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

_YES = frozenset(("1", "true", "yes", "on", "y", "t"))
NO = frozenset(("0", "false", "no", "off", "n", "f"))
# Anything larger is a typing error.
_LARGEST = 1e300


def boolean(value: object) -> bool | None:
    """Return VALUE as a boolean; None if it is not one.

    >>> boolean("Yes"), boolean(0), boolean(False), boolean("2")
    (True, False, False, None)
    """
    if isinstance(value, str):
        word = value.strip().lower()
        return True if word in _YES else False if word in NO else None
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    return None


def number(
    value: object, *, is_whole: bool, minimum: float | None, maximum: float
) -> int | float | None:
    """Return VALUE as a number from MINIMUM to MAXIMUM; None if that is impossible or lossy.

    >>> number("8", is_whole=True, minimum=1, maximum=9), number(8.5, is_whole=True, minimum=1,
    ...        maximum=9), number("nan", is_whole=False, minimum=None, maximum=9)
    (8, None, None)
    """
    converted = _whole(value) if is_whole else _real(value)
    if converted is None or (minimum is not None and converted < minimum) or converted > maximum:
        return None
    return converted


def _whole(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        try:
            return int(value) if value.isascii() else None
        except ValueError:
            return None
    real = _real(value)
    return int(real) if real is not None and real == int(real) else None


def _real(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    # Python also reads the digits of other scripts.
    if isinstance(value, str) and not value.isascii():
        return None
    try:
        real = float(value)
    except (ValueError, OverflowError):
        return None
    # Neither NaN nor infinity is a setting.
    return real if -_LARGEST < real < _LARGEST else None


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


# -- sizes, durations, ranges ---------------------------------------------------------------------

_UNITS_S = {
    word: seconds
    for words, seconds in (
        ("d day days", 86400),
        ("h hr hrs hour hours", 3600),
        ("m min mins minute minutes", 60),
        ("s sec secs second seconds", 1),
        ("ms", 0.001),
    )
    for word in words.split()
}
# More digits are a typing error.
_MOST_DIGITS, _RANGE_DIGITS = 12, 9
_DIGITS = rf"\d{{1,{_MOST_DIGITS}}}(?:\.\d{{0,{_MOST_DIGITS}}})?"
_DURATION = rf"(?:{_DIGITS}\s*(?:{'|'.join(_UNITS_S)})\s*)+"


def size(count: float, *, is_short: bool = False) -> str:
    """Return COUNT bytes with a unit.

    >>> size(512), size(64 * 2**20), size(23.54 * 2**30), size(1023 * 2**10)
    ('512 B', '64 MiB', '23.5 GiB', '1023 KiB')
    >>> [size(count, is_short=True) for count in (0, 900 * 2**10, 3 * 2**30, 15.26 * 2**30)]
    ['0', '900K', '3.0G', '15G']
    """
    unit = ""
    for unit in ("", "K", "M", "G", "T"):
        if count < (1000 if is_short else 1024) or unit == "T":
            break
        count /= 1024
    if is_short:
        return f"{count:.{int(count < 10 and unit in ('G', 'T'))}f}{unit}"
    number = f"{count:.3g}" if count < 1000 else f"{count:.0f}"
    return f"{number} {unit}iB" if unit else f"{number} B"


def parse_size(text: str) -> int | None:
    """Return the bytes of TEXT, whose units are powers of 1024; None if invalid.

    >>> parse_size("1.5G"), parse_size("100 MiB"), parse_size("much")
    (1610612736, 104857600, None)
    """
    word = text.strip().lower()
    if is_digits(word) and len(word) <= _MOST_DIGITS:
        return int(word)

    match = re.fullmatch(rf"({_DIGITS})\s*([kmgt]?)(?:i?b)?", word, re.ASCII)
    return int(float(match[1]) * 1024 ** " kmgt".find(match[2] or " ")) if match else None


def counted(count: int, noun: str) -> str:
    """Return COUNT and NOUN, in the plural unless COUNT is 1.

    >>> counted(1, "host"), counted(2, "host"), counted(0, "process")
    ('1 host', '2 hosts', '0 processes')
    """
    ending = "es" if noun.endswith("s") else "s"
    return f"{count} {noun}{ending * (count != 1)}"


def duration(seconds: float, *, is_short: bool = False) -> str:
    """Return SECONDS with units.

    >>> [duration(seconds) for seconds in (3.21, 75, 7384, 200000)]
    ['3.2 s', '1 min 15 s', '2 h 03 min', '2 d 07 h']
    >>> [duration(seconds, is_short=True) for seconds in (3.21, 75, 7384, 200000)]
    ['3s', '1m15s', '2h03m', '2d07h']
    """
    if seconds < 60 and not is_short:
        return f"{seconds:.1f} s"
    whole_s = max(0, int(seconds))
    for unit, part, part_s in (("d", "h", 3600), ("h", "min", 60), ("min", "s", 1)):
        number, rest = divmod(whole_s // part_s, _UNITS_S[unit] // part_s)
        if number:
            text = f"{number:.0f} {unit} {rest:02.0f} {part}"
            return text.replace(" ", "").replace("min", "m") if is_short else text
    return f"{whole_s}s"


def parse_duration(text: str) -> float | None:
    """Return the seconds of TEXT; None if invalid. A plain number is seconds.

    >>> [parse_duration(text) for text in ("90", "1h30m", "1.5 min", "2 hours", "soon")]
    [90.0, 5400.0, 90.0, 7200.0, None]
    """
    word = text.strip().lower()
    if is_digits(word):
        return _real(word)

    if re.fullmatch(_DURATION, word, re.ASCII):
        parts = re.findall(rf"({_DIGITS})\s*([a-z]+)", word)
        return sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    return _real(word)


def pattern(text: str) -> re.Pattern[bytes]:
    """Return the regular expression TEXT, for bytes; ValueError if it is invalid."""
    try:
        return re.compile(text.encode(errors="surrogateescape"))
    except (re.error, OverflowError) as error:
        raise ValueError(f"this is not a regular expression ({error}).") from None


def ranges(numbers: Iterable[int], between: str = ", ") -> str:
    """Write NUMBERS in order, consecutive ones as ranges.

    >>> ranges([0, 1, 2, 5, 7, 6]), ranges((0, 1, 32), ",")
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


def numbers(text: str) -> tuple[int, ...]:
    r"""Return the numbers of TEXT, as the kernel lists processors.

    >>> numbers("0-2,8\n"), numbers("")
    ((0, 1, 2, 8), ())
    """
    spans = map(parse_range, text.split(","))
    return tuple(number for span in spans for number in span or ())


def parse_range(text: str) -> range | None:
    """Return the numbers of TEXT, a number or a range; None if invalid or descending.

    >>> parse_range("0-3"), parse_range("7"), parse_range("3-1"), parse_range("a")
    (range(0, 4), range(7, 8), None, None)
    """
    first, dash, last = (part.strip() for part in text.partition("-"))
    last = last if dash else first
    is_valid = all(is_digits(part) and len(part) <= _RANGE_DIGITS for part in (first, last))
    return (range(int(first), int(last) + 1) if is_valid else range(0)) or None
