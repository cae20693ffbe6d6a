"""The Python interface: `fleetrun.launch` starts the launcher in a separate process.

So the caller, a script, a thread or a notebook, keeps its signal handlers, folder, variables,
children and event loop. The launcher ends its job when the caller is gone.
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from os import PathLike
from typing import IO, Any, Literal, NamedTuple, NoReturn, overload

from fleetrun import errors
from fleetrun.cli import elsewhere
from fleetrun.cli.option import Option
from fleetrun.cli.options import BY_SPELLING
from fleetrun.cli.types import BOOL, FLAG
from fleetrun.errors import EnvironmentFault, FleetrunError, UsageError
from fleetrun.model import LaunchPlan
from fleetrun.run.events import Finished, Happening
from fleetrun.run.observers import Sink

Script = str | PathLike[str]
Argument = str | float | PathLike[str]
# True, False, numbers and texts; a list for lists, a mapping for KEY=VALUE.
OptionValue = Argument | Iterable[Argument] | Mapping[str, object] | None

# Options for which the interface has its own words, or that print something and launch nothing.
_NOT_HERE = {
    "detach": "use wait=False; what outlives this program is started by `fleetrun --detach`.",
    "help": "see docs/reference.md.",
    "version": "see fleetrun.__version__.",
}
_PACKAGES = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# The interval of signals to a launcher that must kill its job.
_AGAIN_S = 0.1
# fcntl(2); Python has no name for it.
_F_SETSIG = 10


class LaunchResult(NamedTuple):
    """The outcome of a job; `run_dir` is its run directory, None if that is on another host."""

    exit_code: int
    verdict: str
    run_dir: str | None


class Job:
    """A running job: what `fleetrun.launch(..., wait=False)` returns."""

    def __init__(self, process: subprocess.Popen[bytes], reports: IO[bytes], lifeline: int) -> None:
        self._process = process
        # Becomes true when the ranks run or other hosts are waited for.
        self._beginning: Future[bool] = Future()
        self._end: Future[LaunchResult] = Future()
        self._result: LaunchResult | None = None
        self._fault: FleetrunError | None = None
        self.pid = process.pid
        # Where the job writes its logs and records, once it has started.
        self.run_dir: str | None = None
        listening = threading.Thread(target=self._listen, args=(reports, lifeline), daemon=True)
        listening.start()

    def __enter__(self) -> Job:  # noqa: PYI034 - typing has Self since Python 3.11
        """Return the job, which ends with the block at the latest."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the job if it still runs."""
        self.stop_and_wait(signal.SIGTERM)

    def poll(self) -> LaunchResult | None:
        """Return the outcome of the job; None while it runs. Raises the same as `wait`."""
        return self._end.result() if self._end.done() else None

    def wait(self, timeout: float | None = None) -> LaunchResult:
        """Wait until the job has ended, and return its outcome.

        Raises FleetrunError if it could not start, and TimeoutError after TIMEOUT seconds; it then
        goes on.
        """
        try:
            return self._end.result(timeout)
        except concurrent.futures.TimeoutError:
            raise TimeoutError(f"the job still runs as process {self.pid}") from None

    def await_begin(self) -> None:
        """Wait until the ranks run or other hosts are waited for; FleetrunError if that fails."""
        if not self._beginning.result():
            self.wait()

    def stop(self, *, now: bool = False) -> None:
        """Ask the job to stop, as `fleetrun stop` does; NOW: kill it without --grace."""
        self._signal(signal.SIGTERM)
        while now and not self._end.done():
            # A second signal makes a launcher kill at once.
            self._signal(signal.SIGTERM)
            time.sleep(_AGAIN_S)

    def stop_and_wait(self, signum: int) -> None:
        """Ask the job to stop, and wait for its end; each interrupt asks again, the first kills."""
        while not self._end.done():
            self._signal(signum)
            with suppress(FleetrunError, KeyboardInterrupt):
                self.wait()

    def _signal(self, signum: int) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(signum)

    def _listen(self, reports: IO[bytes], lifeline: int) -> None:
        """Read the launcher's REPORTS to the end; it ends its job when LIFELINE is closed."""
        with reports:
            for line in reports:
                self._take(json.loads(line))
        code = self._process.wait()
        os.close(lifeline)
        verdict = f"the launcher exited with {code}"
        if code < 0:
            verdict = f"the launcher was killed by {signal.Signals(-code).name}"
        result = self._result or LaunchResult(errors.shell_code(code), verdict, None)
        if self._fault is not None:
            self._end.set_exception(self._fault)
        else:
            self._end.set_result(result._replace(run_dir=self.run_dir))
        if not self._beginning.done():
            self._beginning.set_result(False)

    def _take(self, report: Mapping[str, Any]) -> None:
        if report["report"] == "began":
            self.run_dir = report["run_dir"]
        elif report["report"] == "ended":
            self._result = LaunchResult(report["exit_code"], report["verdict"], None)
        elif report["report"] == "failed":
            self._fault = _error(report)
        # A launcher that has failed has not begun: the end follows.
        if self._fault is None and not self._beginning.done():
            self._beginning.set_result(True)


