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

import click
from rich.console import Console, RenderableType
from rich.layout import Layout
from rich.live import Live

from fleetrun.cli import parser, types
from fleetrun.commands.job_commands import newest
from fleetrun.commands.logs import choose
from fleetrun.commands.logs.show import cleaned
from fleetrun.commands.top import screen
from fleetrun.commands.top.sample import Sampler, Snapshot
from fleetrun.commands.top.view import LOG, STACKS, View, after, keys
from fleetrun.host import jobs
from fleetrun.printing import is_color_wanted, put
from fleetrun.rundir import reading

# The most bytes shown of the end of a log, or of stacks.
_MOST_TEXT = 64 * 1024
# Wider than any table.
_UNLIMITED = 1 << 14


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
    is_coloured = is_color_wanted(color, os.environ, is_terminal=is_terminal)
    sampler = Sampler(chosen, pattern=log_pattern)
    is_screen = is_terminal and os.environ.get("TERM", "") not in {"", "dumb"} and not once
    if is_screen and any(chosen_run.is_running for chosen_run in chosen):
        snapshot = _watch(sampler, interval, is_coloured=is_coloured)
        if snapshot is None:
            return 0
    else:
        snapshot = sampler.sample()
    width = 0
    if is_terminal:
        with suppress(OSError):
            width = os.get_terminal_size(sys.stdout.fileno()).columns
    console = _console(width or _UNLIMITED, is_coloured=is_coloured)
    shown = screen.optional(snapshot.rows)
    with console.capture() as captured:
        console.print(screen.frame(snapshot, width, None, View(), shown))
    lines = captured.get().splitlines()
    return put("".join(f"{line.rstrip()}\n" for line in lines))


def _watch(sampler: Sampler, interval: float, *, is_coloured: bool) -> Snapshot | None:
    """Show the job until it ends, and return its last state; None if q was pressed before."""
    console = _console(None, is_coloured=is_coloured)
    view = View()
    shown: frozenset[str] = frozenset()
    live = Live(console=console, screen=True, auto_refresh=False)
    with _cbreak(), _terminated(), live:
        due = time.monotonic()
        while not (snapshot := sampler.sample()).verdict:
            shown = screen.optional(snapshot.rows, shown)
            live.update(_picture(snapshot, view, shown, console), refresh=True)
            # A slow sample delays only the next one.
            due = max(due + interval, time.monotonic() + 0.05)
            while (typed := _pressed(due - time.monotonic())) != b"":
                before = view
                for key in keys(typed or b"\x03"):
                    view = after(view, key, snapshot.rows, console.height // 2)
                if view.is_over:
                    return None
                if view.what == STACKS and before.what != STACKS:
                    jobs.ask_for_stacks(sampler.run_dirs)
                live.update(_picture(snapshot, view, shown, console), refresh=True)
    return snapshot


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
        markup=False,
        emoji=False,
        legacy_windows=False,
    )


def _picture(
    snapshot: Snapshot, view: View, shown: frozenset[str], console: Console
) -> RenderableType:
    """Return what VIEW shows of SNAPSHOT on the whole screen, with the keys below."""
    room = max(2, console.height - 1)
    row = next((row for row in snapshot.rows if row.label == view.selected), None)
    if row is None or view.what not in (LOG, STACKS):
        picture = screen.frame(snapshot, console.width, room, view, shown)
        return _above(screen.footer(view), picture)
    paths = row.logs if view.what == LOG else (row.stacks,)
    content = b"".join(reading.content(path, _MOST_TEXT, from_end=True) or b"" for path in paths)
    text = cleaned(content).decode(errors="replace").replace("\r", "\n").rstrip("\n")
    if view.what == STACKS:
        text = newest(text) or "The launcher has been asked for the stacks; they appear here."
    title = f"{view.what} of {row.label}: {paths[0]}"
    return _above(screen.footer(view), screen.text_of(text.split("\n"), title, room))


def _above(footer: RenderableType, picture: RenderableType) -> Layout:
    layout = Layout()
    layout.split_column(Layout(picture), Layout(footer, size=1))
    return layout


def _pressed(seconds: float) -> bytes | None:
    """Return the keys pressed within SECONDS, or None if the terminal is gone."""
    deadline = time.monotonic() + seconds
    # Standard input may be closed.
    inputs = [sys.stdin.fileno()] if sys.stdin is not None and sys.stdin.isatty() else []
    while (left := deadline - time.monotonic()) > 0:
        for fd in select.select(inputs, [], [], left)[0]:
            return os.read(fd, 64) or None
    return b""


@contextmanager
def _cbreak() -> Iterator[None]:
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
            types.seconds(0.2),
            "Time between two updates.",
            default="1",
            metavar="SECONDS",
        ),
        parser.option(
            "pattern",
            types.FREE,
            "Regular expression that finds step and loss in log lines other than `step 120 loss "
            "0.5`, by the groups (?P<step>..) and (?P<loss>..).",
            metavar="REGEX",
        ),
        parser.color("Whether to use colours."),
        click.Option(["--once"], is_flag=True, help="Print one table and exit."),
    ],
)
