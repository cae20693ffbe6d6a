"""Appends JSON lines to the file in which a rank reports to the launcher.

Every Python of a rank loads this file by its path, so its syntax is plain, and it imports late.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

SCHEMA = 1
# The rank's exception, its exit code before it exits, and the evidence of the strategy.
EXCEPTION, EXIT, STRATEGY = "exception", "exit", "strategy"
# The time of an update, with the loss before it.
UPDATE = "update"
# The axes of fleet's topology, and their sizes.
TOPOLOGY = "topology"
_READ_APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def append(path: str, kind: str, record: "Mapping[str, Any]") -> None:
    """Append RECORD, without secrets, as one of KIND to the file PATH, or raise OSError."""
    import json
    import time

    entry = {
        "schema": SCHEMA,
        "kind": kind,
        "rank": _number("PADDLE_TRAINER_ID"),
        "host": os.uname()[1],
        "pid": os.getpid(),
        "restart": _number("PADDLE_RESTART_COUNT") or 0,
        "time": time.time(),
        # The launcher compares it with the ends of other ranks; the wall clock may be changed.
        "monotonic": time.monotonic(),
    }
    entry.update(record)
    if any(value and not isinstance(value, (int, float)) for value in record.values()):
        plain = json.loads(json.dumps(entry, default=str))
        entry = _everywhere(plain, _redactor())
    line = (json.dumps(entry) + "\n").encode()
    # Private from the first byte, and never through a link.
    fd = os.open(path, _READ_APPEND, 0o600)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            # A full disk has truncated the previous record.
            line = b"\n" + line
        os.write(fd, line)
    finally:
        os.close(fd)


def read(path: str, kind: str) -> "Iterator[dict[str, Any]]":
    """Yield the records of KIND in PATH from processes of this attempt of the rank."""
    import json

    try:
        with open(path, "rb") as file:
            lines = file.readlines()
    except OSError:
        return
    for line in lines:
        try:
            record = json.loads(line.decode())
            is_wanted = record["kind"] == kind
            if is_wanted and record["restart"] == (_number("PADDLE_RESTART_COUNT") or 0):
                yield record
        except (ValueError, KeyError, TypeError):
            continue


def _everywhere(value: "Any", redact: "Callable[[str], str]") -> "Any":
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: _everywhere(item, redact) for key, item in value.items()}
    return [_everywhere(item, redact) for item in value] if isinstance(value, list) else value


def _redactor() -> "Callable[[str], str]":
    """Return a function that redacts secrets in a text; long texts if that cannot be loaded."""
    from importlib import util

    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    try:
        spec = util.spec_from_file_location(
            "_fleetrun_secrets", os.path.join(root, "rundir", "secrets.py")
        )
        assert spec is not None
        assert spec.loader is not None
        module = util.module_from_spec(spec)
        spec.loader.exec_module(module)
        redact: "Callable[[str], str]" = module.Hider(_environ(), sys.argv)
    except Exception:
        return lambda text: text if text.isidentifier() else "(see its log)"
    return redact


def _environ() -> "dict[str, str]":
    """Return the environment of this process, also what the script has removed or changed."""
    try:
        with open("/proc/self/environ", "rb") as file:
            entries = [os.fsdecode(entry) for entry in file.read().split(b"\0")]
    except OSError:
        entries = []
    environ = {entry.partition("=")[0]: entry.partition("=")[2] for entry in entries}
    for name, value in os.environ.items():
        # A variable that the script has changed has two values.
        environ["NEW_" + name if environ.get(name, value) != value else name] = value
    return environ


def _number(name: str) -> "int | None":
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else None
