"""Observers of a run: sinks show or record it and may fail, sources feed the policy."""

from __future__ import annotations

import time
from abc import abstractmethod
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from fleetrun.run.events import SourceFailed
from fleetrun.run.loop import LoopShare

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fleetrun.errors import FleetrunError
    from fleetrun.model import LaunchPlan
    from fleetrun.records.folder import Folder
    from fleetrun.run.events import Declared, Happening
    from fleetrun.run.loop import Loop, Waiting


class _Observer:
    """The common base of sinks and sources; each overrides what it needs."""

    def prepare(self) -> None:
        """Prepare before anything starts; a FleetrunError means that nothing is started."""

    def withdraw(self) -> None:
        """Undo what was prepared: nothing is started."""

    def on_event(self, happening: Happening) -> None:
        """Handle what happened or was done, in order; Finished is the last."""

    def is_busy(self) -> bool:
        """Whether something is still to be written after Finished."""
        return False

    def close(self) -> None:
        """End."""


class Sink(_Observer):
    """Observes a run and shows or records it. It may fail without hurting the job."""

    def open(self, waiting: Waiting) -> None:
        """Begin, once all processes are started."""

    def shows(self, process: int) -> bool:  # noqa: ARG002 - for those that override it
        """Whether the user has seen all output of PROCESS."""
        return False


class Source(_Observer):
    """Observes a run and feeds the policy. Its own failure is an event, too.

    If it `is_required`, that ends the job with its `exit_code`. `without` completes the sentences
    "the job cannot go on ..." and "the job goes on ...".
    """

    name = "a source"
    without = "without it"
    is_required = False
    exit_code = 1

    def open(self, waiting: Waiting, declare: Callable[[Declared], None]) -> None:
        """Begin, once all processes are started; DECLARE takes what the policy must know."""


class Caller(Protocol):
    """The program in Python that has started the launcher, and hears of its job."""

    @abstractmethod
    def gathering(self) -> None:
        """Hear that nothing is wrong here, and that others are waited for."""

    @abstractmethod
    def sink(self, plan: LaunchPlan) -> Sink:
        """Return what hears of the job of PLAN."""

    @abstractmethod
    def failed(self, error: FleetrunError, message: str) -> None:
        """Hear of the ERROR by which there is no job; MESSAGE is without secrets."""


class Equipment(NamedTuple):
    """The observers of a run, and its run directory."""

    sinks: Sequence[Sink]
    sources: Sequence[Source]
    folder: Folder


class Observers:
    """All sinks and sources of a run, in the order in which they are notified.

    DECLARE takes what sources declare. An observer that fails is closed.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        sources: Sequence[Source],
        *,
        say: Callable[[str], None],
        declare: Callable[[Declared], None],
    ) -> None:
        # Sinks first: they must see an exit before what a source concludes from it.
        self._all: list[Sink | Source] = [*sinks, *sources]
        self._say = say
        self._declare = declare
        self._shares: dict[int, LoopShare] = {}
        # What happened before they were opened; None: they are open.
        self._undelivered: list[Happening] | None = []
        self._warned: set[str] = set()

    def prepare(self) -> None:
        """Prepare all; a FleetrunError means that nothing can be started."""
        for one in self._all:
            one.prepare()

    def withdraw(self) -> None:
        """Undo what was prepared, the last first."""
        for one in reversed(self._all):
            one.withdraw()

    def open(self, loop: Loop) -> None:
        """Open all, and notify them of what has happened so far."""
        undelivered, self._undelivered = self._undelivered or [], None
        for one in list(self._all):
            share = self._shares[id(one)] = LoopShare(loop, partial(self._shielded, one))
            begin = one.open if isinstance(one, Sink) else partial(self._open_source, one)
            self._shielded(one, partial(begin, share))
        for happening in undelivered:
            self.on_event(happening)

    def _open_source(self, source: Source, waiting: Waiting) -> None:
        def declare(declared: Declared) -> None:
            if source in self._all:
                self._declare(declared)

        source.open(waiting, declare)

    def on_event(self, happening: Happening) -> None:
        """Notify all."""
        if self._undelivered is not None:
            # Starting the ranks goes first; this is delivered by `open`.
            self._undelivered.append(happening)
            return
        for one in list(self._all):
            if one in self._all:
                self._shielded(one, partial(one.on_event, happening))

    def is_busy(self) -> bool:
        """Whether any still has something to write."""
        return any(one.is_busy() for one in self._all)

    def shows(self, process: int) -> bool:
        """Whether the user has seen all output of PROCESS."""
        return any(one.shows(process) for one in self._all if isinstance(one, Sink))

    def close(self) -> None:
        """Close all; the one that prints messages was opened first and is closed last."""
        for one in reversed(list(self._all)):
            self._shielded(one, one.close)

    def _shielded(self, one: Sink | Source, call: Callable[[], None]) -> None:
        """Call CALL; an exception closes a sink with a warning, and is an event of a source."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - as said above
            if one not in self._all:
                return
            self._all.remove(one)
            if id(one) in self._shares:
                self._shares[id(one)].clear()
            why = (error.strerror if isinstance(error, OSError) else "") or repr(error)
            if isinstance(one, Sink):
                self._warn(one, why)
            else:
                self._report(one, why)

    def _warn(self, sink: Sink, why: str) -> None:
        """Warn that SINK has failed; one full disk that fails several sinks is one warning."""
        if why not in self._warned:
            self._warned.add(why)
            name = _words(type(sink).__name__)
            self._say(f"The {name} failed ({why}); the job goes on without it.")

    def _report(self, source: Source, why: str) -> None:
        """Let the policy decide what the failure of SOURCE means."""
        # The other hosts must notice that this one does not answer any more.
        with suppress(Exception):
            source.close()
        failed = SourceFailed(
            source=source.name,
            why=why,
            without=source.without,
            at=time.monotonic(),
            is_required=source.is_required,
            exit_code=source.exit_code,
        )
        if not source.is_required:
            self._say(failed.sentence())
        self._declare(failed)


def _words(name: str) -> str:
    """Return the NAME of a class as words.

    >>> _words("RunDirectory"), _words("_EventLog")
    ('run directory', 'event log')
    """
    letters = (f" {letter.lower()}" if letter.isupper() else letter for letter in name)
    return "".join(letters).lstrip("_ ")
