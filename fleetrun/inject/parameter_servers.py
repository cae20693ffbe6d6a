"""Training with parameter servers: counts what a trainer's program sends, and reports `a_sync`.

Paddle's `minimize` replaces the updates in a trainer's program by operators that send gradients to
the servers (asynchronous mode), or with `a_sync_configs.k_steps` keeps them (geo mode).
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any

from . import border, paddle_api, settings, updates
from .import_hooks import after_import, in_place_of, watch_method
from .paddle_api import private_names
from .static import program as programs

if TYPE_CHECKING:
    from .evidence import Evidence
    from .spec import StrategySpec

# Operators that send to servers, and operators of a synchronous trainer that wait for others.
_SENDS = ("send", "distributed_push_sparse")
_WAITS = ("send_barrier", "fetch_barrier")
_watching = border.watching("the count of what is sent to servers")
# The communicator's name for k_steps.
_K_STEPS = "communicator_max_merge_var_num"


def are_used() -> bool:
    """Whether this process belongs to a job with parameter servers."""
    return bool(os.environ.get("PADDLE_PSERVERS_IP_PORT_LIST"))


def install(spec: StrategySpec, proof: Evidence) -> None:
    """Inspect each program that a trainer runs, if there are servers."""
    if not are_used() or not paddle_api.has(private_names.SERVERS):
        return
    watcher = _ServerWatcher(spec, proof)
    after_import(
        "paddle.distributed.communicator",
        lambda module: watch_method(module.Communicator, "start", after=watcher.read),
    )
    after_import("paddle.base.executor", watcher.patch)


class _ServerWatcher:
    """Counts what this trainer's programs send."""

    def __init__(self, spec: StrategySpec, proof: Evidence) -> None:
        self._spec = spec
        self._proof = proof
        # The programs that send; true for those that also update parameters themselves.
        self._seen: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        # The settings of the communicator of geo mode.
        self._settings: dict[str, str] = {}

    @_watching
    def read(self, communicator: Any) -> None:
        """Read the settings of a COMMUNICATOR that has started."""
        if communicator.mode == "GEO":
            self._settings.update(communicator.envs)

    def patch(self, module: Any) -> None:
        """Inspect each program before its run, and record an update after it."""
        for name in ("run", "train_from_dataset"):
            in_place_of(module.Executor, name)(functools.partial(self._run, name))

    def _run(
        self, name: str, run: Any, executor: Any, program: Any = None, *args: Any, **options: Any
    ) -> Any:
        paddle: Any = sys.modules["paddle"]
        main = paddle.static.default_main_program() if program is None else program
        is_whole = name == "train_from_dataset"
        sends = self._inspect(main)
        result = run(executor, program, *args, **options)
        # Updates of the program's own are recorded like any others.
        if sends and (is_whole or not self._seen[main]):
            if is_whole:
                self._proof.note("a run of train_from_dataset counts as one update")
            updates.record(main)
        return result

    @_watching
    def _inspect(self, program: Any) -> bool:
        """Report what PROGRAM sends to the servers; return whether it sends."""
        if program in self._seen or not hasattr(program, "blocks"):
            return program in self._seen
        types = [op.type for op in programs.operators(program)]
        sends = {kind: types.count(kind) for kind in _SENDS if kind in types}
        if sends:
            self._seen[program] = bool(programs.updates(program))
            self._proof.graph = "static"
            self._proof.counts["sends"] = sends
            waits = not {*_WAITS}.isdisjoint(types)
            _report(self._spec, self._proof, self._settings, waits=waits)
        return bool(sends)


def _report(
    spec: StrategySpec, proof: Evidence, communicating: dict[str, str], *, waits: bool
) -> None:
    sent = ", ".join(f"{number} {kind}" for kind, number in proof.counts["sends"].items())
    steps = communicating.get(_K_STEPS)
    how = f"geo, every {steps} steps" if steps else "at each step, without waiting"
    if "a_sync" in spec.strategy:
        settings.report(
            "a_sync",
            holds=not waits,
            evidence=f"{sent} operators, {how}",
            reason="the program waits at barriers",
        )
    # With `a_sync` off, its details have no effect.
    if "a_sync_configs" in spec.strategy and settings.effective("a_sync") is not False:
        k_steps = settings.effective("a_sync_configs").get("k_steps", 0)
        settings.report(
            "a_sync_configs",
            holds=steps == str(k_steps),
            evidence=f"sends {how}",
            reason="only geo mode, with k_steps above 0, reads it",
        )
