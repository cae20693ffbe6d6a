"""The Python interface: `fleetrun.launch` starts the launcher in a separate process.

So the caller, a script, a thread or a notebook, keeps its signal handlers, folder, variables,
children and event loop. The launcher ends its job when the caller is gone.
"""

from __future__ import annotations

import codecs
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from typing import IO, Literal, NamedTuple, NoReturn, TextIO, overload

from fleetrun import errors
from fleetrun.cli import argv
from fleetrun.cli.option import Option
from fleetrun.cli.options import BY_SPELLING
from fleetrun.cli.types import BOOL, FLAG
from fleetrun.errors import EnvironmentFault, UsageError

Script = str | PathLike[str]
Argument = str | float | PathLike[str]
# True, False, numbers and texts; a list for lists, a mapping for KEY=VALUE.
OptionValue = Argument | Iterable[Argument] | Mapping[str, object] | None

# Options for which the interface has its own words, or that print something and launch nothing.
_NOT_HERE = {
    "detach": "use wait=False; what outlives this program is started by `fleetrun --detach`.",
    "help": "see docs/options.md.",
    "version": "see fleetrun.__version__.",
}
_PACKAGES = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_CHUNK = 65536
# The interval of signals to a launcher that must kill its job.
_AGAIN_S = 0.1
# How long to wait for a pipe that something holds open when the launcher is gone.
_DRAIN_S = 2.0


class LaunchResult(NamedTuple):
    """The outcome of a job; `run_dir` is its run directory, None if that is on another host."""

    exit_code: int
    verdict: str
    run_dir: str | None


