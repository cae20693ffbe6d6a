"""Tells who wants to know that the optimizer has changed the parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from .evidence import Evidence
    from .wish import Wish

    # The optimizer (dygraph) or the program (static), and the number of updates so far.
    Heard = Callable[[Any, int], None]

_listeners: list[Heard] = []
_count = 0


def on_update(listener: Heard) -> None:
    """Call LISTENER after every update; in the order of registration."""
    _listeners.append(listener)


def happened(source: Any) -> None:  # noqa: ANN401 - an optimizer or a program
    """Say that SOURCE, an optimizer or a program, has just updated parameters."""
    global _count  # noqa: PLW0603 - one process, one training
    _count += 1
    for listener in _listeners:
        listener(source, _count)


def install(asked: Wish, proof: Evidence) -> None:  # noqa: ARG001 - every part's signature
    """Write the evidence after the first update."""

    def count(_source: Any, number: int) -> None:  # noqa: ANN401
        proof.updates = number
        if number == 1:
            proof.write()

    on_update(count)
