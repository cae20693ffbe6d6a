"""Runs in the training process: makes the strategy take effect and reports the evidence.

`site/sitecustomize.py` loads this package under a name of its own when Paddle is first imported.
The training's Python need not have fleetrun. So everything here uses relative imports, the standard
library, and, inside functions, numpy and Paddle; the syntax is Python 3.8's.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from typing import TYPE_CHECKING

from . import (
    after_update,
    border,
    distributed_strategy,
    dygraph,
    flight_recorder,
    gloo_stores,
    heartbeats,
    import_hooks,
    paddle_api,
    parameter_servers,
    rank_check,
    remaining_fields,
    settings,
    static,
    step_profiler,
    topology,
    updates,
)
from .evidence import Evidence
from .paddle_api import private_names
from .spec import StrategySpec, read_spec
from .static import program_runs

if TYPE_CHECKING:
    from types import ModuleType

# In this order: what the script sets is recorded before it is used, and what is reported after an
# update is complete before it is written. Each with the capability of Paddle that it needs; parts
# without one check for themselves.
_PARTS = (
    (distributed_strategy, private_names.STRATEGY),
    (updates, private_names.COUNTING),
    (gloo_stores, private_names.GROUPS),
    (dygraph, ""),
    (static, private_names.STATIC),
    (parameter_servers, ""),
    (rank_check, ""),
    (remaining_fields, ""),
    (after_update, ""),
)
# Parts that change how ranks communicate: a rank without one would keep the others waiting.
_COMMUNICATE = tuple(
    part.__name__ for part in (distributed_strategy, gloo_stores, dygraph, static, rank_check)
)


def arm(path: str) -> None:
    """Prepare everything for the strategy in the file PATH, before Paddle is imported.

    The evidence goes to the rank's records. A part that fails is reported there and on stderr, and
    the launcher reports that its fields have no effect. Without a PATH, only what else the launcher
    requests is prepared, such as heartbeats and a profile.
    """
    spec = read_spec(path) if path else StrategySpec()
    proof = Evidence(os.environ.get("FLEETRUN_RECORDS", "") if path else "", spec)
    import_hooks.on_failure(functools.partial(_note_failure, proof))
    border.on_remark(lambda text: _remark(proof, text))

    def install(paddle: ModuleType) -> None:
        import_hooks.after_import("paddle.base.core", _leave_to_python)
        topology.watch(paddle)
        flight_recorder.watch()
        try:
            if path:
                _install_all(spec, proof)
            else:
                _report_updates(paddle, proof, spec)
        except Exception as error:
            what = "the strategy cannot be applied" if path else "updates are not reported"
            text = f"{what}: {error!r}"
            proof.unapplied.append(text)
            _report(proof, text)
        step_profiler.watch(paddle)
        # Record at once that this process has imported Paddle, in case it ends early.
        proof.write()

    # When Paddle is imported, all names are checked before anything is patched.
    import_hooks.after_import("paddle", install)
    proof.write_at_exit()


def _report_updates(paddle: ModuleType, proof: Evidence, spec: StrategySpec) -> None:
    """Prepare the reports of updates of a training without a strategy."""
    updates.watch()
    if "FLEETRUN_STOP_AFTER" in os.environ:
        after_update.install(spec, proof)
    elif "FLEETRUN_REPORT_UPDATES" in os.environ:
        heartbeats.install()
    else:
        return
    program_runs.watch(paddle.static.Executor)


def _leave_to_python(core: ModuleType) -> None:
    """Keep paddle.jit.to_static from translating our functions, which it cannot do.

    Nor json's, which they call: a compiled function may step the optimizer.
    """
    if hasattr(core, "eval_frame_skip_file_prefix"):
        folders = map(os.path.dirname, (__file__, json.__file__))
        core.eval_frame_skip_file_prefix(tuple(folder + os.sep for folder in folders))


def _install_all(spec: StrategySpec, proof: Evidence) -> None:
    settings.reset(spec, proof)
    paddle_api.check_names()
    for part, capability in _PARTS:
        if capability and not paddle_api.has(capability):
            continue
        try:
            part.install(spec, proof)
        except Exception as error:
            text = f"{part.__name__.rpartition('.')[2]} could not be installed: {error!r}"
            _note_failure(proof, text, part.__name__)
    if paddle_api.remark():
        _report(proof, paddle_api.remark())
    if spec.topology.nranks > 1:
        proof.unapplied += filter(None, map(paddle_api.lack, private_names.COMMUNICATING))


def _note_failure(proof: Evidence, text: str, module: str) -> None:
    """Report TEXT, which says that MODULE could not patch Paddle."""
    # After the first evidence, ranks import a module at different times: a failure would look as if
    # only the first of them had it.
    if module.startswith(_COMMUNICATE) and not proof.is_begun:
        proof.unapplied.append(text)
    _report(proof, text)


def _remark(proof: Evidence, text: str) -> None:
    proof.failures.append(text)
    _report(proof, text)


def _report(proof: Evidence, text: str) -> None:
    proof.note(text)
    print(f"fleetrun: {text}", file=sys.stderr)
