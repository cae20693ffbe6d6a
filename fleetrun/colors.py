"""Whether fleetrun's own lines are coloured, and how; pure."""

# No `from __future__ import annotations` here, for the reason given in options.py.
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TextIO

AUTO, ALWAYS, NEVER = "auto", "always", "never"
NAME = "fleetrun: "
_HEADING, _OPTION, _NAME, _FAULT, _END = "\x1b[1m", "\x1b[36m", "\x1b[1m", "\x1b[1;31m", "\x1b[0m"
# With something behind them in their line.
_HEADINGS = ("Usage", "Exit codes", "More", "用法", "退出码", "更多")
_WIDE_COLON = "\uff1a"
# What a line in which no gap ends the term begins with, if it is one.
_TERMS = ("fleetrun ", "-", "eval ")


def on_stream(choice: str, environ: Mapping[str, str], stream: "TextIO | None") -> bool:
    """Whether to colour what is written to STREAM; None: it is closed."""
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
    """Return what --color says before the script, in a command line that may be wrong elsewhere.

    >>> choice(["--gpus", "0", "--color=never", "train.py"]), choice(["train.py", "--color=never"])
    ('never', 'auto')
    >>> choice(["--color", "--gsup=0", "--color=never", "--color=pink"])
    'never'
    """
    from fleetrun import argv  # only for help and mistakes

    given = [one for one in argv.legible(words).settings if one.option.name == "color"]
    return next((str(one.value()) for one in reversed(given) if one.is_readable), AUTO)


def prefix(*, is_coloured: bool, is_fault: bool = False) -> str:
    """Return what fleetrun's own lines begin with."""
    if not is_coloured:
        return NAME
    return f"{_FAULT if is_fault else _NAME}{NAME.rstrip()}{_END} "


def on_page(text: str) -> str:
    """Return a help TEXT with colour for its headings, and the options and commands it is about."""
    return "\n".join(map(_line, text.split("\n")))


def _line(line: str) -> str:
    heading, colon, rest = line.partition(_WIDE_COLON if _WIDE_COLON in line else ":")
    if colon and line[:1].isalpha() and (not rest or heading in _HEADINGS):
        return f"{_HEADING}{heading}{colon}{_END}{rest}"
    if line.startswith("  ") and not line.startswith("   "):
        term, gap, rest = line[2:].partition("  ")
        if not gap and not term.startswith(_TERMS):
            # A paragraph goes on.
            return line
        return f"  {_OPTION}{term}{_END}{gap}{rest}"
    return line
