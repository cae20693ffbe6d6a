"""The launcher's own lines, on standard error."""

from __future__ import annotations

from collections.abc import Callable

from fleetrun.printing import NAME
from fleetrun.run.events import Finished, Happening
from fleetrun.run.loop import Waiting
from fleetrun.run.observers import Sink
from fleetrun.sinks.writer import Writer
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
        redact: Callable[[str], str] = str,
    ) -> None:
        self.redact = redact
        self._writer = Writer(2, _MOST)
        # Built after the processes have started, so as not to delay them.
        self.preface = preface
        self._is_last = False
        # Ends a rank's unfinished line if the next message would be written into it.
        self.ends_line: Callable[[], bool] | None = None

    def log(self, text: str) -> None:
        """Write TEXT as one line; control characters in it are escaped."""
        self._put(visible(self.redact(text)))

    def show(self, text: str) -> None:
        """Write the lines of TEXT."""
        self._put(visible_lines(self.redact(text)))

    def _put(self, text: str) -> None:
        before = "\n" if self.ends_line is not None and self.ends_line() else ""
        self._writer.put(f"{before}{NAME}{text}\n".encode())

    def open(self, waiting: Waiting) -> None:
        """Write the preface and the lines that are waiting."""
        self._writer.open(waiting)
        if self.preface is not None:
            preface = self.preface().encode(errors="backslashreplace")
            self._writer.put(preface)

    def on_event(self, happening: Happening) -> None:
        """Note the end of the job: from now on, lines wait only up to the timeout."""
        if isinstance(happening, Finished):
            self._is_last = True
            self._writer.finish(_TIMEOUT_S)

    def is_busy(self) -> bool:
        """Whether some lines are not written yet."""
        return self._is_last and self._writer.is_busy

    def close(self) -> None:
        """Stop."""
        self._writer.close()
