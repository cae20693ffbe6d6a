"""The Python interface: `fleetrun.launch` starts the launcher in a separate process.

So the caller, a script, a thread or a notebook, keeps its signal handlers, folder, variables,
children and event loop. The launcher ends its job when the caller is gone.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from os import PathLike
from typing import IO, NoReturn

from fleetrun import errors
from fleetrun.cli.options import BY_SPELLING
from fleetrun.errors import EnvironmentFault, FleetrunError, UsageError
from fleetrun.model import LaunchPlan
from fleetrun.printing import flush
from fleetrun.run.events import Finished, Happening
from fleetrun.run.observers import Sink

Script = str | PathLike[str]
_PACKAGES = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# fcntl(2); Python has no name for it.
_F_SETSIG = 10


class Job(AbstractContextManager["Job"]):
    """A job, which runs until `exit_code` is set; then `verdict` says how it ended.

    `run_dir` is its run directory; None until it has started, and if that is on another host.
    """

    def __init__(self, process: subprocess.Popen[bytes], reports: IO[bytes], lifeline: int) -> None:
        self._process, self._reports, self._lifeline = process, reports, lifeline
        self._reading = threading.Lock()
        self._fault: FleetrunError | None = None
        self.pid = process.pid
        self.run_dir: str | None = None
        self.exit_code: int | None = None
        self.verdict = ""

    def __exit__(self, *_: object) -> None:
        """Stop the job if it still runs, and wait for its end; the first interrupt kills it."""
        while self.exit_code is None:
            self.stop()
            with suppress(FleetrunError, KeyboardInterrupt):
                self.wait()

    def poll(self) -> Job | None:
        """Return the job once it has ended; None while it runs. Raises the same as `wait`."""
        return None if self._process.poll() is None else self.wait()

    def wait(self, timeout: float | None = None) -> Job:
        """Wait until the job has ended, and return it.

        Raises FleetrunError if it could not start, and TimeoutError after TIMEOUT seconds; it then
        goes on.
        """
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the job still runs as process {self.pid}") from None
        with self._reading:
            if self.exit_code is None:
                while self.read_report():
                    pass
                self._reports.close()
                os.close(self._lifeline)
                self.exit_code = errors.shell_code(code)
                ended = "all is done" if code == 0 else f"the launcher exited with {code}"
                self.verdict = self.verdict or ended
        if self._fault is not None:
            raise self._fault
        return self

    def read_report(self) -> bool:
        """Wait for the launcher's next report; False if there is none, or no job."""
        line = self._reports.readline()
        report = json.loads(line or "{}")
        self.run_dir = report.get("run_dir", self.run_dir)
        self.verdict = report.get("verdict", self.verdict)
        if "error" in report:
            self._fault = getattr(errors, report["error"], FleetrunError)(report["message"])
        return bool(line) and self._fault is None

    def stop(self) -> None:
        """Ask the job to stop, as `fleetrun stop` does; asked again, it kills without --grace."""
        self._process.send_signal(signal.SIGTERM)


def launch(
    script: Script,
    args: Sequence[object] = (),
    *,
    wait: bool = True,
    cwd: Script | None = None,
    **options: object,
) -> Job:
    """Launch SCRIPT with ARGS, as `fleetrun OPTIONS SCRIPT ARGS` does; options are keywords.

        result = fleetrun.launch("train.py", ["--epochs", 3], nproc_per_node=2, env={"A": "b"})
        result.exit_code, result.verdict, result.run_dir

    A module is `launch("-m", ["pkg.train"])`. With wait=False it returns the job as soon as the
    ranks run or other hosts are waited for. It prints to the file descriptors 1 and 2 of this
    process. Raises FleetrunError if the job cannot start. The job ends when this program does.
    """
    if isinstance(args, str | bytes):
        raise UsageError(f'args={args!r}: give a list, such as ["--epochs", 3].')
    job = _start([*_words(options), "--", os.fspath(script), *map(_text, args)], cwd)
    with ExitStack() as until:
        until.enter_context(job)
        if wait or not job.read_report():
            job.wait()
        until.pop_all()
    return job


