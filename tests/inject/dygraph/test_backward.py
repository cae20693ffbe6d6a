"""Callbacks around every backward, whichever thread runs it."""

from __future__ import annotations

import threading
from types import ModuleType, SimpleNamespace
from typing import Any

from waiting import TRAINING_S

from fleetrun.inject.dygraph import backward


def test_the_backward_of_another_thread_waits_and_is_not_taken_for_a_nested_one() -> None:
    is_inside, is_begun, calls = threading.Event(), threading.Event(), []

    class Listener:
        begin = staticmethod(lambda: calls.append("begin"))
        finish = staticmethod(lambda: calls.append("finish"))

    def run_backward(name: str) -> None:
        calls.append(name)
        if name == "beside":
            is_inside.set()
            assert is_begun.wait(TRAINING_S)

    core: Any = ModuleType("core")
    core.eager = SimpleNamespace(run_backward=run_backward, _add_backward_final_hook=None)
    backward.patch(core)
    listener: Any = Listener()
    backward.listen(listener)
    beside = threading.Thread(target=core.eager.run_backward, args=["beside"])
    beside.start()
    assert is_inside.wait(TRAINING_S)
    is_begun.set()
    core.eager.run_backward("training")
    beside.join()
    assert calls == ["begin", "beside", "finish", "begin", "training", "finish"]
