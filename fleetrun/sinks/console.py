"""Ranks' output on the console: live, whole, and only as fast as the reader takes it.

Ranks write to their own log files, and the console reads these. A stuck terminal delays no rank:
what it has not accepted stays in the file.
"""

from __future__ import annotations

import os
import re
import sys
import time

from fleetrun.run.events import Finished, Gathered, Happening, RootCauses, Started
from fleetrun.run.loop import Waiting
from fleetrun.run.observers import ObservedJob, Sink
from fleetrun.rundir.names import label_of, log_paths
from fleetrun.sinks.rotate import Cut
from fleetrun.sinks.writer import Writer

_CHUNK = 256 * 1024
# A longer line is broken when several ranks are shown.
_LONGEST_LINE = 1024 * 1024
# How often a growing file is read. The longer it is quiet, the less often, down to the quiet pace,
# for which a user who types at a prompt waits. Not inotify: removing its last watch takes the
# kernel 20 ms at every exit.
_PACE_S, _SLOWER, _QUIET_PACE_S = 0.03, 1.25, 0.1
# Return to the event loop after this much, however fast a rank writes.
_TURN_BYTES = 4 * _CHUNK
# Of a log that is about to be cut, this much is shown before.
_CATCH_UP_BYTES = 64 * _TURN_BYTES
# With several ranks, an unfinished line is shown after this long: a prompt, or the state of a
# progress bar.
_PROMPT_S, _BAR_S = 0.2, 10.0
# At the end: how long to wait for a reader that accepts nothing.
_TIMEOUT_S = 10.0
# An incomplete UTF-8 character or escape sequence at the end of the output so far.
_CUT_SHORT = (
    rb"(?:[\xc2-\xdf]|[\xe0-\xef][\x80-\xbf]?|[\xf0-\xf4][\x80-\xbf]{0,2}|\x1b(?:\[[0-9;?]*)?)\Z"
)