def _words(options: Mapping[str, object]) -> Iterator[str]:
    """Yield the words of OPTIONS; the launcher finds what is wrong with them.

    >>> list(_words({"env": {"A": 1, "B": True}, "gpus": [0, 1], "tee": True, "quiet": False}))
    ['--env=A=1', '--env=B=true', '--gpus=0,1', '--tee', '--quiet=false']
    """
    if "detach" in options:
        why = "what outlives this program is started by `fleetrun --detach`"
        raise UsageError(f"fleetrun.launch has no detach: use wait=False; {why}.")
    for name, value in options.items():
        match value:
            case None:
                pass
            case True:
                yield f"--{name}"
            case Mapping():
                yield from (f"--{name}={key}={_text(item)}" for key, item in value.items())
            case list() | tuple() if name in BY_SPELLING and BY_SPELLING[name].is_repeatable:
                yield from (f"--{name}={_text(item)}" for item in value)
            case list() | tuple():
                yield f"--{name}={','.join(map(_text, value))}"
            case _:
                yield f"--{name}={_text(value)}"


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return os.fspath(value) if isinstance(value, PathLike) else str(value)


def _start(words: Sequence[str], cwd: Script | None) -> Job:
    """Start the launcher with WORDS in the folder CWD."""
    reports, report_to = os.pipe()
    lifeline, hold = os.pipe()
    code = (
        f"import sys; sys.path[:] = [{_PACKAGES!r}, *filter(None, sys.path)]; "
        "from fleetrun.api import run; run()"
    )
    flush()
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(report_to), str(lifeline), *words],
            stdin=subprocess.DEVNULL,
            stdout=None if sys.stdout else subprocess.DEVNULL,
            stderr=None if sys.stderr else subprocess.DEVNULL,
            pass_fds=(report_to, lifeline),
            cwd=cwd,
            # Ctrl-C at a terminal is for this process, which passes it on.
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        for fd in (reports, hold):
            os.close(fd)
        raise EnvironmentFault(f"No launcher can be started ({error}).") from None
    finally:
        for fd in (report_to, lifeline):
            os.close(fd)
    return Job(process, open(reports, "rb"), hold)


# In the launcher ----------------------------------------------------------------------------------


class Reports(Sink):
    """Reports to the program that launches, one JSON object per line, as long as it listens."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._run_dir = ""

    def report(self, **report: str) -> None:
        """Report a run_dir, a verdict, an error and its message; nothing: hosts are waited for."""
        # A signal announces the end of the caller.
        with suppress(BrokenPipeError):
            os.write(self._fd, json.dumps(report).encode() + b"\n")

    def sink(self, plan: LaunchPlan) -> Sink:
        """Return the sink that reports the start of PLAN, and its end."""
        self._run_dir = os.path.normpath(os.path.join(plan.cwd, plan.run_dir))
        return self

    def open(self, waiting: object) -> None:  # noqa: ARG002 - nothing to wait for
        """Report that the ranks run."""
        self.report(run_dir=self._run_dir)

    def on_event(self, happening: Happening) -> None:
        """Report the verdict of the job's end."""
        if isinstance(happening, Finished):
            self.report(verdict=happening.outcome.describe())


def run() -> NoReturn:
    """Run the launcher with the words after our two descriptors, and end this process."""
    from fleetrun.cli import app  # the program that calls `launch` needs none of it

    report_to, lifeline, words = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    sys.argv = ["fleetrun", *words]
    for fd in (report_to, lifeline):
        os.set_inheritable(fd, False)  # noqa: FBT003 - os has it so
    # A thread of the caller may have blocked these signals, and a notebook ignores them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # The kernel sends SIGTERM when the caller, which has the other end of the lifeline, is gone.
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, _F_SETSIG, signal.SIGTERM)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:
        signal.raise_signal(signal.SIGTERM)
    code = app.main(words, caller=Reports(report_to))
    flush()
    os._exit(code)
