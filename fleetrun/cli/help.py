"""`fleetrun --help`: the commands and the options that people use, or all options by section."""

from __future__ import annotations

import gettext
import os
from collections.abc import Callable, Iterable, Iterator, Mapping

from fleetrun.cli.option import GROUPS, Option
from fleetrun.cli.options import KNOWN
from fleetrun.cli.parser import COMMANDS
from fleetrun.printing import put
from fleetrun.text import wrapped

INTRODUCTION = """\
Usage: fleetrun [OPTIONS] [--] SCRIPT [ARGUMENTS]...
Start PaddlePaddle training: one process per device, on one host or several.

Examples:
  fleetrun train.py                         one process per GPU, else on the CPU
  fleetrun --gpus=0,1 train.py --epochs 3   two GPUs; --epochs is the script's
  fleetrun --ips=node1,node2 train.py       two hosts: the same command on each
  fleetrun --strategy=recommended train.py  fewer messages, train.py unchanged
"""
EXIT_CODES = (
    ("0", "every process succeeded"),
    ("N", "the exit code of the process that failed first"),
    ("128+N", "signal N killed the process that failed first"),
    ("124", "the job hung, and --hang_timeout was given"),
    ("126, 127", "a process could not be started: not a program, or not found"),
    ("129, 130, 143", "fleetrun lost its terminal, was interrupted (Ctrl-C) or stopped (SIGTERM)"),
    ("2", "invalid option or value, on the command line, in a variable or in the config file"),
    ("3", "this host lacks what the command needs: device, port, Python script, system"),
    ("4", "the hosts did not meet"),
    ("5", "the strategy is not in effect (--strategy_strict), or not on all ranks"),
)
NOTES = (
    "Write options with _ or -, as --x=v or --x v. Everything after SCRIPT is passed to it.",
    "SECONDS take units: 1h30m. Precedence: command line, environment, config file, default.",
)
# The texts besides those above and those of options.
WORDS = ("Commands", "Exit codes", "[default: {}]", *(row[1] for row in COMMANDS.values()))

DOMAIN = "fleetrun"
LOCALES = os.path.join(os.path.dirname(os.path.dirname(__file__)), "locale")
_LANGUAGES = ("LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG")
_WIDTH, _INDENT = 80, 20


def show(section: str, environ: Mapping[str, str]) -> int:
    """Print SECTION of the help, in Chinese if the locale is."""
    return put(text(section, translation(environ)))


def translation(environ: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that translates texts if the locale is Chinese; messages stay English."""
    locale = next((environ[name] for name in _LANGUAGES if environ.get(name)), "")
    # Only the first of `a:b` counts: English needs no translation.
    language = locale.partition(":")[0]
    if not language.startswith("zh"):
        return str
    return gettext.translation(DOMAIN, LOCALES, [language], fallback=True).gettext


def text(section: str = "screen", translate: Callable[[str], str] = str) -> str:
    """Return the help: the screen, all, codes, or one of GROUPS."""
    tables = {
        "commands": ("Commands", [(name, translate(does)) for name, (_, does) in COMMANDS.items()])
    }
    for name, title in GROUPS.items():
        rows = [row(option, translate) for option in KNOWN if option.group == name]
        tables[name] = (title, rows)
    tables["codes"] = ("Exit codes", [(code, translate(meaning)) for code, meaning in EXIT_CODES])
    several = {"screen": ("commands", "common", "codes"), "all": tuple(tables)}
    notes = [line for note in NOTES for line in wrapped(translate(note), _WIDTH)]
    lines = [translate(INTRODUCTION), *notes, ""] if section in several else []
    for name in several.get(section, (section,)):
        title, rows = tables[name]
        lines += [f"{translate(title)}:", *_lines(rows), ""]
    return "\n".join(lines)


def _lines(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield the lines of a table of terms and meanings."""
    for term, meaning in rows:
        lines = [" " * _INDENT + line for line in wrapped(meaning, _WIDTH - _INDENT)]
        if lines and len(term) + 4 <= _INDENT:
            lines[0] = f"  {term}{lines[0][len(term) + 2 :]}"
        else:
            lines.insert(0, f"  {term}")
        yield from lines


def row(option: Option, translate: Callable[[str], str] = str) -> tuple[str, str]:
    """Return OPTION's spelling and meaning for a help text."""
    shown = [translate(option.help or "")] if option.help else []
    if option.usual not in (None, "false"):
        shown.append(translate("[default: {}]").format(option.usual))
    if option.env:
        shown.append(f"[{', '.join(f'${name}' for name in option.env)}]")
    return ", ".join(option.opts) + option.value_shown, "  ".join(shown)
