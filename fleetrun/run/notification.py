"""Notify of the end of a job by a command (--on_end) and a webhook (--webhook).

They never change the exit code, and together take at most TIMEOUT_S.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from threading import Thread

TIMEOUT_S = 30.0
# Between SIGTERM and SIGKILL to the command.
_GRACE_S = 2.0
_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
    answers: list[str] = []
    # No timeout limits the resolver, so the thread is left behind if it takes too long.
    caller = Thread(target=lambda: answers.append(_post(url or "", text, timeout_s)), daemon=True)
    # Blocked while the command is started and stopped: it must not be forgotten.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ASKING)
    before = {signum: signal.signal(signum, _raise) for signum in _ASKING}
    child = _started(command, mask, log) if command else None
    if url:
        caller.start()
    with suppress(_SignalArrived):
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if child is not None:
            _wait(child, text, until, log)
        if url:
            caller.join(max(until - time.monotonic(), 0.0))
            why = answers[0] if answers else "no answer in time"
            if why:
                log(f"The webhook failed ({why}).")
    signal.pthread_sigmask(signal.SIG_BLOCK, _ASKING)
    if child is not None:
        _stop(child)
    while signal.sigtimedwait(_ASKING, 0.0) is not None:
        pass  # it has been obeyed
    for signum, handler in before.items():
        signal.signal(signum, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _raise(*_: object) -> None:
    raise _SignalArrived


def _started(
    command: str, mask: AbstractSet[int], log: Callable[[str], None]
) -> subprocess.Popen[str] | None:
    """Start COMMAND in a session of its own, with the signal MASK."""
    try:
        return subprocess.Popen(  # noqa: S602 - it is the user's own command line
            command,
            shell=True,
            stdin=subprocess.PIPE,
            stdout=2,
            start_new_session=True,
            text=True,
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask),  # noqa: PLW1509 - no threads yet
        )
    except OSError as error:
        log(f"The command of --on_end cannot be started ({error.strerror}).")
        return None


def _wait(
    child: subprocess.Popen[str], text: str, until: float, log: Callable[[str], None]
) -> None:
    """Write TEXT to the command, and wait for its end, by UNTIL (monotonic seconds)."""
    try:
        child.communicate(text, timeout=max(until - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        log("The command of --on_end did not end in time and is stopped.")
    else:
        if child.returncode:
            log(f"The command of --on_end exited with {child.returncode}.")


def _stop(child: subprocess.Popen[str]) -> None:
    """Kill the process group of CHILD if it still runs."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is None:
            os.killpg(child.pid, signum)
            with suppress(subprocess.TimeoutExpired):
                child.wait(_GRACE_S)


def _post(url: str, text: str, timeout_s: float) -> str:
    """POST TEXT to URL; return why it failed, without any part of the URL, or nothing."""
    import http.client
    import urllib.request
    from urllib.error import HTTPError, URLError

    class NoRedirects(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: object) -> None:
            """Refuse: most redirects would turn a POST into a GET without the text."""

    request = urllib.request.Request(  # noqa: S310 - the option takes http and https only
        url,
        data=text.encode(),
        headers={"Content-Type": "application/json", "User-Agent": "fleetrun"},
        method="POST",
    )
    try:
        with urllib.request.build_opener(NoRedirects).open(request, timeout=timeout_s):
            return ""
    except HTTPError as error:
        is_redirect = error.code // 100 == 3
        return f"HTTP status {error.code}{', a redirect that is not followed' * is_redirect}"
    except URLError as error:
        reason = error.reason
        return (reason.strerror if isinstance(reason, OSError) else "") or type(reason).__name__
    except OSError as error:
        return error.strerror or type(error).__name__
    except (http.client.HTTPException, ValueError) as error:
        # Its text may quote the URL.
        return type(error).__name__
