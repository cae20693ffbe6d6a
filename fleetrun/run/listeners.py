"""Who hears of a run: sinks pass it on and may fail, sources feed the policy and may not."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from fleetrun.run.events import SourceFailed
from fleetrun.run.loop import LoopShare

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fleetrun.records.folder import Folder
    from fleetrun.run.events import Declared, Happening
    from fleetrun.run.loop import Loop, Waiting


class _Listener:
    """What sinks and sources have in common; each overrides what it needs."""

    def prepare(self) -> None:
        """Do what must be done before anything starts; FleetrunError means that nothing will."""

    def tell(self, happening: Happening) -> None:
        """Hear what happened or was done, in order; Finished is the last."""

    def is_busy(self) -> bool:
        """Whether something is still to be delivered after Finished."""
        return False

    def close(self) -> None:
        """End."""


class Sink(_Listener):
    """Hears of a run and shows it or writes it down. It may fail without hurting the job."""

    def open(self, waiting: Waiting) -> None:
        """Begin, once all processes are started."""

    def shows(self, process: int) -> bool:  # noqa: ARG002 - for those that override it
        """Whether the user has seen all output of PROCESS."""
        return False


class Source(_Listener):
    """Hears of a run and feeds the policy. Its own failure is an event, too.

    If it `is_required`, that ends the job with its `exit_code`. `without` completes the sentences
    "the job cannot go on ..." and "the job goes on ...".
    """

    name = "a source"
    without = "without it"
    is_required = False
    exit_code = 1

    def open(self, waiting: Waiting, declare: Callable[[Declared], None]) -> None:
        """Begin, once all processes are started; DECLARE takes what the policy must know."""


class Equipment(NamedTuple):
    """Who hears of a run, and its run directory."""

    sinks: Sequence[Sink]
    sources: Sequence[Source]
    folder: Folder


class Listeners:
    """All sinks and sources of a run, in the order in which they hear of what happens.

    DECLARE takes what sources tell. A listener that fails is let go.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        sources: Sequence[Source],
        *,
        say: Callable[[str], None],
        declare: Callable[[Declared], None],
    ) -> None:
        # What a source makes of an exit, the sinks hear after the exit.
        self._all: list[Sink | Source] = [*sinks, *sources]
        self._say = say
        self._declare = declare
        self._shares: dict[int, LoopShare] = {}
        # What happened before they were opened; None: they are open.
        self._untold: list[Happening] | None = []
        self._warned: set[str] = set()

    def prepare(self) -> None:
        """Let everybody prepare; FleetrunError means that nothing can be started."""
        for one in self._all:
            one.prepare()

    def open(self, loop: Loop) -> None:
        """Let everybody begin, and tell them what has happened so far."""
        untold, self._untold = self._untold or [], None
        for one in list(self._all):
            share = self._shares[id(one)] = LoopShare(loop, partial(self._shielded, one))
            begin = one.open if isinstance(one, Sink) else partial(self._open_source, one)
            self._shielded(one, partial(begin, share))
        for happening in untold:
            self.tell(happening)

    def _open_source(self, source: Source, waiting: Waiting) -> None:
        def declare(declared: Declared) -> None:
            if source in self._all:
                self._declare(declared)

        source.open(waiting, declare)

    def tell(self, happening: Happening) -> None:
        """Tell everybody."""
        if self._untold is not None:
            # Starting goes first; they hear of it in a moment.
            self._untold.append(happening)
            return
        for one in list(self._all):
            if one in self._all:
                self._shielded(one, partial(one.tell, happening))

    def is_busy(self) -> bool:
        """Whether anybody has still something to deliver."""
        return any(one.is_busy() for one in self._all)

    def shows(self, process: int) -> bool:
        """Whether the user has seen all output of PROCESS."""
        return any(one.shows(process) for one in self._all if isinstance(one, Sink))

    def close(self) -> None:
        """End; who can say something to the user was opened first and is closed last."""
        for one in reversed(list(self._all)):
            self._shielded(one, one.close)

    def _shielded(self, one: Sink | Source, call: Callable[[], None]) -> None:
        """Do CALL; a sink that fails in it is not worth a training run, a source is an event."""
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
        """Say that SINK is let go; what one full disk does to several is one warning."""
        if why not in self._warned:
            self._warned.add(why)
            self._say(f"{type(sink).__name__} failed ({why}); the job goes on without it.")

    def _report(self, source: Source, why: str) -> None:
        """Let the policy decide what the failure of SOURCE means."""
        # The other hosts shall notice that nobody answers them any more.
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
