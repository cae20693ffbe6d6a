"""What people write, as typed values: booleans, and numbers within bounds; pure."""

# No `from __future__ import annotations` here, for the reason given in options.py.

_YES = frozenset(("1", "true", "yes", "on", "y", "t"))
NO = frozenset(("0", "false", "no", "off", "n", "f"))
# What is larger is a slip, and no number of anything.
_LARGEST = 1e300


def boolean(value: object) -> bool | None:
    """Return what VALUE means as true or false; None if it means neither.

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
    """Return VALUE as a number from MINIMUM to MAXIMUM; None if it is none, or loses a part.

    >>> number("8", is_whole=True, minimum=1, maximum=9), number(8.5, is_whole=True, minimum=1,
    ...        maximum=9), number("nan", is_whole=False, minimum=None, maximum=9)
    (8, None, None)
    """
    found = _whole(value) if is_whole else _real(value)
    if found is None or (minimum is not None and found < minimum) or found > maximum:
        return None
    return found


def _whole(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            return None
    found = _real(value)
    return int(found) if found is not None and found == int(found) else None


def _real(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    # Neither NaN nor infinity is a setting.
    return found if -_LARGEST < found < _LARGEST else None


def number_in_words(
    *, is_whole: bool, minimum: float | None, maximum: float | None, unit: str = ""
) -> str:
    """Return which number is wanted, for an error message.

    >>> number_in_words(is_whole=True, minimum=1, maximum=65536, unit="MB")
    'a whole number of MB from 1 to 65536'
    """
    said = ("a whole number" if is_whole else "a number") + (f" of {unit}" if unit else "")
    if maximum is not None:
        return f"{said} from {minimum or 0:g} to {maximum:g}"
    return said if minimum is None else f"{said}, {minimum:g} or more"
