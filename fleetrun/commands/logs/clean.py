"""Removes control sequences from the output of ranks: colours, titles, cursor moves, bells."""

from __future__ import annotations

import re

# ECMA-48: control sequences, strings (such as a title, to their end or the end of the line), other
# escapes, and control characters except tab, newline and return. C1 in UTF-8.
_ACTS = re.compile(
    rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[ -/]*[0-~])?"
    rb"|\xc2[\x80-\x9f]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]"
)
# An incomplete sequence at the end of what has been read.
_BEGUN = re.compile(rb"(?:\xc2|\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b\n]*\x1b?|[ -/]*)?)\Z")


def cleaned(text: bytes) -> bytes:
    r"""Return TEXT without control sequences.

    >>> cleaned(b"\x1b[1;31mloss\x1b[0m \x1b]0;title\x07is 3\r\n")
    b'loss is 3\r\n'
    """
    return _ACTS.sub(b"", text)


class Cleaner:
    """Cleans text that arrives in pieces."""

    def __init__(self) -> None:
        self._begun = b""

    def feed(self, piece: bytes, *, is_last: bool = False) -> bytes:
        """Return the text of PIECE, and of what was held back, that can be shown."""
        text = self._begun + piece
        begun = None if is_last else _BEGUN.search(text)
        end = len(text) if begun is None else begun.start()
        self._begun = text[end:]
        return cleaned(text[:end])
