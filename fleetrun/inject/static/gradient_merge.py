"""Completes Paddle's gradient merge of static graphs, so that it equals a larger batch.

A scheduler of the learning rate that is stepped with each run advances once per update; one that is
stepped once in several runs (per epoch) advances whenever the script says so. Paddle counts the
runs of all programs in one variable: the programs of other parameters get other counters.
"""

from __future__ import annotations

import weakref
import zlib
from typing import TYPE_CHECKING, Any

from .. import border, settings
from ..import_hooks import after_import, in_place_of
from . import program, program_runs

if TYPE_CHECKING:
    from collections.abc import Callable

_COUNTERS = ("gradient_merge_step", "gradient_merge_k", "gradient_merge_zero")
_TWO_PROGRAMS = (
    "gradient_merge: two programs update the same parameters in turn, each by gradients that are"
    " merged while the other changes these parameters: use the strategy without gradient_merge, or"
    " minimize each loss for parameters of its own."
)
_AVERAGED = (
    "gradient_merge: the program would average its parameters (EMA), or clip them, in each run, not"
    " once for each update: use the strategy without it, or do this in the script after updates."
)
# The names of the parameters that each merging program updates.
_merging: weakref.WeakKeyDictionary[Any, frozenset[str]] = weakref.WeakKeyDictionary()
# The programs whose round is incomplete, each with the id of its scope.
_incomplete: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
# The runs since a scheduler was last stepped, and whether the last of them was an update.
_since_step: weakref.WeakKeyDictionary[Any, tuple[int, bool]] = weakref.WeakKeyDictionary()


def install() -> None:
    """Patch the schedulers and Paddle's merging once they are imported."""
    program_runs.on_run(_ran)
    after_import("paddle.optimizer.lr", _watch)
    after_import("paddle.incubate.optimizer.gradient_merge", _take_choices)


def _take_choices(module: Any) -> None:
    """Let Paddle's optimizer take the parameters that a script chooses, as all others do."""

    @in_place_of(module.GradientMergeOptimizer, "backward")
    def backward(_: Any, self: Any, loss: Any, *chosen: Any, **named: Any) -> Any:
        # Optimizers differ in the names, not in their order.
        names = ("startup_program", "parameter_list", "no_grad_set", "callbacks")
        others = (named.get(name) for name in names[len(chosen) :])
        return self.inner_optimizer.backward(loss, *chosen, *others)


def settle(main: Any, startup: Any) -> None:
    """Give MAIN a counter for its own parameters if it merges."""
    if not main.global_block().has_var(_COUNTERS[0]):
        return
    _merging[main] = frozenset(name for op in program.updates(main) for name in op.input("Param"))
    for op in main.global_block().ops:
        # Clones for tests are made without what has this role.
        if program.merged_updates(op) or _COUNTERS[0] in op.input_arg_names:
            op._set_attr("op_role", program.OPTIMIZE)
    # A program that is built again, as to resume, finds its counters in the checkpoint.
    key = zlib.crc32(" ".join(sorted(_merging[main])).encode())
    for name in _COUNTERS:
        for renamed in (main, startup):
            renamed.global_block()._rename_var(name, f"{name}_{key}")
            renamed._sync_with_cpp()


def check(main: Any) -> None:
    """Raise Disproved if MAIN, which merges, averages its parameters by its own operators."""
    block, parameters = main.global_block(), _merging.get(main, frozenset())
    # What depends on batches, as metrics and updates do; what all other variables depend on.
    fed = {name for name, variable in block.vars.items() if variable.is_data}
    origins: dict[str, set[str]] = {}
    for op in block.ops if parameters else ():
        if fed.isdisjoint(op.input_arg_names):
            read = set().union(*(origins.get(name, {name}) for name in op.input_arg_names))
            origins.update(dict.fromkeys(op.output_arg_names, read))
        else:
            fed |= set(op.output_arg_names) - parameters
    # Copies of parameters, and their norms, are as if they were made once.
    if any(name in read and read & parameters for name, read in origins.items()):
        raise border.Disproved(_AVERAGED)


def _ran(main: Any, is_updated: bool) -> None:  # noqa: FBT001 - a callback
    """Record that MAIN ran, and whether it updated its parameters.

    Raises Disproved if another program is in a round for the same parameters.
    """
    import paddle

    if main in _merging:
        # Programs of other scopes may have parameters of the same names.
        scope = id(paddle.static.global_scope())
        _incomplete.pop(main, None)
        for other, other_scope in _incomplete.items():
            if other_scope == scope and not _merging[main].isdisjoint(_merging[other]):
                raise border.Disproved(_TWO_PROGRAMS)
        if not is_updated:
            _incomplete[main] = scope
    scheduler = getattr(main, "lr_scheduler", None)
    if scheduler is not None and settings.merging()[0] > 1:
        runs, _ = _since_step.get(scheduler, (0, True))
        _since_step[scheduler] = (runs + 1, is_updated)


def _watch(module: Any) -> None:
    base = module.LRScheduler
    for kind in list(vars(module).values()):
        if isinstance(kind, type) and issubclass(kind, base) and "step" in vars(kind):
            in_place_of(kind, "step")(_step_with_updates)


def _step_with_updates(step: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    is_early = _since_step.pop(self, None) == (1, False)
    # The argument of other schedulers is an absolute epoch.
    is_relative = not args or type(self).__name__ == "ReduceOnPlateau"
    if is_early and is_relative and "epoch" not in kwargs:
        return None
    return step(self, *args, **kwargs)
