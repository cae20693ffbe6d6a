"""Decides whether fleetrun's own lines are coloured, and colours them; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TextIO

AUTO, ALWAYS, NEVER = _CHOICES = ("auto", "always", "never")
NAME = "fleetrun: "
_HEADING, _OPTION, _NAME, _FAULT, _END = "\x1b[1m", "\x1b[36m", "\x1b[1m", "\x1b[1;31m", "\x1b[0m"
# Headings that are followed by text on their line.
_HEADINGS = ("Usage", "Exit codes", "More", "用法", "退出码", "更多")
_WIDE_COLON = "\uff1a"
# The starts of a line that is a term, although no gap follows it.
_TERMS = ("fleetrun ", "-", "eval ")


def on_stream(choice: str, environ: Mapping[str, str], stream: TextIO | None) -> bool:
    """Whether to colour output to STREAM; None: it is closed."""
    return is_wanted(choice, environ, is_terminal=stream is not None and stream.isatty())


def is_wanted(choice: str, environ: Mapping[str, str], *, is_terminal: bool) -> bool:
    """Whether to colour, by --color, $NO_COLOR and $TERM.

    >>> is_wanted("auto", {"TERM": "xterm"}, is_terminal=True)
    True
    >>> is_wanted("auto", {"TERM": "xterm", "NO_COLOR": "1"}, is_terminal=True)
    False
    """
    if choice in {ALWAYS, NEVER}:
        return choice == ALWAYS
    return (
        is_terminal and not environ.get("NO_COLOR") and environ.get("TERM", "") not in {"", "dumb"}
    )


def choice(words: Sequence[str]) -> str:
    """Return the value of --color before the script, even if the command line is invalid.

    >>> choice(["--gpus", "0", "--color=never", "train.py"]), choice(["train.py", "--color=never"])
    ('never', 'auto')
    >>> choice(["--color", "--gsup=0", "--color=never", "--color=pink"])
    'never'
    """
    chosen = AUTO
    for at, word in enumerate(words):
        if word == "--" or word.endswith(".py"):
            break
        value = word.removeprefix("--color=")
        if word == "--color":
            following = words[at + 1 : at + 2]
            value = following[0] if following and following[0] in _CHOICES else ALWAYS
        if value in _CHOICES and word.startswith("--color"):
            chosen = value
    return chosen


def prefix(*, is_coloured: bool, is_fault: bool = False) -> str:
    """Return the prefix of fleetrun's own lines."""
    if not is_coloured:
        return NAME
    return f"{_FAULT if is_fault else _NAME}{NAME.rstrip()}{_END} "


def on_page(text: str) -> str:
    """Return a help TEXT with coloured headings, options and commands."""
    return "\n".join(map(_line, text.split("\n")))


def _line(line: str) -> str:
    heading, colon, rest = line.partition(_WIDE_COLON if _WIDE_COLON in line else ":")
    if colon and line[:1].isalpha() and (not rest or heading in _HEADINGS):
        return f"{_HEADING}{heading}{colon}{_END}{rest}"
    if line.startswith("  ") and not line.startswith("   "):
        term, gap, rest = line[2:].partition("  ")
        if not gap and not term.startswith(_TERMS):
            # The continuation of a paragraph.
            return line
        return f"  {_OPTION}{term}{_END}{gap}{rest}"
    return line
