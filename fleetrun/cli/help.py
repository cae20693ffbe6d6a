"""`fleetrun --help`: one screen, and the options by section."""

from __future__ import annotations

import gettext
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from click import HelpFormatter

from fleetrun.cli.option import GROUPS, Option
from fleetrun.cli.options import KNOWN
from fleetrun.strategy import load
from fleetrun.text import wrapped

SCREEN = """\
Usage: fleetrun [OPTIONS] [--] SCRIPT [ARGUMENTS]...
Start PaddlePaddle training: one process per device, on one host or several.
Examples:
  fleetrun train.py                         one process per GPU, else on the CPU
  fleetrun --gpus=0,1 train.py --epochs 3   two GPUs; --epochs is the script's
  fleetrun --nproc_per_node=2 -m pkg.train  a module, two processes
  fleetrun --ips=node1,node2 train.py       two hosts: the same command on each
  fleetrun --strategy=recommended train.py  faster; train.py unchanged
Most used:
  --gpus LIST         GPUs, one process each: 0,1 or 0-3 or all
  --nproc_per_node N  processes on this host (also auto, gpu, cpu)
  --ips LIST          addresses of all hosts, in rank order
  --log_dir DIR       folder of the logs [log]; --tee shows more ranks than one
  --strategy NAME     recommended, comm_fusion, overlap, ... (--help=strategy)
  --max_restart N     start again after a failure; --hang_timeout S: or a hang
  --dry-run           what would run; nothing starts; --env KEY=X: a variable
Exit codes: 0 success, N the first failed rank's, 128+N its signal, 124 hung,
  126, 127 no program, 2 usage, 3 host, 4 hosts did not meet, 5 strategy_strict
Commands: logs (all ranks' output), top (live state), ui (live, in a browser),
  report (an HTML page), stacks (where ranks stand), ps (jobs), attach, stop,
  doctor (check hosts), strategy (presets), verify (same results), tune (speed),
  on (hosts by ssh), submit (Slurm, k8s), exec (other launchers), completion
More: --help=all, or common, strategy, devices, hosts, job, servers, codes
"""
_WIDTH = 100
ABOUT = "Start PaddlePaddle training: one process per device, on one host or several."
_USAGE = "[OPTIONS] [--] SCRIPT [ARGUMENTS]..."
EXAMPLES = (
    ("fleetrun train.py", "one process per device"),
    ("fleetrun --gpus=0,1 train.py --epochs 3", "two processes; --epochs is the script's"),
    ("fleetrun --nproc_per_node=2 -m pkg.train", "a module, two processes (also without GPUs)"),
    ("fleetrun --ips=10.0.0.1,10.0.0.2 train.py", "two hosts; the same command on each"),
    ("fleetrun --dry-run --gpus=0-7 train.py", "what would run, and why"),
    ("fleetrun --strategy=recommended train.py", "train faster, without changes to train.py"),
    ("fleetrun logs -f --rank=0,3", "the ranks' output, of the latest run or any other"),
    ("fleetrun report [RUN [RUN]]", "a page with charts of one run, or of two side by side"),
    ("fleetrun top", "the state of all ranks of a running job, on the whole screen"),
    ("fleetrun ui", "a live page about all runs, for the browser of this machine"),
    ("fleetrun strategy list|show|explain ...", "presets, fields, and what takes effect"),
    (
        "fleetrun doctor [OPTIONS] [train.py]",
        "whether this host is fit for the job, and how to fix it",
    ),
    ("fleetrun verify --strategy=X train.py", "compare with plain Paddle: weights, losses, speed"),
    ("fleetrun tune --vary KEY=A,B train.py", "find the fastest values by training with each"),
    ("fleetrun ps|attach|stop [JOB]", "background jobs: list them, show a console, end one"),
    ("fleetrun stacks [JOB]", "where the ranks of a running job stand, and in which collectives"),
    ("fleetrun on --hosts=a,b -- COMMAND", "run a command on each host by ssh"),
    ("fleetrun submit slurm|k8s ...", "submit a job to Slurm or Kubernetes"),
    ("fleetrun exec COMMAND...", "launch where COMMAND would start Paddle's launcher"),
    ("fleetrun completion bash|zsh|fish", "shell completion, to be sourced"),
)
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
COMPLETION = (
    ("bash", 'eval "$(fleetrun completion bash)" in ~/.bashrc'),
    ("zsh", 'eval "$(fleetrun completion zsh)" in ~/.zshrc, after compinit'),
    ("fish", "fleetrun completion fish > ~/.config/fish/completions/fleetrun.fish"),
)
NOTES = (
    "Write options with _ or -, as --x=v or --x v. Everything after SCRIPT is passed to it.",
    "SECONDS take units: 90s, 30m, 1h30m.",
    "Precedence: command line, environment, config file, default.",
)


DOMAIN = "fleetrun"
LOCALES = os.path.join(os.path.dirname(os.path.dirname(__file__)), "locale")
# The texts of the help besides those of options.
WORDS = ("Usage: ", "Examples", "Exit codes", "Presets", "Completion by Tab", "[default: {}]")
_LANGUAGES = ("LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG")


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
        return translate(SCREEN)
    formatter = HelpFormatter(max_width=_WIDTH)
    if section == "all":
        formatter.write_usage("fleetrun", _USAGE, prefix=translate("Usage: "))
        formatter.write_paragraph()
        formatter.write_text(_lines(translate(ABOUT), formatter.width))
        _write(formatter, translate("Examples"), _translated(EXAMPLES, translate), 45)
    for name, group in GROUPS.items():
        if section in {"all", name}:
            members = [option for option in KNOWN if option.group == name]
            if any(option.reason for option in members):
                with formatter.section(translate(group)):
                    # Listed only so that people find the name; these options have no effect.
                    formatter.write_text(", ".join(option.flag for option in members))
            else:
                rows = [row(option, translate) for option in members]
                _write(formatter, translate(group), rows)
        if section in {"all", name} and name == "strategy":
            _write(formatter, translate("Presets"), _translated(load.PRESETS.items(), translate))
    if section in {"all", "codes"}:
        _write(formatter, translate("Exit codes"), _translated(EXIT_CODES, translate))
    if section == "all":
        _write(formatter, translate("Completion by Tab"), _translated(COMPLETION, translate))
    formatter.write_paragraph()
    for note in NOTES:
        formatter.write_text(_lines(translate(note), formatter.width))
    return formatter.getvalue()


def _translated(
    rows: Iterable[tuple[str, str]], translate: Callable[[str], str]
) -> list[tuple[str, str]]:
    return [(term, translate(meaning)) for term, meaning in rows]


def _write(
    formatter: HelpFormatter, title: str, rows: Sequence[tuple[str, str]], col_max: int = 30
) -> None:
    """Write ROWS of terms and their meanings as the section TITLE."""
    # click's own width of the second column.
    room = formatter.width - min(max(len(term) for term, _ in rows), col_max) - 4
    with formatter.section(title):
        formatter.write_dl([(term, _lines(text, room)) for term, text in rows], col_max=col_max)


def _lines(text: str, room: int) -> str:
    """Break TEXT into lines for click, which does not know double-width characters."""
    return "\n".join(("\b", *wrapped(text, room)))


def row(option: Option, translate: Callable[[str], str] = str) -> tuple[str, str]:
    """Return OPTION's spelling and meaning for a help text."""
    shown = [translate(option.help or "")]
    if option.usual not in (None, "false"):
        shown.append(translate("[default: {}]").format(option.usual))
    if option.env:
        shown.append(f"[{', '.join(f'${name}' for name in option.env)}]")
    return option.term(), "  ".join(shown)