@overload
def launch(
    script: Script,
    args: Sequence[Argument] = (),
    *,
    wait: Literal[True] = True,
    check: bool = False,
    cwd: Script | None = None,
    **given: OptionValue,
) -> LaunchResult: ...


@overload
def launch(
    script: Script,
    args: Sequence[Argument] = (),
    *,
    wait: Literal[False],
    check: bool = False,
    cwd: Script | None = None,
    **given: OptionValue,
) -> Job: ...


def launch(
    script: Script,
    args: Sequence[Argument] = (),
    *,
    wait: bool = True,
    check: bool = False,
    cwd: Script | None = None,
    **given: OptionValue,
) -> LaunchResult | Job:
    """Launch SCRIPT with ARGS, as `fleetrun OPTIONS SCRIPT ARGS` does; options are keywords.

        result = fleetrun.launch("train.py", ["--epochs", 3], nproc_per_node=2, env={"A": "b"})
        result.exit_code, result.verdict, result.run_dir

    A module is `launch("-m", ["pkg.train"])`. With wait=False it returns a Job as soon as the ranks
    run or other hosts are waited for. It prints to the file descriptors 1 and 2 of this process.
    Raises FleetrunError if the job cannot start, and with check=True also JobError if it fails. The
    job ends when this program does.
    """
    problem = errors.unfit(sys.platform, tuple(sys.version_info[:3]))
    if problem is not None or not sys.executable:
        raise EnvironmentFault(problem or "it is not known which Python runs here.")
    if isinstance(args, str | bytes) or not hasattr(args, "__iter__"):
        raise UsageError(f'args={args!r}: give a list, such as ["--epochs", 3].')
    job = _start([*_words(given), "--", os.fspath(script), *map(_text, args)], cwd)
    if not wait:
        job.await_begin()
        return job
    try:
        result = job.wait()
    except BaseException as error:
        job.stop_and_wait(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
        raise
    if check and result.exit_code:
        raise errors.JobError(result.verdict, result.exit_code, result.run_dir)
    return result


def _words(given: Mapping[str, OptionValue]) -> Iterable[str]:
    r"""Yield the words of the options GIVEN; UsageError for an unknown one.

    >>> list(_words({"env": {"A": 1, "B": True}, "gpus": [0, 1], "tee": True, "quiet": False}))
    ['--env=A=1', '--env=B=true', '--gpus=0,1', '--tee=all', '--quiet=false']
    """
    for name, value in given.items():
        if name in _NOT_HERE:
            raise UsageError(f"fleetrun.launch has no {name}: {_NOT_HERE[name]}")
        row = BY_SPELLING.get(name)
        if row is None:
            ending = elsewhere.suggest(name, BY_SPELLING, prefix="")
            raise UsageError(f"no such option: {name}{ending}")
        texts = _texts(row, value)
        if texts is None:
            raise UsageError(f"{name}={value!r}: {row.wanted}")
        yield from (f"--{name}={text}" for text in texts)


def _texts(row: Option, value: OptionValue) -> Iterable[str] | None:
    """Return the values to write after the option ROW for VALUE; None if it takes none such."""
    match value:
        case None:
            return ()
        case bool() if row.kind not in {BOOL, FLAG}:
            return [row.bare] if value and row.bare else None if value else ()
        case str() | int() | float() | os.PathLike():
            return [_text(value)]
        case Mapping() if row.is_pair:
            return [f"{key}={_text(item)}" for key, item in value.items()]
        case list() | tuple() if row.is_repeatable or row.kind.name == "list":
            return map(_text, value) if row.is_repeatable else [",".join(map(_text, value))]
    return None


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)


