"""The Python interface: `fleetrun.launch` starts the launcher as a process of its own.

So the caller keeps its signal handlers, folder, variables, children and event loop, whatever it is:
a script, a thread, a notebook. The launcher ends its job when the caller is gone.
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
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, NamedTuple, NoReturn, overload

from fleetrun import argv, cli, errors, options
from fleetrun.errors import EnvironmentFault, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from os import PathLike
    from typing import IO, TextIO

    from fleetrun.options import Option

    Script = str | PathLike[str]
    Argument = str | float | PathLike[str]
    # True, False, numbers and texts; a list for lists, a mapping for KEY=VALUE.
    OptionValue = Argument | Iterable[Argument] | Mapping[str, object] | None

# What the caller has an own word for, and what prints something instead of a launch.
_NOT_HERE = {
    "detach": "use wait=False; what outlives this program is started by `fleetrun --detach`.",
    "help": "see docs/options.md.",
    "version": "see fleetrun.__version__.",
    "ui": "it needs a terminal: `fleetrun top` shows the job there.",
}
_PACKAGES = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_CHUNK = 65536
# How often a launcher is asked that is to kill its job.
_AGAIN_S = 0.1
# Whatever holds a pipe open when the launcher is gone is not waited for any longer.
_DRAIN_S = 2.0


class LaunchResult(NamedTuple):
    """How a job has ended; `run_dir` has what it left behind, None where that is elsewhere."""

    exit_code: int
    verdict: str
    run_dir: str | None


class Job:
    """A job that runs: what `fleetrun.launch(..., wait=False)` returns."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reports: int,
        lifeline: int,
        streams: Sequence[_ForwardedStream],
    ) -> None:
        self._process = process
        self._reports = reports
        # The launcher ends its job when the last of us closes it.
        self._lifeline = lifeline
        self._streams = streams
        self._said = b""
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
        """Return how the job has ended; None while it runs. Raises what `wait` does."""
        with suppress(TimeoutError):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> LaunchResult:
        """Wait until the job has ended, and return how.

        Raises FleetrunError if it could not begin, TimeoutError after TIMEOUT seconds: it goes on.
        """
        self._hear_until(None if timeout is None else time.monotonic() + timeout)
        if self._fault is not None:
            raise self._fault
        assert self._result is not None
        return self._result

    def stop(self, *, now: bool = False) -> None:
        """Ask the job to stop, as `fleetrun stop` does; NOW: kill it, without --grace."""
        self._signal(signal.SIGTERM)
        while now and self._process.poll() is None:
            # Asked again, a launcher kills at once.
            self._signal(signal.SIGTERM)
            time.sleep(_AGAIN_S)

    # The launcher's reports -----------------------------------------------------------------------

    def await_begin(self) -> None:
        """Wait until the ranks run or other hosts are waited for; FleetrunError if that failed."""
        self._hear_until(None, only_begin=True)
        if self._fault is not None:
            raise self._fault

    def _hear_until(self, until: float | None, *, only_begin: bool = False) -> None:
        """Take the launcher's reports to their end; TimeoutError at UNTIL (monotonic seconds)."""
        left_s = -1.0 if until is None else max(0.0, until - time.monotonic())
        # Another thread may wait, too.
        if not self._lock.acquire(timeout=left_s):
            self._tell_late()
        try:
            while not self._is_over and not (only_begin and self._has_begun):
                left_s = -1.0 if until is None else max(0.0, until - time.monotonic())
                if not select.select([self._reports], [], [], None if until is None else left_s)[0]:
                    self._tell_late()
                part = os.read(self._reports, _CHUNK)
                *lines, self._said = (self._said + part).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))
                if not part:
                    self._finish()
        finally:
            self._lock.release()

    def _tell_late(self) -> NoReturn:
        message = f"the job still runs as process {self.pid}"
        raise TimeoutError(message)

    def _take(self, said: dict[str, object]) -> None:
        # A launcher that has failed has not begun: what it says is its last word.
        self._has_begun = self._has_begun or said["report"] in {"gathering", "began"}
        if said["report"] == "began":
            self.run_dir = str(said["run_dir"])
        elif said["report"] == "failed":
            self._fault = _error(str(said["kind"]), str(said["message"]), said["exit_code"])
        elif said["report"] == "ended":
            self._result = LaunchResult(_number(said["exit_code"]), str(said["verdict"]), None)

    def _finish(self) -> None:
        """Take leave of a launcher that says nothing more."""
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
        """Ask the job to stop, and wait for that; who interrupts again lets it be killed."""
        self._signal(signum)
        while not self._is_over:
            with suppress(errors.FleetrunError):
                try:
                    self.wait()
                except KeyboardInterrupt:
                    self._signal(signum)

    def run(self) -> LaunchResult:
        """Wait for the end; whatever interrupts that ends the job first."""
        try:
            return self.wait()
        except errors.FleetrunError:
            raise
        except BaseException as error:
            self._end(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
            raise


class _ForwardedStream(threading.Thread):
    """Writes what comes from a pipe to a stream of Python's that stands for no descriptor."""

    def __init__(self, fd: int, stream: TextIO) -> None:
        super().__init__(name="fleetrun output", daemon=True)
        self._fd = fd
        self._stream = stream
        self.start()

    def run(self) -> None:
        """Write until the pipe ends; who reads no more gets no more, and the launcher goes on."""
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
    run, or other hosts are waited for. What is printed goes where this program's own output goes.
    Raises FleetrunError for what cannot begin; with check=True also JobError for a job that failed.
    The job ends when this program does.
    """
    problem = cli.unfit(sys.platform, tuple(sys.version_info[:3]))
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
    """Yield the words of the options GIVEN; UsageError for one that there is not."""
    known = options.by_name()
    for name, value in given.items():
        if name in _NOT_HERE:
            raise UsageError(f"fleetrun.launch has no {name}: {_NOT_HERE[name]}")
        if name not in known:
            raise UsageError(f"no such option: {name}{argv.suggest(name, known, prefix='')}")
        if value is not None:
            yield from _option(known[name], name, value)


def _option(row: Option, name: str, value: OptionValue) -> Iterable[str]:
    r"""Yield the words of the option NAME with VALUE.

    >>> list(_option(options.find("env"), "env", {"A": 1, "B": True}))
    ['--env=A=1', '--env=B=true']
    >>> list(_option(options.find("gpus"), "gpus", [0, 1]))
    ['--gpus=0,1']
    >>> list(_option(options.find("tee"), "tee", True))
    ['--tee=all']
    """
    if isinstance(value, Mapping):
        if row.kind != "pairs":
            raise UsageError(f"{name}={value!r}: {options.wanted(row)}")
        for key, one in value.items():
            yield f"--{name}={key}={_text(one)}"
    elif isinstance(value, bool) and row.kind not in {"bool", "flag"}:
        if value and row.bare is None:
            raise UsageError(f"{name}=True: {options.wanted(row)}")
        if value:
            yield f"--{name}={row.bare}"
    elif isinstance(value, str | int | float | os.PathLike):
        yield f"--{name}={_text(value)}"
    elif row.kind == "pairs" and value is not None:
        yield from (f"--{name}={_text(one)}" for one in value)
    elif row.kind == "list" and value is not None:
        yield f"--{name}={','.join(map(_text, value))}"
    else:
        raise UsageError(f"{name}={value!r}: {options.wanted(row)}")


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
    theirs = [report_to, lifeline]
    code = (
        f"import sys; sys.path[:] = [{_PACKAGES!r}, *filter(None, sys.path)]; "
        "from fleetrun.subordinate import run; run()"
    )

    def output(stream: TextIO | None, own: IO[str] | None) -> int | None:
        """Return what the launcher writes to in place of STREAM; None: to ours."""
        if stream is None:
            return subprocess.DEVNULL
        with suppress(OSError, ValueError):
            stream.flush()
        if stream is own:
            return None
        read_fd, write_fd = os.pipe()
        forwarded.append((read_fd, stream))
        theirs.append(write_fd)
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
            # Ctrl-C at a terminal is for us, who tell it.
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        for fd in (reports, hold, *(fd for fd, _ in forwarded)):
            os.close(fd)
        where = f" in the folder {os.fspath(cwd)}" if cwd is not None else ""
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise EnvironmentFault(f"No launcher can be started{where} ({why}).") from None
    finally:
        for fd in theirs:
            os.close(fd)
    return Job(process, reports, hold, [_ForwardedStream(*one) for one in forwarded])


def _error(kind: str, message: str, exit_code: object) -> Exception:
    """Return the exception that the launcher has ended with."""
    known = {one.__name__: one for one in errors.FleetrunError.__subclasses__()}
    found = known.get(kind, errors.FleetrunError)(message)
    found.exit_code = _number(exit_code)
    return found


def _number(value: object) -> int:
    return value if isinstance(value, int) else 1
