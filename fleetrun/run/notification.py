"""Notify of the end of a job by a command (--on_end) and a webhook (--webhook).

A failure does not change the exit code.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from urllib.error import HTTPError, URLError

TIMEOUT_S = 30.0


def notify(
    text: str,
    *,
    command: str | None,
    url: str | None,
    log: Callable[[str], None],
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Write the JSON object TEXT to the standard input of the shell COMMAND, and POST it to URL.

    Each takes at most TIMEOUT_S seconds, but for the resolver. LOG gets a line for each failure.
    """
    if command and (why := _run(command, text, timeout_s)):
        log(f"The command of --on_end {why}.")
    if url and (why := _post(url, text, timeout_s)):
        log(f"The webhook failed ({why}).")


def _run(command: str, text: str, timeout_s: float) -> str:
    """Run COMMAND with TEXT; return why it failed, or nothing."""
    try:
        child = subprocess.Popen(  # noqa: S602 - it is the user's own command line
            command,
            shell=True,
            stdin=subprocess.PIPE,
            stdout=2,
            start_new_session=True,
            text=True,
        )
    except OSError as error:
        return f"cannot be started ({error.strerror})"
    try:
        child.communicate(text, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return "did not end in time and is killed"
    return f"exited with {child.returncode}" if child.returncode else ""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Refuse: most redirects would turn a POST into a GET without the text."""


def _post(url: str, text: str, timeout_s: float) -> str:
    """POST TEXT to URL; return why it failed, without any part of the URL, or nothing."""
    headers = {"Content-Type": "application/json", "User-Agent": "fleetrun"}
    request = urllib.request.Request(url, text.encode(), headers)  # noqa: S310 - http and https only
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=timeout_s):
            return ""
    except HTTPError as error:
        return f"HTTP status {error.code}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = error.reason if isinstance(error, URLError) else error
        if isinstance(why, TimeoutError):
            return "no answer in time"
        # The text of another error may quote the URL.
        return (why.strerror if isinstance(why, OSError) else "") or type(why).__name__
