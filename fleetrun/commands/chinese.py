"""Help texts in Chinese: the translation (gettext), and lines of characters of two columns."""

from __future__ import annotations

import gettext
import os
import re
from typing import TYPE_CHECKING

from click import HelpFormatter

from fleetrun.plan.visible import columns

if TYPE_CHECKING:
    from collections.abc import Iterable

DOMAIN = "fleetrun"
LOCALES = os.path.join(os.path.dirname(os.path.dirname(__file__)), "locale")
# Between two of these a line may end: a word or a character of two columns, with the brackets that
# open before it and the stops behind it; or blanks.
_WIDE = "\u2e80-\u9fff\uff00-\uffef\u3001-\u303f"
_OPEN, _STOPS = "\uff08", "\uff0c\u3002\uff1a\uff1b\u3001\uff09\uff1f\uff01"
_PIECE = re.compile(rf"{_OPEN}*(?:[^\s{_WIDE}]+|[{_WIDE}])[{_STOPS}]*|\s+")


def translation(language: str) -> gettext.NullTranslations:
    """Return the translation into LANGUAGE, or none where there is none."""
    return gettext.translation(DOMAIN, LOCALES, [language], fallback=True)


class WideFormatter(HelpFormatter):
    """Lays out texts in which a character may take two columns, and which have few blanks."""

    def write_text(self, text: str) -> None:
        """Write TEXT as a paragraph."""
        indent = " " * self.current_indent
        for line in broken(text, self.width - self.current_indent):
            self.write(f"{indent}{line}\n")

    def write_dl(
        self,
        rows: Iterable[tuple[str, str]],
        col_max: int = 30,
        col_spacing: int = 2,
    ) -> None:
        """Write ROWS of terms and what they mean."""
        rows = list(rows)
        widest = max((columns(term) for term, _ in rows), default=0)
        begin = self.current_indent + min(widest, col_max) + col_spacing
        for term, said in rows:
            line = f"{'':{self.current_indent}}{term}"
            gap = begin - columns(line)
            first, *more = broken(said, max(self.width - begin, 10)) or [""]
            if gap < col_spacing:
                self.write(f"{line}\n")
                more = [first, *more]
            else:
                self.write(f"{line}{'':{gap}}{first}".rstrip() + "\n")
            for each in more:
                self.write(f"{'':{begin}}{each}\n")


def broken(text: str, room: int) -> list[str]:
    """Break TEXT into lines of at most ROOM columns, where a word allows.

    >>> broken("每个设备一个进程 on one host", 10)
    ['每个设备一', '个进程 on', 'one host']
    """
    lines = [""]
    for piece in _PIECE.findall(text):
        if columns(lines[-1]) + columns(piece.rstrip()) > room and lines[-1]:
            lines.append("")
        if lines[-1] or not piece.isspace():
            lines[-1] += " " if piece.isspace() else piece
    return [line.rstrip() for line in lines if line.strip()]
