"""What the guard does in moments that a whole launch seldom meets."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fleetrun.run import guard
from fleetrun.run.descriptors import FileLimit

if TYPE_CHECKING:
    import pytest


def test_a_launcher_that_was_gone_before_it_could_be_watched_is_cleaned_up_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    killed: list[str] = []
    monkeypatch.setattr(guard, "_detach", lambda *_, **__: None)
    monkeypatch.setattr(
        guard.Guard, "_kill_by_marker", lambda self: killed.append(self._marker.decode())
    )
    one = guard.Guard("marker", FileLimit(1))
    try:
        one._be_watcher(gone)
    finally:
        one.dismiss()
    assert killed == ["marker"]
