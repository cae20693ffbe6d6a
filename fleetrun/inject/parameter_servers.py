"""Training with parameter servers: what the trainer's program sends, and how it is exchanged.

Paddle's `minimize` takes the updates out of a trainer's program and puts operators in that send
gradients to the servers (asynchronous); with `a_sync_configs.k_steps` the updates stay, and a
communicator exchanges what was learned every so many steps (geo).
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any

from . import settings, updates
from .evidence import EFFECTIVE, NO_EFFECT
from .import_hooks import after_import
from .static import program as programs

if TYPE_CHECKING:
    from types import ModuleType

    from .evidence import Evidence
    from .spec import StrategySpec

# What sends to servers, and what only a synchronous trainer has: it waits for the others.
_SENDS = ("send", "distributed_push_sparse")
_WAITS = ("send_barrier", "fetch_barrier")
# Whoever trains without a communicator has nobody to read these.
_READS_NOTHING = "asynchronous training makes no communicator that would read it; geo does"
# The communicator's name of k_steps: it sends so many steps' changes at once.
_STEPS = "communicator_max_merge_var_num"


def are_used() -> bool:
    """Whether this process belongs to a job with parameter servers."""
    return bool(os.environ.get("PADDLE_PSERVERS_IP_PORT_LIST"))


def install(spec: StrategySpec, proof: Evidence) -> None:
    """Look at each program that a trainer runs, if there are servers."""
    if not are_used():
        return
    watcher = _Watcher(spec, proof)
    after_import("paddle.distributed.communicator", watcher.watch_communicators)
    after_import("paddle.base.executor", watcher.watch_executors)


class _Watcher:
    def __init__(self, spec: StrategySpec, proof: Evidence) -> None:
        self._spec = spec
        self._proof = proof
        # The programs that send, and whether each has updates of its own, too.
        self._seen: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        # The mode and the settings of the communicator that runs.
        self._mode = ""
        self._settings: dict[str, str] = {}

    def watch_communicators(self, module: ModuleType) -> None:
        """Hear of the communicator that is started."""
        kind: Any = module.Communicator
        start = kind.start

        @functools.wraps(start)
        def start_and_tell(communicator: Any) -> None:
            start(communicator)
            self._mode, self._settings = communicator.mode, dict(communicator.envs)

        kind.start = start_and_tell

    def watch_executors(self, module: ModuleType) -> None:
        """Look at programs before they run, and hear of it when they have run."""
        kind: Any = module.Executor
        run, train = kind.run, kind.train_from_dataset

        @functools.wraps(run)
        def run_and_tell(executor: Any, program: Any = None, *words: Any, **named: Any) -> Any:
            looked_at = _resolved(program)
            sends = self._look(looked_at)
            result = run(executor, program, *words, **named)
            # A program with updates of its own is counted like any other.
            if sends and not self._seen[looked_at]:
                updates.record(program)
            return result

        @functools.wraps(train)
        def train_and_tell(executor: Any, program: Any = None, *words: Any, **named: Any) -> Any:
            sends = self._look(_resolved(program))
            result = train(executor, program, *words, **named)
            if sends:
                self._proof.note("a run of train_from_dataset counts as one update")
                updates.record(program)
            return result

        kind.run, kind.train_from_dataset = run_and_tell, train_and_tell

    def _look(self, program: Any) -> bool:
        """Say what PROGRAM does about the servers; return whether it trains with them."""
        if not hasattr(program, "blocks"):
            return False
        if program in self._seen:
            return True
        types = [op.type for block in program.blocks for op in block.ops]
        sends = {kind: types.count(kind) for kind in _SENDS if kind in types}
        if not sends:
            return False
        self._seen[program] = bool(programs.updates(program))
        self._proof.graph = "static"
        self._proof.counts["sends"] = sends
        said = ", ".join(f"{number} {kind}" for kind, number in sends.items())
        waits = any(kind in types for kind in _WAITS)
        self._say(f"{said} operators", waits=waits)
        return True

    def _say(self, sent: str, *, waits: bool) -> None:
        is_geo = self._mode == "GEO"
        steps = self._settings.get(_STEPS, "")
        if "a_sync" in self._spec.strategy and settings.effective("a_sync"):
            how = f"geo, every {steps} steps" if is_geo else "at each step, waiting for nobody"
            if waits:
                self._proof.knob("a_sync", NO_EFFECT, reason="the program waits at barriers")
            else:
                self._proof.knob("a_sync", EFFECTIVE, in_effect=True, evidence=f"{sent}, {how}")
        # Where it is off, its details are nobody's, whatever they are.
        if "a_sync_configs" in self._spec.strategy and settings.effective("a_sync") is not False:
            self._say_configs(settings.effective("a_sync_configs"), is_geo=is_geo)

    def _say_configs(self, wished: dict[str, Any], *, is_geo: bool) -> None:
        """Compare the communicator's own settings with those WISHED, key by key."""
        holds: dict[str, Any] = {}
        for key, value in wished.items():
            name = _STEPS if key == "k_steps" else f"communicator_{key}"
            there = self._settings.get(name) if is_geo else None
            # Without geo there is nothing to wait for: that is what 0 asks for.
            if there == str(value) or (key == "k_steps" and not is_geo and value <= 0):
                holds[key] = value
        rest = [key for key in wished if key not in holds]
        if not rest:
            steps = f"a communicator that exchanges every {self._settings.get(_STEPS)} steps"
            text = steps if is_geo else "no communicator: gradients go out at each step"
            self._proof.knob("a_sync_configs", EFFECTIVE, in_effect=holds, evidence=text)
        else:
            why = "the communicator has others" if is_geo else _READS_NOTHING
            reason = f"{', '.join(rest)}: {why}"
            self._proof.knob("a_sync_configs", NO_EFFECT, in_effect=holds, reason=reason)


def _resolved(program: Any) -> Any:
    """Return the program that an executor runs when it is given PROGRAM, which may be None."""
    if program is not None:
        return program
    paddle: Any = sys.modules["paddle"]
    return paddle.static.default_main_program()
