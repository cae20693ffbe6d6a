"""Records the exception or the failing exit that ends a rank.

`sitecustomize` loads this file by its path when a rank fails, so its syntax is plain, and it
imports late.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    # Appends a record: path, kind and fields.
    Append = Callable[[str, str, Mapping[str, Any]], None]

# The most characters of a message or stack: some exceptions quote a whole tensor.
_MOST = 256 * 1024
# The most recorded frames of a stack, as many as the interpreter prints.
_FRAMES = 1000
# The most recorded failing exits that the script has caught.
_MOST_EXITS = 100
_reported: "list[BaseException]" = []
_caught: "list[None]" = []


def report(append: "Append", path: str, error: BaseException, *, is_shown: bool) -> None:
    """Append ERROR, which ends this process, to PATH; IS_SHOWN: the excepthook is called for it."""
    # A script may call the hook to print an exception, and continue.
    if is_shown and _is_called_by_the_script():
        return
    is_known = any(error is other for other in _reported)
    _reported[:] = [error]
    if not is_known and _is_main(path):
        append(path, "exception", _describe(error))


def note_exit(append: "Append", path: str, error: SystemExit, code: int) -> None:
    """Record that ERROR ends the rank with CODE."""
    # A script that catches them again and again must not fill the disk.
    if len(_caught) < _MOST_EXITS and _is_main(path):
        append(path, "exit", {"code": code})
        vars(error)["fleetrun"] = _Mark(append, path)


class _Mark:
    """Deleted with the exception; withdraws the record if the script has caught it."""

    def __init__(self, append: "Append", path: str) -> None:
        self._append, self._path, self._pid = append, path, os.getpid()

    def __del__(self) -> None:
        if os.getpid() == self._pid and _is_called_by_the_script():
            _caught.append(None)
            self._append(self._path, "exit", {"code": None})


def _is_called_by_the_script() -> bool:
    """Whether the script's code is running, and no exception has ended it."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name in ("<module>", "_run_module_as_main")


def _is_main(path: str) -> bool:
    """Whether this is the rank's first Python, not one that another Python of it has started."""
    mark = b"\0FLEETRUN_RECORDS=" + os.fsencode(path) + b"\0"
    pid = os.getppid()
    while pid > 1:
        try:
            with open("/proc/%d/environ" % pid, "rb") as file:
                if mark not in b"\0" + file.read():
                    return True
            if "python" in os.path.basename(os.readlink("/proc/%d/exe" % pid)):
                return False
            with open("/proc/%d/stat" % pid, "rb") as file:
                pid = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            return True
    return True


def _describe(error: BaseException) -> "dict[str, str]":
    """Return the record of ERROR."""
    import traceback

    kind = type(error)
    try:
        message = str(error)
    except Exception as trouble:
        message = "its text is unavailable (%s)" % type(trouble).__name__
    # Formatting a million frames would take minutes.
    lines = traceback.format_exception(kind, error, error.__traceback__, limit=-_FRAMES)
    stack = "".join(lines)
    if len(stack) > _MOST:
        stack = stack[: _MOST // 2] + "\n[...]\n" + stack[-_MOST // 2 :]
    return {
        "class": kind.__name__,
        "module": kind.__module__,
        "message": message[:_MOST],
        "stack": stack,
    }
