"""The command line of the process that measures, and what it does."""

from __future__ import annotations

import os

from fleetrun.run import itself

_NICE = 10


def line(run_dir: str, *, launcher: int, period_s: float, listening_fd: int | None) -> list[str]:
    """Return the command that measures the job of RUN_DIR for as long as LAUNCHER is alive."""
    return itself.command(
        "from fleetrun.sinks.metrics import meterprocess; "
        f"meterprocess.main({run_dir!r}, {launcher}, {period_s}, {listening_fd})"
    )


def main(run_dir: str, launcher: int, period_s: float, listening_fd: int | None) -> None:
    """Measure until the launcher ends."""
    from fleetrun.run import libc  # this process only

    libc.prctl(libc.PR_SET_PDEATHSIG, 9)
    libc.prctl(libc.PR_SET_NAME, b"fleetrun-meter")
    if os.getppid() != launcher:
        return
    os.nice(_NICE)
    from fleetrun.sinks.metrics import measure

    measure.run(run_dir, period_s, listening_fd)
