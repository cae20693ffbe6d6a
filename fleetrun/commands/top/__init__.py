"""`fleetrun top`: shows the state of a running job's ranks on the whole screen."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from contextlib import suppress

import click
from rich.console import Console
from rich.live import Live

from fleetrun.cli import parser, types
from fleetrun.commands.logs import choose
from fleetrun.commands.top import screen
from fleetrun.commands.top.sample import Sampler, Snapshot
from fleetrun.commands.top.screen import View
from fleetrun.printing import is_color_wanted, put

# Wider than any table.
_UNLIMITED = 1 << 14
# What arrows, PgUp and PgDn send, and the letters that mean the same.
_KEYS = {"\x1b[A": "k", "\x1bOA": "k", "\x1b[B": "j", "\x1bOB": "j", "\x1b[5~": "b", "\x1b[6~": " "}


def _top(
    run: tuple[str, ...],
    log_dir: str,
    interval: float,
    color: str,
    *,
    once: bool,
) -> int:
    """Show the job; UsageError if it does not exist."""
    chosen = choose.find_runs(run, log_dir, prefers_running=True)
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    is_coloured = is_color_wanted(color, os.environ, sys.stdout)
    sampler = Sampler(chosen)
    is_screen = is_terminal and os.environ.get("TERM", "") not in {"", "dumb"} and not once
    snapshot: Snapshot | None = sampler.sample()
    if is_screen and any(chosen_run.is_running for chosen_run in chosen):
        snapshot = _watch(sampler, interval, is_coloured=is_coloured)
    if snapshot is None:
        return 0
    console = _console(None if is_terminal else _UNLIMITED, is_coloured=is_coloured)
    width = console.width if is_terminal else 0
    with console.capture() as captured:
        console.print(screen.frame(snapshot, width, None, View()))
    return put("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def _watch(sampler: Sampler, interval: float, *, is_coloured: bool) -> Snapshot | None:
    """Show the job until it ends, and return its last state; None if q was pressed before."""
    console = _console(None, is_coloured=is_coloured)
    view = View()
    # These restore the terminal as Ctrl-C does.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    # Standard input may be closed.
    fd = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    before = None if fd is None else termios.tcgetattr(fd)
    try:
        if fd is not None:
            # Each key at once and without echo; Ctrl-C stays a signal.
            tty.setcbreak(fd)
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while not (snapshot := sampler.sample()).verdict:
                deadline = time.monotonic() + interval
                left = interval
                while left > 0:
                    frame = screen.frame(snapshot, console.width, console.height, view)
                    live.update(frame, refresh=True)
                    typed = _pressed(fd, left)
                    if typed is None or "q" in typed or "\x03" in typed:
                        return None
                    for key in typed:
                        view = screen.after(view, key, snapshot, console.height // 2)
                    left = deadline - time.monotonic()
        return snapshot
    finally:
        if fd is not None and before is not None:
            with suppress(termios.error):
                termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _console(width: int | None, *, is_coloured: bool) -> Console:
    return Console(
        file=sys.stdout,
        width=width,
        # The caller has decided; rich would read the environment again, also for the size.
        force_terminal=True,
        _environ={},
        color_system="standard" if is_coloured else None,
        no_color=not is_coloured,
        highlight=False,
        legacy_windows=False,
    )


def _pressed(fd: int | None, seconds: float) -> str | None:
    """Return the keys pressed at FD within SECONDS; None if the terminal is gone."""
    if not select.select([] if fd is None else [fd], [], [], seconds)[0] or fd is None:
        return ""
    typed = os.read(fd, 64).decode(errors="replace")
    for sequence, key in _KEYS.items():
        typed = typed.replace(sequence, key)
    return typed or None


command = click.Command(
    "top",
    help="Show the ranks of a running job on the whole screen: state, host, device, processor, "
    "memory, GPU, step, loss and last line of each; of the latest run, or of RUN, as in "
    "`fleetrun logs`. It ends with the job, or when you press q; ? shows the other keys. In a pipe "
    "it prints one table.",
    callback=_top,
    params=[
        click.Argument(["run"], nargs=-1, metavar="[RUN]..."),
        parser.LOG_DIR,
        parser.option("interval", types.seconds(0.2), "Time between two updates.", default="1"),
        parser.COLOR,
        parser.option("once", types.FLAG, "Print one table and exit."),
    ],
)
