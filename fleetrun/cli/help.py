"""`fleetrun --help`: the commands and the options that people use, or all options by section."""

from __future__ import annotations

import gettext
import os
from collections.abc import Callable, Mapping

from fleetrun.cli.option import GROUPS, Option
from fleetrun.cli.options import KNOWN
from fleetrun.printing import put
from fleetrun.text import wrapped

INTRODUCTION = """\
Usage: fleetrun [OPTIONS] [--] SCRIPT [ARGUMENTS]...
Start PaddlePaddle training: one process per device, on one host or several.

Examples:
  fleetrun train.py                         one process per GPU, else on the CPU
  fleetrun --gpus=0,1 train.py --epochs 3   two GPUs; --epochs is the script's
  fleetrun --ips=node1,node2 train.py       two hosts: the same command on each
  fleetrun --strategy=recommended train.py  faster, with train.py unchanged

Commands:
  logs        show the output of all ranks, of the latest run or any other
  top         show the state of a running job, live
  ui          show all runs on a live page, in the browser of this machine
  report      write a page with charts of one run, or of two side by side
  ps          list your running jobs
  attach      show the console of a job in the background
  stop        end a job
  stacks      show where the ranks of a running job stand
  doctor      check whether this host is fit for a job, and how to fix it
  strategy    show presets and fields, and what takes effect
  verify      compare a strategy with plain Paddle: weights, losses, speed
  tune        find the fastest strategy by training with each
  submit      submit a job to Slurm or Kubernetes
  exec        launch where a command would start Paddle's launcher
  completion  print the script for completion by Tab
"""
MOST_USED = """\
Options:
  --gpus LIST         GPUs, one process each: 0,1 or 0-3 or all
  --nproc_per_node N  number of processes on this host; also auto, gpu, cpu
  --ips LIST          addresses of all hosts, in rank order
  --env KEY=VALUE     set a variable for every process
  --log_dir DIR       folder of the logs [log]
  --tee RANKS         show the output of these ranks: all, 0,3 or 0-3 [0]
  --strategy NAME     recommended, comm_fusion, overlap, ... or a file
  --max_restart N     start again up to N times after a failure [0]
  --hang_timeout S    end the job after so many seconds without progress
  --dry-run           show what would run; start nothing
  --help=all          all options; or one section, such as --help=hosts

Exit codes:
  0 success, N of the rank that failed first, 128+N it was killed by signal N,
  124 hung, 126 or 127 not a program, 2 usage, 3 this host, 4 the hosts did not
  meet, 5 the strategy is not in effect
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
    (
        "5",
        "the strategy is not in effect (--strategy_strict), or not on all ranks; see the report",
    ),
)
NOTES = (
    "Write options with _ or -, as --x=v or --x v. Everything after SCRIPT is passed to it.",
    "SECONDS take units: 90s, 30m, 1h30m.",
    "Precedence: command line, environment, config file, default.",
)
# The texts besides those above and those of options.
WORDS = ("Exit codes", "[default: {}]")

DOMAIN = "fleetrun"
LOCALES = os.path.join(os.path.dirname(os.path.dirname(__file__)), "locale")
_LANGUAGES = ("LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG")
_WIDTH = 100


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
    if section == "screen":
        return f"{translate(INTRODUCTION)}\n{translate(MOST_USED)}"
    tables = {
        name: (title, [row(option, translate) for option in KNOWN if option.group == name])
        for name, title in GROUPS.items()
    }
    codes = [(code, translate(meaning)) for code, meaning in EXIT_CODES]
    lines = [translate(INTRODUCTION)] if section == "all" else []
    for name, (title, rows) in {**tables, "codes": ("Exit codes", codes)}.items():
        if section in {"all", name}:
            lines.append(f"{translate(title)}:")
            for term, meaning in rows:
                lines += [f"  {term}", *(f"      {line}" for line in wrapped(meaning, _WIDTH - 6))]
            lines.append("")
    for note in NOTES:
        lines += wrapped(translate(note), _WIDTH)
    return "\n".join((*lines, ""))


def row(option: Option, translate: Callable[[str], str] = str) -> tuple[str, str]:
    """Return OPTION's spelling and meaning for a help text."""
    shown = [translate(option.help or "")] if option.help else []
    if option.usual not in (None, "false"):
        shown.append(translate("[default: {}]").format(option.usual))
    if option.env:
        shown.append(f"[{', '.join(f'${name}' for name in option.env)}]")
    return ", ".join(option.opts) + option.value_shown, "  ".join(shown)
