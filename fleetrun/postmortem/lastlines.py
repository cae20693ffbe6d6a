"""The end of a log that explains a failure: a traceback, a crash, or just the last lines."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fleetrun.postmortem import causes
from fleetrun.postmortem.stack_groups import Frame
from fleetrun.rundir import reading

_TAIL_BYTES = 64 * 1024
# The longest traceback to show whole; without one, the last lines are enough.
_TRACEBACK_LINES = 100
PLAIN_LINES = 20
_TRACEBACK = "Traceback (most recent call last)"
# Between two tracebacks that belong together.
_CHAINED = (
    "During handling of the above exception",
    "The above exception was the direct cause",
)
# The first lines of a crash dump by faulthandler and by Paddle.
_CRASHES = ("Fatal Python error: ", "C++ Traceback (most recent call last)")
# How C++ reports an uncaught exception, in one or two lines before the crash.
_UNCAUGHT = "terminate called after throwing an instance of "
_UNCAUGHT_LINES = 3
# How Paddle's executor of static programs reports what an operator has raised.
_IN_EXECUTOR = " raises an exception "
# Where Paddle's message begins, below the stack of its C++ code.
_SUMMARY = "Error Message Summary:"
_FRAME = re.compile(r'\s+File "(.+)", line ([0-9]+)')
# The most of a message that one line has, and of a line: an exception may quote a whole tensor.
LONGEST, _LONGEST_LINE = 300, 2000


def tail(path: str) -> str:
    """Return the end of a log as text, whatever its bytes; empty if it cannot be read."""
    return (reading.content(path, _TAIL_BYTES, from_end=True) or b"").decode(errors="replace")


def of(logs: Sequence[str]) -> tuple[list[str], str]:
    """Return the last lines of a process's LOGS, and the log that has them.

    Standard error, the last of LOGS, is preferred unless only standard output explains more.
    """
    candidates = [(last_lines(tail(log)), log) for log in reversed(logs)]
    return max(candidates, key=lambda candidate: (explains(candidate[0]), bool(candidate[0])))


def last_lines(text: str) -> list[str]:
    r"""Return the end of a log that explains a failure: the traceback, or the last lines.

    >>> last_lines("step 1\nterminate called after throwing an instance of 'E'\n"
    ...            "  what():  no\nFatal Python error: Aborted\n")[:2]
    ["terminate called after throwing an instance of 'E'", '  what():  no']
    >>> last_lines("W1126 all_reduce raises an exception gloo::TimeoutException, [...] TIMEOUT\n"
    ...            "Traceback (most recent call last):\nRuntimeError: std::exception\n")[0][:32]
    'W1126 all_reduce raises an excep'
    >>> last_lines(" 20%|##  | 20/100Traceback (most recent call last):\nOSError: no")
    ['Traceback (most recent call last):', 'OSError: no']
    """
    # Keep the last state of a progress bar. Only line feeds separate lines in a log.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.rstrip().split("\n")]
    lines = [_from_its_begin(line) for line in lines]
    start = _start_of_crash(lines)
    if start is not None:
        return shorten(_without_unrelated(lines[start:]))
    start = _start_of_traceback(lines)
    if start is not None:
        return shorten(lines[start:])
    return shorten([line for line in lines[-PLAIN_LINES:] if line or len(lines) > 1])


def in_one_line(kind: str, message: str, stack: Sequence[str]) -> str:
    r"""Return an exception of class KIND with MESSAGE, and the user's line of the last traceback.

    >>> in_one_line("ValueError", "no such column: label\n", ['  File "/job/a.py", line 3, in f'])
    'ValueError: no such column: label (a.py:3)'
    >>> in_one_line("RuntimeError", "\n---\nC++ Traceback\nError Message Summary:\n---\nBad.", [])
    'RuntimeError: Bad.'
    """
    text = message.partition(_SUMMARY)[2] or message
    first = next((line.strip() for line in text.split("\n") if line.strip(" \r-")), "")
    if len(first) > LONGEST:
        first = f"{first[: LONGEST - 1]}…"
    where = ""
    for line in stack:
        match = re.match(_FRAME, line)
        if line.startswith(_TRACEBACK):
            where = ""
        elif match is not None and Frame("", match[1], int(match[2])).is_users:
            where = f" ({match[1].rpartition('/')[2]}:{match[2]})"
    return f"{': '.join(filter(None, (kind, first)))}{where}"


def explains(lines: list[str]) -> bool:
    """Whether LINES have an exception or a crash."""
    return any(line.startswith((_TRACEBACK, *_CRASHES)) for line in lines)


def shorten(lines: list[str]) -> list[str]:
    """Return LINES without the middle if they are very many, and each without its own if long.

    >>> shorten(["z" * 3_000_000])[0][999:-999]
    'z[... 2998000 characters ...]z'
    """
    half = _LONGEST_LINE // 2
    lines = [
        f"{line[:half]}[... {len(line) - 2 * half} characters ...]{line[-half:]}"
        if len(line) > _LONGEST_LINE
        else line
        for line in lines
    ]
    if len(lines) <= _TRACEBACK_LINES:
        return lines
    half = _TRACEBACK_LINES // 2
    left_out = len(lines) - 2 * half + 1
    return [*lines[: half - 1], f"[... {left_out} lines ...]", *lines[-half:]]


def _from_its_begin(line: str) -> str:
    """Return LINE from the traceback or crash on that begins in it, after a bar or a prompt."""
    start = max(line.find(_TRACEBACK), line.find(_CRASHES[0]))
    return line if start < 0 or line[:start].endswith("C++ ") else line[start:]


def _start_of_crash(lines: list[str]) -> int | None:
    """Return where the last crash dump begins; faulthandler and Paddle write one each."""
    start = None
    kinds = list(_CRASHES)
    for number in reversed(range(len(lines))):
        kind = next((mark for mark in _CRASHES if lines[number].startswith(mark)), None)
        if kind in kinds:
            kinds.remove(kind)
            start = number
        elif kind is not None:
            # An earlier dump may be of a child that was replaced.
            break
    before = range(max((start or 0) - _UNCAUGHT_LINES, 0), start or 0)
    return next((number for number in before if lines[number].startswith(_UNCAUGHT)), start)


def _without_unrelated(lines: list[str]) -> list[str]:
    """Leave out the stacks of threads that did not crash, and the list of loaded modules."""
    kept: list[str] = []
    keep = True
    for line in lines:
        if line.startswith("Thread 0x"):
            keep = False
        elif not line.startswith("  ") and line:
            keep = not line.startswith("Extension modules: ")
        if keep and (line or (kept and kept[-1])):
            kept.append(line)
    return kept


def _start_of_traceback(lines: list[str]) -> int | None:
    """Return where the last traceback begins, with those that led to it."""
    starts = [number for number, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    if not starts:
        return None
    start = starts.pop()
    # The exception itself is one of a thread, which has printed it before.
    if starts and any(causes.LOADER[0] in line for line in lines[start:]):
        start = starts.pop()
    while starts and any(line.startswith(_CHAINED) for line in lines[starts[-1] : start]):
        start = starts.pop()
    # Python only hears of a `std::exception`.
    return start - 1 if start and _IN_EXECUTOR in lines[start - 1] else start
