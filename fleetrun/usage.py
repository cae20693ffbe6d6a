"""`fleetrun --help`: one screen, and the way to the rest, through a pager on a terminal."""

# No `from __future__ import annotations` here, for the reason given in options.py.
import os
import sys
from collections.abc import Mapping

from fleetrun import colors
from fleetrun.cli import COMMANDS
from fleetrun.printing import put

SCREEN = """\
Usage: fleetrun [OPTIONS] [--] SCRIPT [ARGUMENTS]...
Start PaddlePaddle training: one process per device, on one host or several.
Examples:
  fleetrun train.py                         one process per GPU, else on the CPU
  fleetrun --gpus=0,1 train.py --epochs 3   two GPUs; --epochs is the script's
  fleetrun --nproc_per_node=2 -m pkg.train  a module, two processes
  fleetrun --ips=10.0.0.1,10.0.0.2 train.py two hosts: the same command on each
  fleetrun --strategy=comm_fusion train.py  fused allreduces; train.py as it is
Most used:
  --gpus LIST         GPUs, one process each: 0,1 or 0-3 or all
  --nproc_per_node N  processes on this host (also auto, gpu, cpu)
  --ips LIST          addresses of all hosts, in rank order
  --log_dir DIR       folder of the logs [log]; --tee shows more ranks than one
  --env KEY=VALUE     a variable for every process; --nccl: one of NCCL's
  --max_restart N     start again after a failure; --hang_timeout S: or a hang
  --dry-run           what would run, and why; nothing starts
Exit codes: 0 all well, N that of the rank that failed first, 128+N its signal,
  124 hung, 126, 127 no program, 2 usage, 3 this host, 4 hosts did not meet,
  5 --strategy_strict: something asked for is not in effect
More: --help=all, or common, strategy, devices, hosts, job, servers, codes
  fleetrun {commands} --help
  eval "$(fleetrun completion bash)"        switches Tab on; also zsh, fish
"""


def show(section: str, choice: str, environ: Mapping[str, str]) -> int:
    """Show the help text of SECTION: the screen, all, or one of options.SECTIONS."""
    if section == "screen":
        return page(SCREEN.format(commands="|".join(COMMANDS)), choice, environ)
    from fleetrun import help as view  # noqa: PLC0415 - click is slow, and the screen lacks it

    return page(view.text(section), choice, environ)


def page(text: str, choice: str, environ: Mapping[str, str]) -> int:
    """Print TEXT, in colour where wanted, through a pager on a terminal too small for it."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    shown = text
    if colors.is_wanted(choice, environ, is_terminal=is_terminal):
        shown = colors.on_page(text)
    if is_terminal and sys.stdin.isatty() and _is_long(text):
        for pager in _pagers(environ):
            if _paged(shown, pager, environ):
                return 0
    return put(shown)


def _is_long(text: str) -> bool:
    # The shell's prompt takes a line.
    return text.count("\n") >= os.get_terminal_size(sys.stdout.fileno()).lines


def _pagers(environ: Mapping[str, str]) -> list[str]:
    """Return the commands to try, in order; none where a terminal can do nothing but scroll."""
    if environ.get("TERM", "") in {"", "dumb"}:
        return []
    wanted = environ.get("PAGER")
    if wanted is None:
        return ["less", "more"]
    return [] if wanted.strip() in {"", "cat"} else [wanted]


def _paged(text: str, pager: str, environ: Mapping[str, str]) -> bool:
    """Show TEXT by the shell command PAGER; False if there is no such command."""
    import signal  # noqa: PLC0415 - only for long texts on a terminal
    import subprocess  # noqa: PLC0415 - see above

    # As git has it: quit if it fits, take colours, leave the screen as it was.
    with_colors = {**environ, "LESS": environ.get("LESS", "FRX")}
    # Ctrl-C is for the pager.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen(["sh", "-c", pager], stdin=subprocess.PIPE, env=with_colors)  # noqa: S603, S607 - what the user has chosen
        process.communicate(text.encode(errors="surrogateescape"))
    finally:
        signal.signal(signal.SIGINT, before)
    # 126 and 127 are the shell's words for a command that cannot be run.
    return process.returncode not in {126, 127}
