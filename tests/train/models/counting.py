"""Counts the collectives of this process at Paddle's process groups."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import paddle
from paddle.base import core

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Each call with a float32 tensor, which gradients are (agreements of ranks are integers): its name,
# the tensor's bytes, the group, and whether the training thread waits for it.
_calls: list[tuple[str, int, int, bool]] = []


def observe(see: Callable[[str, Any, Any], None], *names: str) -> None:
    """Call SEE with the name, group and tensor of each collective of these NAMES, as it begins."""
    for name in names:
        setattr(core.ProcessGroup, name, _observed(see, name, getattr(core.ProcessGroup, name)))


def _observed(
    see: Callable[[str, Any, Any], None], name: str, plain: Callable[..., Any]
) -> Callable[..., Any]:
    def observed(group: Any, tensor: Any, *args: Any) -> Any:
        see(name, group, tensor)
        return plain(group, tensor, *args)

    return observed


def _count(name: str, group: Any, tensor: Any) -> None:
    if tensor.dtype == paddle.float32:
        waits = threading.current_thread() is threading.main_thread()
        _calls.append((name, tensor.size * 4, id(group), waits))


observe(_count, "all_reduce", "reduce", "broadcast")


class Meter:
    """Counts the collectives of some backwards."""

    def __init__(self) -> None:
        # The bytes of each allreduce, by backward.
        self.summed: list[list[int]] = []
        self._all: list[tuple[str, int, int, bool]] = []

    @property
    def allreduces(self) -> list[int]:
        """How many allreduces each backward made."""
        return [len(sizes) for sizes in self.summed]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count collectives within the block."""
        before = len(_calls)
        yield
        made = _calls[before:]
        self._all += made
        self.summed.append([size for name, size, _, _ in made if name == "all_reduce"])

    def report(self) -> dict[str, Any]:
        """Return the counts."""
        return {
            "summed": self.summed,
            "groups": len({group for name, _, group, _ in self._all if name == "all_reduce"}),
            "waited": sum(waits for _, _, _, waits in self._all),
            "reduced": sum(name == "reduce" for name, _, _, _ in self._all),
            "broadcast": sum(name == "broadcast" for name, _, _, _ in self._all),
        }
