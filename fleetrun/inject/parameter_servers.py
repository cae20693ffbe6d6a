"""Training with parameter servers: counts what a trainer's program sends, and reports `a_sync`.

Paddle's `minimize` replaces the updates in a trainer's program by operators that send gradients to
the servers, or with `a_sync_configs.k_steps` keeps them (geo mode).
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
# The communicator's name for k_steps.
_K_STEPS = "communicator_max_merge_var_num"
_watching = border.watching("the count of what is sent to servers")


def are_used() -> bool:
    """Whether this process belongs to a job with parameter servers."""
    return bool(os.environ.get("PADDLE_PSERVERS_IP_PORT_LIST"))


def install(spec: StrategySpec, proof: Evidence) -> None:
    """Inspect each program that a trainer runs, if there are servers."""
    if are_used() and paddle_api.has(private_names.SERVERS):
        after_import("paddle.base.executor", lambda module: _patch(module, spec, proof))
        if "a_sync_configs" in spec.strategy:
            after_import(
                "paddle.distributed.communicator",
                lambda module: watch_method(module.Communicator, "start", after=_read),
            )


@_watching
def _read(communicator: Any) -> None:
    """Report how often COMMUNICATOR, which has started, exchanges."""
    steps = communicator.envs[_K_STEPS] if communicator.mode == "GEO" else None
    settings.report(
        "a_sync_configs",
        holds=steps == str(settings.effective("a_sync_configs").get("k_steps", 0)),
        evidence=f"geo, every {steps} steps",
        reason="only geo mode, with k_steps above 0, reads it",
    )


def _patch(module: Any, spec: StrategySpec, proof: Evidence) -> None:
    """Inspect each program before its run, and record an update after it."""
    # By program: whether it sends and leaves the updates to the servers.
    leaves: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    @_watching
    def inspect(program: Any) -> None:
        types = [op.type for op in programs.operators(program)]
        sends = {kind: types.count(kind) for kind in _SENDS if kind in types}
        # Updates of the program's own are recorded like any others.
        leaves[program] = bool(sends) and not programs.updates(program)
        if sends:
            proof.graph = "static"
            proof.counts["sends"] = sends
            sent = ", ".join(f"{number} {kind}" for kind, number in sends.items())
            if "a_sync" in spec.strategy:
                settings.report(
                    "a_sync",
                    holds={*_WAITS}.isdisjoint(types),
                    evidence=f"{sent} operators, without waiting",
                    reason="the program waits at barriers",
                )

    def run(
        name: str, call: Any, executor: Any, program: Any = None, *args: Any, **more: Any
    ) -> Any:
        paddle: Any = sys.modules["paddle"]
        main = paddle.static.default_main_program() if program is None else program
        if main not in leaves and hasattr(main, "blocks"):
            inspect(main)
        result = call(executor, program, *args, **more)
        if main in leaves and name == "train_from_dataset":
            proof.note("a run of train_from_dataset counts as one update")
            updates.record(main)
        elif leaves.get(main):
            updates.record(main)
        return result

    for name in ("run", "train_from_dataset"):
        in_place_of(module.Executor, name)(functools.partial(run, name))
