"""`fleetrun top`: shows the state of a running job's ranks on the whole screen."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.control import Control
from rich.text import Text

from fleetrun import colors
from fleetrun.commands import parser
from fleetrun.commands.logs import choose
from fleetrun.commands.logs.clean import cleaned
from fleetrun.commands.stacks import newest
from fleetrun.commands.top import screen
from fleetrun.commands.top.sample import Sampler
from fleetrun.commands.top.view import LOG, STACKS, View, after, keys
from fleetrun.printing import put
from fleetrun.records import reading, runs

if TYPE_CHECKING:
    from fleetrun.commands.top.sample import Snapshot

# Processor use needs two samples; in a pipe they are this far apart.
_APART_S = 0.5
# The most bytes shown of the end of a log, or of stacks.
_MOST_TEXT = 64 * 1024


def _top(
    run: tuple[str, ...],
    log_dir: str,
    interval: float,
    pattern: str | None,
    color: str,
    *,
    once: bool,
) -> int:
    """Show the job; UsageError if it does not exist."""
    log_pattern = (
        None if pattern is None else choose.pattern(pattern, "--pattern", ("step", "loss"))
    )
    chosen = choose.find_runs(run, log_dir, prefers_running=True)
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    is_coloured = colors.is_wanted(color, os.environ, is_terminal=is_terminal)
    sampler = Sampler(chosen, pattern=log_pattern, period_s=interval)
    try:
        is_screen = is_terminal and os.environ.get("TERM", "") not in {"", "dumb"} and not once
        if is_screen and any(runs.is_running(chosen_run.path) for chosen_run in chosen):
            return _watch(sampler, interval, is_coloured=is_coloured)
        snapshot = sampler.sample()
        if not snapshot.verdict:
            _wait(min(interval, _APART_S))
            snapshot = sampler.sample()
        _print(snapshot, is_coloured=is_coloured)
    finally:
        sampler.close()
    return 0


def _watch(sampler: Sampler, interval: float, *, is_coloured: bool) -> int:
    """Show the job until it ends or q is pressed; leave the last state on the screen."""
    console = _console(is_coloured=is_coloured)
    view = View(has_bars="utf" in (sys.stdout.encoding or "").lower())
    with console.screen(hide_cursor=True), _keys(), _terminated():
        due = time.monotonic()
        while True:
            snapshot = sampler.sample()
            if snapshot.verdict:
                break
            _draw(console, snapshot, view)
            # A slow sample delays only the next one.
            due = max(due + interval, time.monotonic() + 0.05)
            while (typed := _wait(due - time.monotonic())) != b"":
                before = view
                for key in keys(typed or b"Q"):
                    page = os.get_terminal_size(sys.stdout.fileno()).lines // 2
                    view = after(view, key, snapshot.rows, page)
                if view.is_over:
                    return 0
                if view.what == STACKS and before.what != STACKS:
                    sampler.ask_for_stacks()
                _draw(console, snapshot, view)
    _print(snapshot, is_coloured=is_coloured)
    return 0


def _console(*, is_coloured: bool) -> Console:
    return Console(
        file=sys.stdout,
        # The caller has decided; rich would read the environment again.
        force_terminal=True,
        color_system="standard" if is_coloured else None,
        no_color=not is_coloured,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )


def _draw(console: Console, snapshot: Snapshot, view: View) -> None:
    """Show VIEW of SNAPSHOT on the whole screen."""
    width, height = os.get_terminal_size(sys.stdout.fileno())
    room = max(1, height - 1)
    row = next((row for row in snapshot.rows if row.label == view.selected), None)
    if row is not None and view.what in (LOG, STACKS):
        paths = row.logs if view.what == LOG else (row.stacks,)
        content = b"".join(
            reading.content(path, _MOST_TEXT, from_end=True) or b"" for path in paths
        )
        text = cleaned(content).decode(errors="replace").replace("\r", "\n").rstrip("\n")
        if view.what == STACKS:
            text = newest(text) or "The launcher has been asked for the stacks; they appear here."
        # The newest lines of a log matter most; of stacks the first ones, the innermost frames.
        title = f"{view.what} of {row.label}: {paths[0]}"
        lines = screen.text_of(text.split("\n"), title, width, room)
    else:
        lines = screen.frame(snapshot, width, room, view)
    lines += [Text(" " * width)] * (height - 1 - len(lines))
    hints = screen.fitting(screen.footer(view), width)
    lines.append(screen.cut(Text(hints, "dim"), width))
    console.control(Control.home())
    console.print(Text("\n").join(lines), end="", soft_wrap=True)


def _print(snapshot: Snapshot, *, is_coloured: bool) -> None:
    """Print SNAPSHOT on the terminal, or uncut into a pipe."""
    width = 0
    if sys.stdout is not None:
        with suppress(OSError):
            width = os.get_terminal_size(sys.stdout.fileno()).columns
    lines = screen.frame(snapshot, width, None)
    if is_coloured:
        console = _console(is_coloured=True)
        with console.capture() as captured:
            console.print(Text("\n").join(lines), soft_wrap=True)
        text = captured.get()
    else:
        text = "\n".join(line.plain.rstrip() for line in lines)
    put(text.rstrip("\n") + "\n")


def _wait(seconds: float) -> bytes | None:
    """Return the keys pressed within SECONDS, or None if the terminal is gone."""
    deadline = time.monotonic() + seconds
    # Standard input may be closed.
    keys = [sys.stdin.fileno()] if sys.stdin is not None and sys.stdin.isatty() else []
    while (left := deadline - time.monotonic()) > 0:
        for fd in select.select(keys, [], [], left)[0]:
            return os.read(fd, 64) or None
    return b""


@contextmanager
def _keys() -> Iterator[None]:
    """Read each key at once and without echo; restore the terminal afterwards."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    # Ctrl-C stays a signal.
    tty.setcbreak(fd)
    try:
        yield
    finally:
        with suppress(termios.error):
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextmanager
def _terminated() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this process as Ctrl-C does, so that the terminal is restored."""

    def end(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


command = click.Command(
    "top",
    help="Show the ranks of a running job on the whole screen: state, host, device, processor, "
    "memory, GPU, step, loss and last line of each; of the latest run, or of RUN, as in "
    "`fleetrun logs`. Keys sort (s), filter (/) and show a rank's log (l) or stacks (t). It ends "
    "with the job, or when you press q. In a pipe it prints one table.",
    callback=_top,
    params=[
        click.Argument(["run"], nargs=-1, metavar="[RUN]..."),
        parser.log_dir(),
        parser.option(
            "interval",
            "duration",
            "Time between two updates.",
            default="1",
            minimum=0.2,
            metavar="SECONDS",
        ),
        parser.option(
            "pattern",
            "text",
            "Regular expression that finds step and loss in log lines other than `step 120 loss "
            "0.5`, by the groups (?P<step>..) and (?P<loss>..).",
            metavar="REGEX",
        ),
        parser.color("Whether to use colours."),
        click.Option(["--once"], is_flag=True, help="Print one table and exit."),
    ],
)
