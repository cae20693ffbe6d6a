"""Training with parameter servers: the gradients that a trainer's program sends, and the mode.

Paddle's `minimize` replaces the updates in a trainer's program by operators that send gradients to
the servers (asynchronous mode). With `a_sync_configs.k_steps` the updates stay, and a communicator
exchanges the changes of the parameters every k steps (geo mode).
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any

from . import border, paddle_api, settings, updates
from .evidence import EFFECTIVE, NO_EFFECT
from .import_hooks import after_import, in_place_of, watch_method
from .paddle_api import private_names
from .static import program as programs

if TYPE_CHECKING:
    from types import ModuleType

    from .evidence import Evidence
    from .spec import StrategySpec

# Operators that send to servers, and operators of a synchronous trainer that wait for others.
_SENDS = ("send", "distributed_push_sparse")
_WAITS = ("send_barrier", "fetch_barrier")
_NO_COMMUNICATOR = "asynchronous training has no communicator to read it; geo mode has one"
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
    after_import("paddle.distributed.communicator", watcher.watch_communicators)
    after_import("paddle.base.executor", watcher.watch_executors)


class _ServerWatcher:
    """Counts the gradients that this trainer's programs send; reports `a_sync` and its details."""

    def __init__(self, spec: StrategySpec, proof: Evidence) -> None:
        self._spec = spec
        self._proof = proof
        # The programs that send; true for those that also update parameters themselves.
        self._seen: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        # The communicator's mode and settings, once it is started.
        self._mode = ""
        self._settings: dict[str, str] = {}

    def watch_communicators(self, module: ModuleType) -> None:
        """Read the settings of the communicator once it has started."""
        watch_method(module.Communicator, "start", after=self._read)

    @_watching
    def _read(self, communicator: Any) -> None:
        self._mode, self._settings = communicator.mode, dict(communicator.envs)

    def watch_executors(self, module: ModuleType) -> None:
        """Patch executors: inspect a program before its run, and record an update after it."""
        for name in ("run", "train_from_dataset"):
            in_place_of(module.Executor, name)(functools.partial(self._run, name))

    def _run(
        self, name: str, run: Any, executor: Any, program: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        is_whole = name == "train_from_dataset"
        is_update = self._inspect(program, counts_own=is_whole)
        result = run(executor, program, *args, **kwargs)
        if is_update:
            if is_whole:
                self._proof.note("a run of train_from_dataset counts as one update")
            updates.record(program)
        return result

    @_watching
    def _inspect(self, program: Any, *, counts_own: bool = False) -> bool:
        """Report what PROGRAM sends to the servers; return whether to record its run as an update.

        Updates of the program's own are recorded like any others, unless COUNTS_OWN.
        """
        program = _resolved(program)
        if not hasattr(program, "blocks") or not self._sends(program):
            return False
        return counts_own or not self._seen[program]

    def _sends(self, program: Any) -> bool:
        if program in self._seen:
            return True
        types = [op.type for op in programs.operators(program)]
        sends = {kind: types.count(kind) for kind in _SENDS if kind in types}
        if not sends:
            return False
        self._seen[program] = bool(programs.updates(program))
        self._proof.graph = "static"
        self._proof.counts["sends"] = sends
        text = ", ".join(f"{number} {kind}" for kind, number in sends.items())
        waits = any(kind in types for kind in _WAITS)
        self._report(f"{text} operators", waits=waits)
        return True

    def _report(self, sent: str, *, waits: bool) -> None:
        is_geo = self._mode == "GEO"
        steps = self._settings.get(_K_STEPS, "")
        if "a_sync" in self._spec.strategy and settings.effective("a_sync"):
            how = f"geo, every {steps} steps" if is_geo else "at each step, without waiting"
            if waits:
                self._proof.knob("a_sync", NO_EFFECT, reason="the program waits at barriers")
            else:
                self._proof.knob("a_sync", EFFECTIVE, in_effect=True, evidence=f"{sent}, {how}")
        # With `a_sync` off, its details have no effect.
        if "a_sync_configs" in self._spec.strategy and settings.effective("a_sync") is not False:
            self._report_configs(settings.effective("a_sync_configs"), is_geo=is_geo)

    def _report_configs(self, requested: dict[str, Any], *, is_geo: bool) -> None:
        """Compare the communicator's settings with the REQUESTED ones, key by key."""
        in_effect: dict[str, Any] = {}
        for key, value in requested.items():
            name = _K_STEPS if key == "k_steps" else f"communicator_{key}"
            actual = self._settings.get(name) if is_geo else None
            # `k_steps: 0` means no geo mode.
            if actual == str(value) or (key == "k_steps" and not is_geo and value <= 0):
                in_effect[key] = value
        missing = [key for key in requested if key not in in_effect]
        if not missing:
            steps = f"a communicator that exchanges every {self._settings.get(_K_STEPS)} steps"
            text = steps if is_geo else "no communicator: gradients go out at each step"
            self._proof.knob("a_sync_configs", EFFECTIVE, in_effect=in_effect, evidence=text)
        else:
            why = "the communicator has other values" if is_geo else _NO_COMMUNICATOR
            reason = f"{', '.join(missing)}: {why}"
            self._proof.knob("a_sync_configs", NO_EFFECT, in_effect=in_effect, reason=reason)


def _resolved(program: Any) -> Any:
    """Return the program that an executor runs when it is given PROGRAM, which may be None."""
    if program is not None:
        return program
    paddle: Any = sys.modules["paddle"]
    return paddle.static.default_main_program()
