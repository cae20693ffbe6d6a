"""Notify of the end of a job by a command (--on_end) and a webhook (--webhook).

They never change the exit code, and together take at most TIMEOUT_S.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import suppress
from typing import TYPE_CHECKING

from fleetrun.run.isolation import IsolatedCall
from fleetrun.run.loop import poll

if TYPE_CHECKING:
    from collections.abc import Callable
    from http.client import HTTPMessage
    from typing import IO

TIMEOUT_S = 30.0
# Between SIGTERM and SIGKILL to the command.
_GRACE_S = 2.0
# A 303 asks for a GET without a body by definition; the others keep method and body.
_SAME_METHOD = (301, 302, 307, 308)
_REDIRECTS = (*_SAME_METHOD, 303)


class _SignalArrived(Exception):  # nothing is wrong
    """A signal asked the launcher to end."""


def notify(
    text: str,
    *,
    command: str | None,
    url: str | None,
    log: Callable[[str], None],
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Write the JSON object TEXT to the standard input of the shell COMMAND, and POST it to URL.

    LOG gets a line for each failure. A signal that asks the launcher to end stops the wait.
    """
    until = time.monotonic() + timeout_s
    with _WaitSignals() as signals:
        child = None
        try:
            child = _started(command, text, log) if command else None
            if url:
                _post_within(url, text, until, signals, log)
            if child is not None:
                _wait(child, until, signals, log)
        except _SignalArrived:
            return
        finally:
            if child is not None:
                _stop(child)


class _WaitSignals:
    """Handlers under which a signal only ends the wait, even if it arrived before the wait."""

    _WANTED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __enter__(self) -> _WaitSignals:  # noqa: PYI034 - typing.Self is Python 3.11's
        """Begin."""
        self._fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._before = {
            signum: signal.signal(signum, lambda _signum, _frame: None) for signum in self._WANTED
        }
        self._wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_error: object) -> None:
        """Restore the previous handlers."""
        signal.set_wakeup_fd(self._wakeup_fd)
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        os.close(self._fd)
        os.close(self._write_fd)

    def wait(self, fd: int, until: float) -> bool:
        """Return whether FD is readable before UNTIL; raise _SignalArrived on a signal."""
        while True:
            ready = poll(until - time.monotonic(), fd, self._fd)
            if self._fd in ready and set(os.read(self._fd, 64)) & set(self._WANTED):
                raise _SignalArrived
            if fd in ready:
                return True
            if not ready:
                return False


def _post_within(
    url: str, text: str, until: float, signals: _WaitSignals, log: Callable[[str], None]
) -> None:
    """POST TEXT to URL, by UNTIL (monotonic seconds)."""
    left_s = max(until - time.monotonic(), 0.0)
    try:
        call = IsolatedCall(lambda: _post(url, text, left_s))
    except OSError as error:
        log(f"The webhook is not called: no process can be started ({error.strerror}).")
        return
    answer = None
    try:
        while answer is None and signals.wait(call.fd, until):
            answer = call.read()
    finally:
        # Also after an answer, since nobody reaps the child later.
        call.abandon()
    if answer is None:
        log("The webhook did not answer in time.")
    elif answer.trouble or answer.value:
        log(f"The webhook failed ({answer.trouble or answer.value}).")


def _wait(
    child: subprocess.Popen[bytes], until: float, signals: _WaitSignals, log: Callable[[str], None]
) -> None:
    """Wait for the command to end, by UNTIL (monotonic seconds)."""
    pidfd = os.pidfd_open(child.pid)
    try:
        has_ended = signals.wait(pidfd, until)
    finally:
        os.close(pidfd)
    if not has_ended:
        log("The command of --on_end did not end in time and is stopped.")
    elif child.wait():
        log(f"The command of --on_end exited with {child.returncode}.")


def _started(command: str, text: str, log: Callable[[str], None]) -> subprocess.Popen[bytes] | None:
    """Start COMMAND with TEXT as its standard input and standard error as its output."""
    reader, writer = os.pipe()
    try:
        # The text is far smaller than a pipe's buffer.
        os.write(writer, text.encode())
        return subprocess.Popen(  # noqa: S602 - it is the user's own command line
            command, shell=True, stdin=reader, stdout=2, start_new_session=True
        )
    except OSError as error:
        log(f"The command of --on_end cannot be started ({error.strerror}).")
        return None
    finally:
        os.close(reader)
        os.close(writer)


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Kill the process group of CHILD if any of it still runs."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is not None:
            return
        with suppress(OSError):
            os.killpg(child.pid, signum)
        with suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects that keep method and body; any other is an error."""

    def redirect_request(  # noqa: PLR0917 - as its base has it
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request:
        """Return the request to NEWURL, or raise HTTPError."""
        was_secret = req.full_url.lower().startswith("https:")
        kinds = ("https://",) if was_secret else ("https://", "http://")
        if code not in _SAME_METHOD or not newurl.lower().startswith(kinds):
            raise urllib.error.HTTPError(newurl, code, msg, headers, fp)
        return urllib.request.Request(  # noqa: S310 - just checked
            newurl, data=req.data, headers=req.headers, method=req.get_method()
        )

    # Not before Python 3.11.
    http_error_308 = urllib.request.HTTPRedirectHandler.http_error_302


def _post(url: str, text: str, timeout_s: float) -> str:
    """POST TEXT to URL; return why it failed, without any part of the URL, or nothing."""
    request = urllib.request.Request(  # noqa: S310 - the option takes http and https only
        url,
        data=text.encode(),
        headers={"Content-Type": "application/json", "User-Agent": "fleetrun"},
        method="POST",
    )
    try:
        with urllib.request.build_opener(_Redirects).open(request, timeout=timeout_s):
            return ""
    except urllib.error.HTTPError as error:
        is_redirect = error.code in _REDIRECTS
        return f"HTTP status {error.code}{', a redirect that is not followed' * is_redirect}"
    except urllib.error.URLError as error:
        reason = error.reason
        return (reason.strerror if isinstance(reason, OSError) else "") or type(reason).__name__
    except OSError as error:
        return error.strerror or type(error).__name__
    except (http.client.HTTPException, ValueError) as error:
        # Its text may quote the URL.
        return type(error).__name__
