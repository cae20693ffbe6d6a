"""Counts the collectives of this process by itself, at Paddle's process groups."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import paddle
from paddle.base import core

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Each call for a float32 tensor, which gradients are: what ranks agree on is in integers.
# Its name, the tensor's bytes, the group, and whether the thread that trains waits for it.
_calls: list[tuple[str, int, int, bool]] = []


def _counted(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    def counted(group: Any, tensor: Any, *args: Any) -> Any:
        if tensor.dtype == paddle.float32:
            waits = threading.current_thread() is threading.main_thread()
            _calls.append((name, tensor.size * 4, id(group), waits))
        return plain(group, tensor, *args)

    return counted


for _name in ("all_reduce", "reduce", "broadcast"):
    setattr(core.ProcessGroup, _name, _counted(_name, getattr(core.ProcessGroup, _name)))


class Meter:
    """Tells what was called in some backwards."""

    def __init__(self) -> None:
        # The bytes of each allreduce, by backward.
        self.summed: list[list[int]] = []
        self._all: list[tuple[str, int, int, bool]] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count what happens within."""
        before = len(_calls)
        yield
        made = _calls[before:]
        self._all += made
        self.summed.append([size for name, size, _, _ in made if name == "all_reduce"])

    def report(self) -> dict[str, Any]:
        """Return what was counted."""
        return {
            "summed": self.summed,
            "groups": len({group for name, _, group, _ in self._all if name == "all_reduce"}),
            "waited": sum(waits for _, _, _, waits in self._all),
            "reduced": sum(name == "reduce" for name, _, _, _ in self._all),
            "broadcast": sum(name == "broadcast" for name, _, _, _ in self._all),
        }
