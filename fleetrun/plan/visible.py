"""Text that any terminal can show: control characters escaped, lines no wider than they may be."""

from __future__ import annotations

import re
from unicodedata import combining, east_asian_width

_DOTS = "..."
# A line may end after blanks, and before or after a character of two columns, together with its
# opening brackets and punctuation.
_WIDE = "\u2e80-\u9fff\uff00-\uffef\u3001-\u303f"
_STOPS = "\uff0c\u3002\uff1a\uff1b\u3001\uff09\uff1f\uff01"
_PIECE = rf"\uff08*(?:[^\s{_WIDE}]+|[{_WIDE}])[{_STOPS}]*|\s+"


def visible(text: str) -> str:
    r"""Return TEXT with control and unprintable characters escaped.

    >>> print(visible("a\nb\x1b[1m\udce9 é"))
    a\nb\x1b[1m\xe9 é
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def visible_lines(text: str) -> str:
    r"""Return TEXT with each of its lines made visible, tabs as blanks.

    >>> print(visible_lines("a\tb\n\x1b[1m"))
    a       b
    \x1b[1m
    """
    return "\n".join(visible(line.expandtabs()) for line in text.split("\n"))


def _escape(char: str) -> str:
    if "\udc80" <= char <= "\udcff":
        return f"\\x{ord(char) - 0xDC00:02x}"
    return char.encode("unicode_escape").decode()


def columns(text: str) -> int:
    """Return the width of TEXT in columns of a terminal.

    >>> columns("job"), columns("训练")
    (3, 4)
    """
    if text.isascii():
        return len(text)

    return sum(
        0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text
    )


def wrapped(text: str, room: int, indent: str = "") -> list[str]:
    """Break TEXT into lines of at most ROOM columns, between words; 0: one line.

    INDENT begins all but the first.

    >>> wrapped("每个设备一个进程 on one host", 10)
    ['每个设备一', '个进程 on', 'one host']
    >>> wrapped("161 gradients in 6 allreduces", 17, "  ")
    ['161 gradients in', '  6 allreduces']
    """
    if room <= 0:
        return [text] if text else []
    lines, empty = [""], ""

    for piece in re.findall(_PIECE, text):
        if lines[-1] != empty and room < columns(lines[-1] + piece.rstrip()):
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


def elided(text: str, room: int) -> str:
    """Return TEXT, elided in the middle if it takes more than ROOM columns.

    >>> elided("/home/me/a/very/long/way/log", 16)
    '/home/...way/log'
    """
    if columns(text) <= room:
        return text
    kept = room - len(_DOTS)
    # The end of a path says more than its beginning.
    tail = _fitting(text[::-1], kept - kept // 2)[::-1]
    return f"{_fitting(text, kept - columns(tail))}{_DOTS}{tail}"


def _fitting(text: str, room: int) -> str:
    """Return the longest beginning of TEXT that takes at most ROOM columns."""
    length, taken = 0, 0
    for char in text:
        taken += columns(char)
        if taken > room:
            break
        length += 1
    return text[:length]
