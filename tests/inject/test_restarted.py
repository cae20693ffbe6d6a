"""The moments of a restarted rank are recorded without a trace in Paddle."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fleetrun.inject import heartbeats, restarted


class Group:
    """A process group with a collective."""

    def allreduce(self) -> str:
        """Return what it is."""
        return "allreduce"


class Executor:
    """Runs nothing."""

    def run(self, program: object = None) -> object:
        """Return PROGRAM."""
        return program


def patched(kind: type, name: str, calls: list[str]) -> None:
    """Put a method in place of another one, as a script may do, which adds to CALLS."""
    real = getattr(kind, name)

    def own(self: object, *words: object) -> object:
        calls.append(name)
        return real(self, *words)

    setattr(kind, name, own)


@pytest.mark.parametrize("is_patched", [False, True])
def test_methods_that_the_script_has_replaced_stay(
    monkeypatch: pytest.MonkeyPatch, *, is_patched: bool
) -> None:
    monkeypatch.setattr(heartbeats, "are_programs_watched", False)
    kinds: Any = [type(kind.__name__, (kind,), {**vars(kind)}) for kind in (Group, Executor)]
    group, executor = kinds
    calls: list[str] = []
    recorded: list[str] = []
    restarted._watch_groups(recorded.append, SimpleNamespace(ProcessGroup=group))
    paddle = SimpleNamespace(
        static=SimpleNamespace(Executor=executor), in_dynamic_mode=lambda: True
    )
    restarted._watch_programs(paddle)
    if is_patched:
        patched(group, "allreduce", calls)
        patched(executor, "run", calls)
    for _ in range(3):
        assert group().allreduce() == "allreduce"
        assert executor().run("program") == "program"
    assert recorded == [restarted.FIRST_COLLECTIVE]
    assert calls == 3 * ["allreduce", "run"] * is_patched
    assert heartbeats.are_programs_watched
    if not is_patched:
        assert group.allreduce is Group.allreduce
