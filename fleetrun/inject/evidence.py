"""The evidence of what took effect in this rank, appended to its records."""

from __future__ import annotations

import atexit
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from . import border
from .site import rank_records

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .spec import StrategySpec

# The name of this module's work in remarks.
WHAT = "the evidence of the strategy"
EFFECTIVE, NO_EFFECT, REFUSED, SCRIPT = "effective", "no_effect", "refused", "script"
# In effect, but this job trains the same without it.
NO_DIFFERENCE = "no_difference"
# Unknown, because the check that would show an effect has failed.
NO_WORD = "no_word"


def plural(count: int, noun: str) -> str:
    """Write COUNT and NOUN, with an `s` unless COUNT is 1.

    >>> plural(1, "allreduce"), plural(0, "allreduce")
    ('1 allreduce', '0 allreduces')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class Evidence:
    """Collects what was counted in this process, and appends it to the file PATH.

    `effective` must be counted in the program or the calls that ran. What a setter accepted is no
    evidence.
    """

    def __init__(self, path: str, spec: StrategySpec) -> None:
        self._path = path
        self._spec = spec
        self._pid = os.getpid()
        self._fields: dict[str, dict[str, Any]] = {}
        self._notes: list[str] = []
        self._disagreements: list[dict[str, Any]] = []
        self._written = ""
        # Whether this process trains the rank; None before its first update.
        self._is_trainer: bool | None = None
        # By name: gradients, allreduces, bucket_bytes, communicators, groups, ...
        self.counts: dict[str, Any] = {}
        # `dygraph` or `static`, once something was trained.
        self.graph = ""
        # Returns the number of updates so far.
        self.count_updates: Callable[[], int] = int
        # The next backward shows more, for which the table waits: it is printed once.
        self.awaits_backward = False
        # The watching functions that have failed.
        self.failures: list[str] = []
        # Changes to the training that could not be installed.
        self.unapplied: list[str] = []
        # None: the ranks were not compared.
        self.ranks_equal: bool | None = None
        # The update after which they were last compared.
        self.compared_after: int | None = None

    @property
    def is_begun(self) -> bool:
        """Whether something was written, so that the launcher compares it with other ranks'."""
        return bool(self._written)

    def field(
        self, name: str, status: str, *, in_effect: Any = None, reason: str = "", evidence: str = ""
    ) -> None:
        """Set the row of the field NAME; it replaces an earlier row."""
        self._fields[name] = {
            "name": name,
            "asked": self._spec.asked(name),
            "in_effect": in_effect,
            "status": status,
            "reason": reason,
            "evidence": evidence,
        }

    def put(self, name: str, **changes: Any) -> None:
        """Change the columns CHANGES in the row of the field NAME."""
        self._fields[name].update(changes)

    def status(self, name: str) -> str | None:
        """Return the status of the field NAME; None if it has no row."""
        return self._fields[name]["status"] if name in self._fields else None

    def known(self, name: str, value: Any) -> Mapping[str, Any]:
        """Return what the launcher knows of the field NAME with VALUE in this graph and Paddle."""
        paddle = sys.modules.get("paddle")
        # Other versions count as the nearest, 2 or 3.
        version = str(getattr(paddle, "__version__", ""))[:1]
        here = {"graph": self.graph, "device": device_kind()}
        for line in self._spec.known(name, value):
            is_here = all(line.get(key, actual) == actual for key, actual in here.items())
            if is_here and line.get("paddle", version)[:1] == version:
                return line
        return {}

    def note(self, text: str) -> None:
        """Add the sentence TEXT for the user, once."""
        if text not in self._notes:
            self._notes.append(text)

    def note_dropped(self, count: int) -> None:
        """Note COUNT micro-steps that were merged and never applied, if any."""
        if count:
            were = "was" if count == 1 else "were"
            self.note(f"{plural(count, 'micro-step')} of a partial round {were} dropped")

    def disagree(self, name: str, script: Any, used: Any) -> None:
        """Record that the script sets NAME to SCRIPT, unlike the strategy; USED takes effect."""
        strategy = self._spec.asked(name)
        entry = {"name": name, "script": script, "strategy": strategy, "used": used}
        if entry not in self._disagreements:
            self._disagreements.append(entry)

    def claim(self) -> bool:
        """Claim the rank's evidence for this process, which trains; return whether that succeeds.

        A rank may have several processes; the evidence of the first one that trains counts.
        """
        if self._is_trainer is None or os.getpid() != self._pid:
            # A forked child inherits this object, and may be the process that trains.
            self._pid = os.getpid()
            self._is_trainer = not _is_taken(self._path, self._pid)
        return self._is_trainer

    @border.watching(WHAT)
    def write(self) -> None:
        """Write the evidence so far. A failure is printed, and the training goes on."""
        # Forked DataLoader workers inherit this object, and must not write.
        if os.getpid() != self._pid or not self._path:
            return
        # A process that only imports Paddle must not write after one that trains.
        if not self._is_trainer and (self._is_trainer is False or _owner(self._path)):
            return
        record = self._record()
        text = json.dumps(record, default=str)
        if text == self._written:
            return
        try:
            rank_records.append(self._path, rank_records.STRATEGY, record)
            self._written = text
        except OSError as error:
            self._path = ""
            print(f"fleetrun: the strategy's evidence cannot be written: {error}", file=sys.stderr)

    def write_at_exit(self) -> None:
        """Write again when the process ends."""

        def end() -> None:
            self.awaits_backward = False
            self.write()

        atexit.register(end)

    def _record(self) -> dict[str, Any]:
        paddle = sys.modules.get("paddle")
        return {
            "paddle": getattr(paddle, "__version__", None),
            "graph": self.graph,
            "device": device_kind(),
            # The count of updates itself may have failed.
            "complete": self.count_updates() > self.awaits_backward or bool(self.failures),
            "updates": self.count_updates(),
            "fields": [self._if_updated(field) for field in self._fields.values()],
            "counts": self.counts,
            "disagreements": self._disagreements,
            "notes": self._notes,
            "failures": self.failures,
            "unapplied": self.unapplied,
            "ranks_equal": self.ranks_equal,
            "compared_after": self.compared_after,
        }

    def _if_updated(self, field: dict[str, Any]) -> dict[str, Any]:
        """Return FIELD, as without effect until an update was made."""
        if self.count_updates() or field["status"] not in {EFFECTIVE, NO_DIFFERENCE}:
            return field
        status, reason = NO_EFFECT, "no update of the optimizer was made"
        if self.failures:
            status, reason = NO_WORD, "the check of its effect has failed"
        return {**field, "status": status, "in_effect": None, "reason": reason}


def _owner(path: str) -> int | None:
    """Return the process of this rank that trains, by the records in PATH."""
    records = rank_records.read(path, rank_records.STRATEGY)
    pids = [record["pid"] for record in records if record["complete"]]
    return pids[-1] if pids else None


def _is_taken(path: str, pid: int) -> bool:
    """Whether another process of this rank trains and still runs, by the records in PATH."""
    owner = _owner(path)
    if owner in (None, pid):
        return False
    try:
        with open(f"/proc/{owner}/environ", "rb") as file:
            environ = file.read()
    except OSError:
        return False
    # Process ids are reused.
    return os.fsencode(path) in environ


def device_kind() -> str:
    """Return the kind of device that this rank trains on, `cpu` or `gpu`; empty if unknown."""
    paddle: Any = sys.modules.get("paddle")
    try:
        return str(paddle.device.get_device()).partition(":")[0]
    except Exception:
        # Paddle is partly imported, or shut down.
        return ""