# The process --------------------------------------------------------------------------------------


def _start(words: Sequence[str], cwd: Script | None) -> Job:
    """Start the launcher with WORDS in the folder CWD."""
    reports, report_to = os.pipe()
    lifeline, hold = os.pipe()
    code = (
        f"import sys; sys.path[:] = [{_PACKAGES!r}, *filter(None, sys.path)]; "
        "from fleetrun.api import run; run()"
    )

    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):
            stream.flush()
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
        where = f" in the folder {os.fspath(cwd)}" if cwd is not None else ""
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise EnvironmentFault(f"No launcher can be started{where} ({why}).") from None
    finally:
        for fd in (report_to, lifeline):
            os.close(fd)
    return Job(process, open(reports, "rb"), hold)


def _error(report: Mapping[str, Any]) -> FleetrunError:
    """Return the exception that the launcher has ended with."""
    known = {error.__name__: error for error in FleetrunError.__subclasses__()}
    raised = known.get(report["kind"], FleetrunError)(report["message"])
    raised.exit_code = report["exit_code"]
    return raised


# In the launcher ----------------------------------------------------------------------------------


class Reports(Sink):
    """Reports to the program that launches, one JSON object per line, as long as it listens."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._run_dir = self._verdict = ""

    def gathering(self) -> None:
        """Report that this host is fine, and that other hosts are waited for."""
        self._report("gathering")

    def sink(self, plan: LaunchPlan) -> Sink:
        """Return the sink that reports the start of PLAN, and keeps the verdict."""
        self._run_dir = os.path.normpath(os.path.join(plan.cwd, plan.run_dir))
        return self

    def open(self, waiting: object) -> None:  # noqa: ARG002 - nothing to wait for
        """Report that the ranks run."""
        self._report("began", run_dir=self._run_dir)

    def on_event(self, happening: Happening) -> None:
        """Keep the verdict of the job's end."""
        if isinstance(happening, Finished):
            self._verdict = happening.outcome.describe()

    def failed(self, error: FleetrunError, message: str) -> None:
        """Report why there is no job."""
        self._report(
            "failed", kind=type(error).__name__, message=message, exit_code=error.exit_code
        )

    def ended(self, code: int) -> None:
        """Report the end of the job."""
        verdict = self._verdict or ("all is done" if code == 0 else f"it ended with {code}")
        self._report("ended", exit_code=code, verdict=verdict)

    def _report(self, report: str, **more: str | int) -> None:
        # A signal announces the end of the caller.
        with suppress(BrokenPipeError):
            os.write(self._fd, json.dumps({"report": report, **more}).encode() + b"\n")


def run() -> NoReturn:
    """Run the launcher with the words after our two descriptors, and end this process."""
    from fleetrun.cli import app  # the program that calls `launch` needs none of it

    report_to, lifeline, words = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    sys.argv = ["fleetrun", *words]
    for fd in (report_to, lifeline):
        os.set_inheritable(fd, False)  # noqa: FBT003 - os has it so
    # A thread of the caller may have blocked these signals, and a notebook ignores them.
    for signum, usual in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_DFL),
    ):
        signal.signal(signum, usual)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _end_with_caller(lifeline)
    reports = Reports(report_to)
    code = app.main(words, caller=reports)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError):
            stream.flush()
    reports.ended(code)
    os._exit(code)


def _end_with_caller(lifeline: int) -> None:
    """Get SIGTERM when the caller, which has the other end of LIFELINE, is gone."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, _F_SETSIG, signal.SIGTERM)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:
        signal.raise_signal(signal.SIGTERM)
