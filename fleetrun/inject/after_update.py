"""Reports each update (heartbeat, time, evidence), and ends the rank after N updates if requested.

These callbacks run after all others, because they write the others' counts.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from . import border, heartbeats, paddle_api, rank_check, snapshots, updates
from .evidence import WHAT
from .import_hooks import after_import, watch_method
from .paddle_api import private_names
from .site import rank_records

if TYPE_CHECKING:
    from .evidence import Evidence
    from .spec import StrategySpec


_TIMES = "the record of updates"
# The second backward of a model may show more than the first.
_WRITTEN_UPDATES = 2


def install(_spec: StrategySpec, proof: Evidence) -> None:
    """Register the reports that the launcher requests by its variables."""
    last = os.environ.get("FLEETRUN_STOP_AFTER", "")
    stops = last.isdigit() and int(last) > 0
    if stops:
        recorder = _UpdateTimes(os.environ.get("FLEETRUN_RECORDS", ""), proof)
        if paddle_api.has(private_names.LOSSES):
            after_import("paddle.base.core", recorder.watch_losses)
        updates.on_update(recorder.record, _TIMES)
    verification = snapshots.requested()
    if verification is not None:
        snapshots.install(verification, proof)
    heartbeats.install(proof.claim)
    updates.on_update(functools.partial(_write, proof), WHAT, last=_WRITTEN_UPDATES)
    if stops:
        updates.on_update(functools.partial(_stop, proof, int(last)), "the stop after N updates")


class _UpdateTimes:
    """Records each update: its number, time.monotonic(), and the loss before it."""

    def __init__(self, path: str, proof: Evidence) -> None:
        self._path = path
        self._proof = proof
        self._loss: Any = None
        # Recorded one update later: reading its loss now would wait for the device.
        self._newest: tuple[int, float, Any] | None = None

    def watch_losses(self, core: Any) -> None:
        """Keep every scalar tensor that a backward starts from."""
        watch_method(core.eager, "run_backward", before=border.watching(_TIMES)(self._keep_loss))

    def _keep_loss(self, tensors: Any) -> None:
        if len(tensors) == 1 and tensors[0].size == 1:
            self._loss = tensors[0].detach()

    def record(self, _source: Any, number: int) -> None:
        """Record the time of the update NUMBER."""
        now = time.monotonic()
        if number == 1:
            # Registered this late to be called early: Paddle's own exit function, which frees the
            # tensors, is registered already.
            atexit.register(border.watching(_TIMES)(self.flush))
        self.flush()
        self._newest, self._loss = (number, now, self._loss), None

    def flush(self) -> None:
        """Append the newest record."""
        if self._newest is None or not self._proof.claim():
            return
        number, at, loss = self._newest
        self._newest = None
        # Paddle 3 does not convert a tensor of shape [1] to float.
        value = None if loss is None else loss.item()
        record = {"number": number, "at": at, "loss": value}
        rank_records.append(self._path, rank_records.UPDATE, record)


def _write(proof: Evidence, _source: Any, _number: int) -> None:
    proof.claim()
    proof.write()


def _stop(proof: Evidence, last: int, source: Any, number: int) -> None:
    """Run the exit functions and end the process with code 0 after the update LAST."""
    if number < last or not proof.claim():
        return
    # A rank that ends earlier would break the connections of the others' last collective.
    border.watching("the wait for other ranks at the end")(rank_check.barrier)(source)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads of data loaders would keep the process alive.
    os._exit(0)
