"""The launcher's own lines, on standard error."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from fleetrun.printing import message_prefix
from fleetrun.run.events import Finished, Happening
from fleetrun.run.loop import WRITABLE, Waiting
from fleetrun.run.observers import Sink
from fleetrun.sinks.outlet import Outlet
from fleetrun.text import visible, visible_lines

# If the reader does not read, the oldest lines beyond this many are dropped.
_MOST = 1000
# How long the last lines wait for a reader that accepts nothing.
_TIMEOUT_S = 2.0


class Messages(Sink):
    """Writes lines for the user, without ever blocking on the terminal."""

    def __init__(
        self,
        preface: Callable[[], str] | None = None,
        *,
        is_coloured: bool = False,
        is_ci: bool = False,
        redact: Callable[[str], str] = str,
    ) -> None:
        self.redact = redact
        self._outlet = Outlet(2)
        # Whether a user may be watching.
        self._is_watched = self._outlet.is_terminal and not is_ci
        # Built after the processes have started, so as not to delay them.
        self.preface = preface
        self._queue: deque[bytes] = deque(maxlen=_MOST)
        self._waiting: Waiting | None = None
        self._is_waiting_for_room = False
        self._is_last = False
        self.is_coloured = is_coloured
        # Ends a rank's unfinished line if the next message would be written into it.
        self.ends_line: Callable[[], bool] | None = None
        # Whether the job has failed; the lines from then on say why.
        self._is_fault = False
        # Another program uses the terminal (--ui).
        self._is_held = False

    def log(self, text: str) -> None:
        """Write TEXT as one line; control characters in it are escaped."""
        self._put(visible(self.redact(text)))

    def progress(self, text: str) -> None:
        """Write TEXT as one line on a terminal; nothing in pipes and CI."""
        if self._is_watched:
            self.log(text)

    def show(self, text: str) -> None:
        """Write the lines of TEXT."""
        self._put(visible_lines(self.redact(text)))

    def _put(self, text: str) -> None:
        prefix = message_prefix(is_coloured=self.is_coloured, is_fault=self._is_fault)
        is_inside = self.ends_line is not None and not self._is_held and self.ends_line()
        before = "\n" if is_inside else ""
        self._queue.append(f"{before}{prefix}{text}\n".encode())
        self._pump()

    def hold(self) -> None:
        """Hold all lines back until `release`."""
        self._is_held = True

    def release(self) -> None:
        """Write the lines that were held back, and continue."""
        self._is_held = False
        self._pump()

    def _pump(self) -> None:
        if self._is_held:
            return
        while self._queue and not self._outlet.is_closed:
            line = self._queue[0]
            try:
                taken = self._outlet.write(line)
            except OSError:
                # A full disk under a redirected stderr: there is nowhere left to report it.
                taken = len(line)
            if taken == len(line):
                self._queue.popleft()
                continue
            self._queue[0] = line[taken:]
            self._wait_for_room()
            return
        if self._outlet.is_closed:
            self._queue.clear()
        if self._is_waiting_for_room and self._waiting is not None:
            self._waiting.unwatch(self._outlet.fd)
            self._is_waiting_for_room = False

    def _wait_for_room(self) -> None:
        if self._waiting is not None:
            self._waiting.timer("timeout", time.monotonic() + _TIMEOUT_S, self._on_timeout)
        if self._waiting is not None and self._outlet.can_wait and not self._is_waiting_for_room:
            self._waiting.watch(self._outlet.fd, self._pump, WRITABLE)
            self._is_waiting_for_room = True

    def _on_timeout(self) -> None:
        if self._is_last:
            self._queue.clear()

    def open(self, waiting: Waiting) -> None:
        """Write the preface and the lines that are waiting."""
        self._waiting = waiting
        if self.preface is not None:
            self._queue.appendleft(self.preface().encode(errors="backslashreplace"))
        self._pump()

    def on_event(self, happening: Happening) -> None:
        """Note the end of the job: from now on, lines wait only up to the timeout."""
        if isinstance(happening, Finished):
            self._is_last = True
            self._is_fault = happening.outcome.cause is not None

    def is_busy(self) -> bool:
        """Whether some lines are not written yet."""
        return self._is_last and bool(self._queue)

    def close(self) -> None:
        """Stop."""
        self._outlet.close()