class Job:
    """A running job: what `fleetrun.launch(..., wait=False)` returns."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reports: int,
        lifeline: int,
        streams: Sequence[_ForwardedStream],
    ) -> None:
        self._process = process
        self._reports = reports
        # The launcher ends its job when this is closed.
        self._lifeline = lifeline
        self._streams = streams
        self._unread = b""
        self._result: LaunchResult | None = None
        self._fault: Exception | None = None
        self._is_over = False
        self._lock = threading.Lock()
        self.pid = process.pid
        # Where the job writes its logs and records, once it has started.
        self.run_dir: str | None = None
        self._has_begun = False

    def __enter__(self) -> Job:  # noqa: PYI034 - typing has Self since Python 3.11
        """Return the job, which ends with the block at the latest."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the job if it still runs."""
        self._end(signal.SIGTERM)

    def poll(self) -> LaunchResult | None:
        """Return the outcome of the job; None while it runs. Raises the same as `wait`."""
        with suppress(TimeoutError):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> LaunchResult:
        """Wait until the job has ended, and return its outcome.

        Raises FleetrunError if it could not start, and TimeoutError after TIMEOUT seconds; it then
        goes on.
        """
        self._hear_until(None if timeout is None else time.monotonic() + timeout)
        if self._fault is not None:
            raise self._fault
        assert self._result is not None
        return self._result

    def stop(self, *, now: bool = False) -> None:
        """Ask the job to stop, as `fleetrun stop` does; NOW: kill it without --grace."""
        self._signal(signal.SIGTERM)
        while now and self._process.poll() is None:
            # A second signal makes a launcher kill at once.
            self._signal(signal.SIGTERM)
            time.sleep(_AGAIN_S)

    # The launcher's reports -----------------------------------------------------------------------

    def await_begin(self) -> None:
        """Wait until the ranks run or other hosts are waited for; FleetrunError if that fails."""
        self._hear_until(None, only_begin=True)
        if self._fault is not None:
            raise self._fault

    def _hear_until(self, deadline: float | None, *, only_begin: bool = False) -> None:
        """Read the launcher's reports to the end; TimeoutError at DEADLINE (monotonic seconds)."""
        left_s = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
        # Another thread may be waiting, too.
        if not self._lock.acquire(timeout=left_s):
            self._raise_late()
        try:
            while not self._is_over and not (only_begin and self._has_begun):
                left_s = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
                if not select.select([self._reports], [], [], None if deadline is None else left_s)[
                    0
                ]:
                    self._raise_late()
                part = os.read(self._reports, _CHUNK)
                *lines, self._unread = (self._unread + part).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))
                if not part:
                    self._finish()
        finally:
            self._lock.release()

    def _raise_late(self) -> NoReturn:
        raise TimeoutError(f"the job still runs as process {self.pid}")

    def _take(self, report: dict[str, object]) -> None:
        # A failed launcher has not begun: this is its last report.
        kind = report["report"]
        self._has_begun = self._has_begun or kind in {"gathering", "began"}
        if kind == "began":
            self.run_dir = str(report["run_dir"])
        elif kind == "failed":
            self._fault = _error(str(report["kind"]), str(report["message"]), report["exit_code"])
        elif kind == "ended":
            self._result = LaunchResult(_number(report["exit_code"]), str(report["verdict"]), None)

    def _finish(self) -> None:
        """Finish after the launcher's last report."""
        code = self._process.wait()
        for stream in self._streams:
            stream.join(_DRAIN_S)
        verdict = f"the launcher exited with {code}"
        if code < 0:
            verdict = f"the launcher was killed by {signal.Signals(-code).name}"
        known = self._result or LaunchResult(errors.shell_code(code), verdict, None)
        self._result = known._replace(run_dir=self.run_dir)
        self._is_over = True
        os.close(self._reports)
        os.close(self._lifeline)

    # Its end --------------------------------------------------------------------------------------

    def _signal(self, signum: int) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(signum)

    def _end(self, signum: int) -> None:
        """Ask the job to stop, and wait for its end; a second interrupt kills it."""
        self._signal(signum)
        while not self._is_over:
            with suppress(errors.FleetrunError):
                try:
                    self.wait()
                except KeyboardInterrupt:
                    self._signal(signum)

    def run(self) -> LaunchResult:
        """Wait for the end; an interruption ends the job first."""
        try:
            return self.wait()
        except errors.FleetrunError:
            raise
        except BaseException as error:
            self._end(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
            raise


class _ForwardedStream(threading.Thread):
    """Copies a pipe to a Python stream without a file descriptor."""

    def __init__(self, fd: int, stream: TextIO) -> None:
        super().__init__(name="fleetrun output", daemon=True)
        self._fd = fd
        self._stream = stream
        self.start()

    def run(self) -> None:
        """Copy until the pipe ends; discard what a failed stream does not take."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        is_open = True
        while part := os.read(self._fd, _CHUNK):
            text = decoder.decode(part)
            if is_open:
                try:
                    self._stream.write(text)
                    self._stream.flush()
                except (OSError, ValueError):
                    is_open = False
        os.close(self._fd)


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


@overload
def launch(
    script: Script,
    args: Sequence[Argument] = (),
    *,
    wait: bool,
    check: bool = False,
    cwd: Script | None = None,
    **given: OptionValue,
) -> LaunchResult | Job: ...


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
    run or other hosts are waited for. Output goes where this program's own output goes. Raises
    FleetrunError if the job cannot start, and with check=True also JobError if it fails. The job
    ends when this program does.
    """
    problem = errors.unfit(sys.platform, tuple(sys.version_info[:3]))
    if problem is not None or not sys.executable:
        raise EnvironmentFault(problem or "it is not known which Python runs here.")
    job = _start([*_words(given), "--", *_script(script, args)], cwd)
    if not wait:
        job.await_begin()
        return job
    result = job.run()
    if check and result.exit_code:
        raise errors.JobError(result.verdict, result.exit_code, result.run_dir)
    return result


# What is typed on a command line ------------------------------------------------------------------


def _words(given: Mapping[str, OptionValue]) -> Iterable[str]:
    """Yield the words of the options GIVEN; UsageError for an unknown one."""
    known = BY_SPELLING
    for name, value in given.items():
        if name in _NOT_HERE:
            raise UsageError(f"fleetrun.launch has no {name}: {_NOT_HERE[name]}")
        if name not in known:
            raise UsageError(f"no such option: {name}{argv.suggest(name, known, prefix='')}")
        if value is not None:
            yield from _option(known[name], name, value)


def _option(row: Option, name: str, value: OptionValue) -> Iterable[str]:
    r"""Yield the words of the option NAME with VALUE.

    >>> list(_option(BY_SPELLING["env"], "env", {"A": 1, "B": True}))
    ['--env=A=1', '--env=B=true']
    >>> list(_option(BY_SPELLING["gpus"], "gpus", [0, 1]))
    ['--gpus=0,1']
    >>> list(_option(BY_SPELLING["tee"], "tee", True))
    ['--tee=all']
    """
    if isinstance(value, Mapping):
        if not row.is_pair:
            raise UsageError(f"{name}={value!r}: {row.wanted}")
        for key, item in value.items():
            yield f"--{name}={key}={_text(item)}"
    elif isinstance(value, bool) and row.kind not in {BOOL, FLAG}:
        if value and row.bare is None:
            raise UsageError(f"{name}=True: {row.wanted}")
        if value:
            yield f"--{name}={row.bare}"
    elif isinstance(value, str | int | float | os.PathLike):
        yield f"--{name}={_text(value)}"
    elif row.is_pair and value is not None:
        yield from (f"--{name}={_text(item)}" for item in value)
    elif row.kind.name == "list" and value is not None:
        yield f"--{name}={','.join(map(_text, value))}"
    else:
        raise UsageError(f"{name}={value!r}: {row.wanted}")


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)


