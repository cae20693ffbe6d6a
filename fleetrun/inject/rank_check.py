"""Compares the parameters of the ranks, which must stay equal in data-parallel training.

Ranks that differ end the job if a strategy sums the gradients. Differences after Paddle's own
reducer are a remark, and so are a few rows of a table with sparse gradients.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from . import (
    border,
    comparison,
    hybrid_models,
    paddle_api,
    process_meshes,
    settings,
    updates,
)
from .check_schedule import NEVER, is_due
from .comparison import FAILED, SPARSE, TRAINED, WHAT, Differences
from .dygraph.paddles_reducer import PaddlesReducer
from .dygraph.reducer import Reducer
from .evidence import Evidence
from .import_hooks import after_import, watch_method
from .paddle_api import private_names
from .replicas import KINDS, ComparedRanks, Part, world_size
from .spec import StrategySpec
from .static import program as programs
from .static.cpu import channels

# With these fields ranks differ between exchanges.
_LOCAL = ("localsgd", "adaptive_localsgd", "a_sync")
_ALLREDUCES = {"all_reduce", "c_allreduce_sum", "c_allreduce_avg"}
_COUNTED = ("ranks_compared", "parameters_compared")


def install(spec: StrategySpec, proof: Evidence) -> None:
    """Compare after the first updates, and after later ones as `check_ranks` says."""
    if spec.check_ranks == NEVER or not paddle_api.has(private_names.CHECK):
        return
    check = _Check(spec, proof)
    after_import(
        "paddle.distributed.parallel",
        lambda module: watch_method(module.DataParallel, "__init__", after=check.models.add),
    )
    hybrid_models.watch()
    updates.before_update(check.before_update, WHAT)
    updates.on_update(check.after_update, WHAT)
    # Ranks that have skipped an update still compare with those that have not.
    updates.on_skipped(check.after_update, WHAT)


def barrier(source: Any) -> None:
    """Wait for all ranks that train SOURCE, an optimizer or a program."""
    import paddle

    if world_size() == 1:
        return
    if hasattr(source, "global_block"):
        if _has_allreduces(source):
            ComparedRanks().gather([])
    elif paddle.distributed.is_initialized():
        paddle.distributed.barrier()


class _Compared(NamedTuple):
    """What is compared: its trainer (a model, program or optimizer), parameters and ranks."""

    trained: Any
    find: Callable[[], Mapping[str, Part]]
    ranks: ComparedRanks


class _Check:
    """Compares the ranks after the updates for which `is_due` holds with SPEC.check_ranks.

    Each optimizer or program counts its own updates: one rank may have some that others do not.
    """

    def __init__(self, spec: StrategySpec, proof: Evidence) -> None:
        self._every = spec.check_ranks
        self._changes_programs = bool(spec.strategy or spec.build_strategy)
        self._proof = proof
        # Models of DataParallel.
        self.models: weakref.WeakSet[Any] = weakref.WeakSet()
        # Parameters that had a gradient before a compared update, and those whose is sparse.
        self._had_gradient: set[str] = set()
        self._sparse: set[str] = set()
        # By the id of an optimizer whose parameters are whole only after the next forward: the due
        # update.
        self._late: dict[int, int] = {}
        # By the model, program or optimizer: the ranks that no longer compare it.
        self._done: weakref.WeakKeyDictionary[Any, list[list[int]]] = weakref.WeakKeyDictionary()

    def before_update(self, optimizer: Any) -> None:
        """Record which parameters have gradients: an optimizer may clear them in its step."""
        late = self._late.pop(id(optimizer), 0) if self._late else 0
        if late:
            self._compare_trained(optimizer, late)
        if is_due(self._every, updates.number_of(optimizer) + 1):
            for parameter in _of_optimizer(optimizer):
                self._record_gradient(parameter)

    def _record_gradient(self, parameter: Any) -> None:
        # Group sharding updates slices that it names `slice@` and the parameter's name.
        name = parameter.name.rpartition("@")[2]
        gradient = parameter.grad
        # Mixed precision may keep it beside the parameter.
        if gradient is not None or getattr(parameter, "main_grad", None) is not None:
            self._had_gradient.add(name)
        if gradient is not None and gradient.is_selected_rows():
            self._sparse.add(name)

    def _seen(self, part: Part) -> int:
        """Return the bits of PART that `comparison` knows."""
        name = part.parameter.name
        return TRAINED * (name in self._had_gradient) | SPARSE * (name in self._sparse)

    def after_update(self, source: Any, _number: int) -> None:
        """Compare if an update is due."""
        count = updates.number_of(source)
        # Read here: `paddle.distributed.spawn` sets the number of ranks late.
        if is_due(self._every, count) and world_size() > 1:
            if hasattr(source, "global_block"):
                self._compare_program(source, count)
            elif hybrid_models.is_late(updates.wrapper_of(source)):
                self._late[id(source)] = count
            else:
                self._compare_trained(source, count)

    def _compare_trained(self, source: Any, count: int) -> None:
        """Compare the parameters that the optimizer SOURCE trains, after COUNT updates."""
        compared = self._trained_by(source)
        for row in compared:
            self._compare(row, count, self._seen)
        if compared and self._proof.counts.get("ranks_compared"):
            return
        if compared or process_meshes.are_used(source):
            self._proof.note("the ranks were not compared: no two of them hold the same parameters")
        elif not self.models:
            self._proof.note("the ranks were not compared: there is no data-parallel model")

    def _trained_by(self, optimizer: Any) -> list[_Compared]:
        """Return the parameters that OPTIMIZER updates, in the same order on every rank."""
        own = {id(parameter) for parameter in _of_optimizer(optimizer)}
        models = [
            _Compared(
                model, functools.partial(_parameters, model), ComparedRanks(model.group.ranks)
            )
            for model in sorted(self.models, key=lambda model: str(model.full_name()))
            if any(id(parameter) in own for parameter in model.parameters())
        ]
        if models:
            return models
        wrapper = updates.wrapper_of(optimizer)
        ranks = hybrid_models.ranks_of(wrapper)
        if ranks is not None:
            find = functools.partial(hybrid_models.parts_of, wrapper)
            shared = hybrid_models.shared_weights(wrapper)
            return [
                _Compared(optimizer, find, ranks),
                *(_Compared(layer, weights, sharing) for layer, sharing, weights in shared),
            ]
        return [
            _Compared(optimizer, parts.copy, ranks)
            for ranks, parts in process_meshes.copies(optimizer)
        ]

    def _compare_program(self, program: Any, count: int) -> None:
        if any(settings.effective(name) for name in _LOCAL):
            self._proof.note("the ranks were not compared: with this strategy they may differ")
        elif not _has_allreduces(program):
            self._proof.note("the ranks were not compared: the program has no allreduce")
        else:
            # Running statistics are not among the variables.
            row = _Compared(program, functools.partial(variables_of, program), ComparedRanks())
            self._compare(row, count, lambda _: TRAINED)

    def _compare(self, row: _Compared, count: int, seen: Callable[[Part], int]) -> None:
        """Compare the parameters of ROW after COUNT updates."""
        trained, find, ranks = row
        if self._every == NEVER or ranks.ranks in self._done.get(trained, ()):
            return
        own = comparison.own_sums(find, seen)
        gathered = ranks.gather([FAILED] * (2 * len(KINDS)) if own is None else own.numbers)
        failed = [rank for rank, row in zip(ranks.ranks, gathered) if row[0] == FAILED]
        outcome = None
        if not failed and own is not None:
            outcome = comparison.compare(own, gathered, ranks, count)
        if failed:
            # A rank that compared alone would wait for the others forever.
            self._every = NEVER
            self._proof.note(
                f"the ranks are no longer compared: rank {failed[0]} could not take part"
            )
        elif outcome is not None:
            if outcome.is_any_apart:
                # Reported once.
                self._done.setdefault(trained, []).append(ranks.ranks)
            self._report(trained, outcome, count)

    def _report(self, trained: Any, outcome: Differences, count: int) -> None:
        """Report the OUTCOME of a comparison after COUNT updates.

        Raises Disproved if the copies differ, unless Paddle alone has summed the gradients.
        """
        counts = self._proof.counts
        for key, number in zip(_COUNTED, (outcome.ranks, outcome.parameters)):
            counts[key] = max(number, counts.get(key, 0))
        if outcome.difference:
            self._report_difference(trained, outcome.difference, count)
        elif outcome.ranks and updates.count():
            # Where a scaler has skipped all updates, nothing was trained that could differ.
            self._proof.compared_after = count
            if self._proof.ranks_equal is None:
                self._proof.ranks_equal = True
            self._report_rest(outcome)

    def _report_rest(self, outcome: Differences) -> None:
        """Note the tolerated differences in OUTCOME."""
        for why, names in outcome.tolerated.items():
            self._proof.note(f"the ranks differ in {comparison.listed(names)}, {why}")
        if not outcome.is_exact and not outcome.difference:
            self._proof.note("the ranks are equal within rounding, not to the last bit")

    def _report_difference(self, trained: Any, difference: str, count: int) -> None:
        """Report the DIFFERENCE of the ranks that train TRAINED.

        Raises Disproved unless Paddle alone has summed the gradients.
        """
        self._proof.ranks_equal, self._proof.compared_after = False, count
        text = f"after update {count} {difference}"
        is_ours = self._changes_sums(trained)
        goes_on = ": Paddle alone sums its gradients, as without fleetrun, so the job goes on"
        self._proof.note(text + ("." if is_ours else goes_on))
        self._proof.claim()
        self._proof.write()
        if is_ours:
            raise border.Disproved(
                f"The ranks no longer train the same model: {text}."
                " --check_ranks=-1 disables this check."
            )

    def _changes_sums(self, trained: Any) -> bool:
        """Whether fleetrun changes how the gradients of TRAINED are summed."""
        if not hasattr(trained, "global_block"):
            return isinstance(getattr(trained, "_reducer", None), (Reducer, PaddlesReducer))
        operators = programs.operators(trained)
        return self._changes_programs or any(map(channels.channel_of, operators))


def _has_allreduces(program: Any) -> bool:
    return any(
        op.type in _ALLREDUCES or channels.channel_of(op) for op in programs.operators(program)
    )


def _of_optimizer(optimizer: Any) -> list[Any]:
    """Return the parameters of OPTIMIZER, also from groups and from an inner optimizer."""
    candidates = map(updates.parameters_of, updates.chain(optimizer))
    return next(filter(None, candidates), []) + hybrid_models.whole_parameters(
        updates.wrapper_of(optimizer)
    )


def _parameters(model: Any) -> dict[str, Part]:
    """Return by name the parameters of MODEL that must be equal; statistics may be among them."""
    return {
        # Without the prefix that DataParallel adds.
        name.partition("_layers.")[2] or name: Part(parameter)
        for name, parameter in model.named_parameters()
        if parameter.trainable
        and not getattr(parameter, "is_distributed", False)
        and not getattr(parameter, "no_sync", False)
    }


def variables_of(program: Any) -> dict[str, Part]:
    """Return by name the parameters of PROGRAM that all ranks hold."""
    import paddle

    scope = paddle.static.global_scope()
    # Running statistics differ between ranks.
    statistics = programs.written_by_forward(program)
    return {
        parameter.name: Part(scope.find_var(parameter.name).get_tensor())
        for parameter in sorted(program.all_parameters(), key=lambda item: str(item.name))
        if not getattr(parameter, "is_distributed", False)
        and not getattr(parameter, "optimize_attr", {}).get("no_sync", False)
        and scope.find_var(parameter.name) is not None
        and parameter.trainable
        and parameter.name not in statistics
    }