class Feed:
    """One rank's log file, read from the console's current offset.

    With a PREFIX, even an empty one, whole lines are shown. Of what a rank has overwritten in its
    line, only the last is shown.
    """

    def __init__(self, path: str, prefix: bytes | None) -> None:
        self.path = path
        self._prefix = prefix
        # Another attempt has begun, so the file no longer grows.
        self.is_final = False
        # When an unfinished line is to be shown, and whether the last one that was shown was one.
        self.due_at: float | None = None
        self._is_unfinished = False
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._offset = 0

    def take(self, *, is_last: bool, now: float) -> bytes:
        """Return the next output to show: whole lines, or an unfinished one that is due."""
        size = os.fstat(self._fd).st_size
        if size < self._offset:
            # The file was truncated; the rank continues at its start.
            self._offset = 0
        while size > self._offset and (body := self._cut(is_last=is_last, now=now)):
            self._offset += len(body)
            self.due_at = None
            if shown := body if self._prefix is None else self._lines(body, self._prefix):
                return shown
        return b""

    def _cut(self, *, is_last: bool, now: float) -> bytes:
        """Return the next piece as the rank wrote it; nothing while its line is incomplete."""
        chunk = os.pread(self._fd, _CHUNK, self._offset)
        if self._prefix is None:
            return chunk
        end = chunk.rfind(b"\n") + 1
        if not end and len(chunk) == _CHUNK:
            chunk = os.pread(self._fd, _LONGEST_LINE, self._offset)
            end = chunk.find(b"\n") + 1
        if end or is_last or len(chunk) == _LONGEST_LINE:
            return chunk[: end or len(chunk)]
        if self.due_at is None:
            self.due_at = now + (_BAR_S if b"\r" in chunk else _PROMPT_S)
        is_due = self.due_at is not None and self.due_at <= now
        return re.sub(_CUT_SHORT, b"", chunk) if is_due else b""

    def _lines(self, body: bytes, prefix: bytes) -> bytes:
        """Return the lines of BODY, each behind PREFIX and with an end."""
        if self._is_unfinished and body.startswith(b"\n"):
            body = body[1:]
        self._is_unfinished = bool(body) and not body.endswith(b"\n")
        lines = body.removesuffix(b"\n").split(b"\n") if body else []
        lines = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        return b"".join(prefix + line + b"\n" for line in lines)

    def follow(self, cut: Cut) -> None:
        """Continue behind CUT; what was not shown before it never is."""
        self._offset = max(0, self._offset - cut.length)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class Console(Sink):
    """Shows the processes that JOB shows; lines get a prefix if there are several."""

    def __init__(self, job: ObservedJob) -> None:
        self._job = job
        self._begin(0)
        self._writer = Writer(1)
        self._feeds: list[Feed] = []
        # Whether what was shown last is an unfinished line.
        self._is_mid_line = False
        self._turn = 0
        self._pace_s = _PACE_S
        # Whether anything was shown since the files last had nothing new.
        self._is_quiet = True
        self._is_last = False
        self._is_done = False

    # The supervisor's side ----------------------------------------------------------------------

    def open(self, waiting: Waiting) -> None:
        """Begin to show output."""
        super().open(waiting)
        self._writer.open(waiting, self._pump)
        if self._writer.is_closed:
            self._give_up("standard output is closed")
            return
        self._pump()

    def on_event(self, happening: Happening) -> None:
        """Follow each process that starts; at the end, show the remaining output."""
        if isinstance(happening, Started) and happening.process in self._shown:
            self._follow(happening)
        elif isinstance(happening, Gathered | RootCauses):
            # The rest of an attempt that is over.
            for feed in self._feeds:
                feed.is_final = True
            self._pump(sys.maxsize)
            if isinstance(happening, Gathered):
                self._begin(happening.attempt)
        elif isinstance(happening, Finished):
            self._is_last = True
            self._writer.finish(_TIMEOUT_S)
            self._pump()

    def catch_up(self) -> None:
        """Show what ranks have written so far, as far as the reader takes it soon."""
        self._pump(_CATCH_UP_BYTES)

    def is_busy(self) -> bool:
        """Whether output remains to be shown."""
        return self._is_last and (not self._is_done or self._writer.is_busy)

    def shows(self, process: int) -> bool:
        """Whether a reader of the launcher's messages sees all output of PROCESS and no other's."""
        is_whole = self._shown == (process,)
        return is_whole and not self._writer.is_closed and _are_one_file(1, 2)

    def end_line(self) -> bool:
        """Whether a message would be written into a rank's unfinished line; it then ends that."""
        is_open = self._is_mid_line and not self._writer.is_busy and _are_one_file(1, 2)
        if is_open:
            self._is_mid_line = False
        return is_open

    def close(self) -> None:
        """Stop."""
        self._stop()
        self._writer.close()

    def follow(self, cut: Cut) -> None:
        """Continue a log that has been cut to nothing."""
        for feed in self._feeds:
            if feed.path == cut.log:
                feed.follow(cut)

    def _begin(self, attempt: int) -> None:
        """Choose which processes of a generation are shown."""
        plan = self._job.plan
        self._shown = self._job.shown(plan)
        self._logs = {i: log_paths(plan, plan.processes[i], attempt) for i in self._shown}

    # Reading ------------------------------------------------------------------------------------

    def _follow(self, started: Started) -> None:
        if self._is_done:
            return
        spec = self._job.plan.processes[started.process]
        logs = self._logs[started.process]
        by_lines = len(logs) > 1
        for log, stream in zip(logs, ("", " stderr"), strict=False):
            prefix = b"" if by_lines else None
            if len(self._shown) > 1:
                prefix = f"[{label_of(spec.name)}{stream}] ".encode()
            self._feeds.append(Feed(log, prefix))
        self._pump()

    def _pump(self, budget: int = _TURN_BYTES) -> None:
        """Write as much new output as the reader takes, and set the next timer."""
        while not self._is_done and not self._writer.is_busy:
            if self._writer.fault or self._writer.is_closed:
                self._give_up(f"standard output {self._writer.fault or 'was closed'}")
            elif budget <= 0:
                self._waiting.timer("pace", time.monotonic(), self._pump)
                return
            elif piece := self._fetch():
                budget -= len(piece)
                self._is_quiet = False
                self._writer.put(piece)
            else:
                self._rest()
                return
        # The writer calls again when its reader has taken everything.
        self._waiting.timer("pace", None, self._pump)

    def _fetch(self) -> bytes:
        """Return the next piece of the feeds in turn; empty if there is none."""
        # Output of earlier attempts comes first, with unfinished lines.
        while self._feeds and self._feeds[0].is_final:
            if piece := self._take(self._feeds[0], is_last=True):
                return piece
            self._feeds.pop(0).close()
        for _ in range(len(self._feeds)):
            self._turn = (self._turn + 1) % len(self._feeds)
            if piece := self._take(self._feeds[self._turn], is_last=self._is_last):
                return piece
        return b""

    def _take(self, feed: Feed, *, is_last: bool) -> bytes:
        piece = feed.take(is_last=is_last, now=time.monotonic())
        if piece:
            self._is_mid_line = not piece.endswith(b"\n")
        return piece

    def _rest(self) -> None:
        """Wait for more output, for a shorter time while the files grow at a readable pace."""
        if self._is_last:
            self._stop()
            return
        self._pace_s = min(_SLOWER * self._pace_s, _QUIET_PACE_S) if self._is_quiet else _PACE_S
        self._is_quiet = True
        now = time.monotonic()
        due = [feed.due_at for feed in self._feeds if feed.due_at is not None]
        self._waiting.timer("pace", min((now + self._pace_s, *due)), self._pump)

    def _give_up(self, why: str) -> None:
        self._stop()
        if self._shown:
            logs = [log for logs in self._logs.values() for log in logs]
            where = logs[0] if len(logs) == 1 else f"{os.path.dirname(logs[0])}/"
            self._job.log(f"{why}; all output is in {where}")

    def _stop(self) -> None:
        if self._is_done:
            return
        self._is_done = True
        for feed in self._feeds:
            feed.close()
        self._waiting.timer("pace", None, self._pump)


def _are_one_file(first: int, second: int) -> bool:
    """Whether two descriptors refer to the same terminal, pipe or file."""
    try:
        return os.path.sameopenfile(first, second)
    except OSError:
        return False