def _script(script: Script, args: Sequence[Argument]) -> list[str]:
    """Return the words of SCRIPT and its ARGS."""
    if isinstance(args, str | bytes) or not hasattr(args, "__iter__"):
        raise UsageError(f'args={args!r}: give a list, such as ["--epochs", 3].')
    return [os.fspath(script), *map(_text, args)]


# The process --------------------------------------------------------------------------------------


def _start(words: Sequence[str], cwd: Script | None) -> Job:
    """Start the launcher with WORDS in the folder CWD."""
    reports, report_to = os.pipe()
    lifeline, hold = os.pipe()
    forwarded: list[tuple[int, TextIO]] = []
    inherited_fds = [report_to, lifeline]
    code = (
        f"import sys; sys.path[:] = [{_PACKAGES!r}, *filter(None, sys.path)]; "
        "from fleetrun.subordinate import run; run()"
    )

    def output(stream: TextIO | None, own: IO[str] | None) -> int | None:
        """Return the launcher's file descriptor in place of STREAM; None: it inherits ours."""
        if stream is None:
            return subprocess.DEVNULL
        with suppress(OSError, ValueError):
            stream.flush()
        if stream is own:
            return None
        read_fd, write_fd = os.pipe()
        forwarded.append((read_fd, stream))
        inherited_fds.append(write_fd)
        return write_fd

    try:
        out = output(sys.stdout, sys.__stdout__)
        err = out if sys.stderr is sys.stdout else output(sys.stderr, sys.__stderr__)
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(report_to), str(lifeline), *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            pass_fds=(report_to, lifeline),
            cwd=cwd,
            # Ctrl-C at a terminal is for this process, which passes it on.
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        for fd in (reports, hold, *(fd for fd, _ in forwarded)):
            os.close(fd)
        where = f" in the folder {os.fspath(cwd)}" if cwd is not None else ""
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise EnvironmentFault(f"No launcher can be started{where} ({why}).") from None
    finally:
        for fd in inherited_fds:
            os.close(fd)
    return Job(process, reports, hold, [_ForwardedStream(*pipe) for pipe in forwarded])


def _error(kind: str, message: str, exit_code: object) -> Exception:
    """Return the exception that the launcher has ended with."""
    known = {error.__name__: error for error in errors.FleetrunError.__subclasses__()}
    raised = known.get(kind, errors.FleetrunError)(message)
    raised.exit_code = _number(exit_code)
    return raised


def _number(value: object) -> int:
    return value if isinstance(value, int) else 1
