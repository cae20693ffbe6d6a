"""Compares the parameters of the ranks, which must stay equal in data-parallel training.

Ranks that differ end the job if a strategy sums the gradients. Differences after Paddle's own
reducer are a remark, and so are those of tables with sparse gradients.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from . import border, comparison, hybrid_models, paddle_api, settings, updates
from .comparison import WHAT, Comparison
from .dygraph.paddles_reducer import PaddlesReducer
from .dygraph.reducer import Reducer
from .evidence import Evidence
from .import_hooks import after_import, watch_method
from .paddle_api import private_names, tensors
from .replicas import ComparedRanks, Part, world_size
from .spec import StrategySpec
from .static import program as programs
from .static.cpu import channels
from .static.reduction_report import buckets

# With these fields ranks differ between exchanges.
_LOCAL = ("localsgd", "adaptive_localsgd", "a_sync")
_ALLREDUCES = {*programs.ALLREDUCES, "c_allreduce_avg"}


def install(spec: StrategySpec, proof: Evidence) -> None:
    """Compare after the first updates, and after later ones as `check_ranks` says."""
    if spec.check_ranks == updates.NEVER or not paddle_api.has(private_names.CHECK):
        return
    check, due = _Check(spec, proof), functools.partial(updates.is_due, spec.check_ranks)
    after_import(
        "paddle.distributed.parallel",
        lambda module: watch_method(module.DataParallel, "__init__", after=check.models.add),
    )
    hybrid_models.watch()
    updates.before_update(check.before_update, WHAT, due)
    updates.on_update(check.after_update, WHAT, due)
    # Ranks that have skipped an update still compare with those that have not.
    updates.on_skipped(check.after_update, WHAT, due)


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
    """What is compared: its owner (a model, program or optimizer), parameters and ranks."""

    owner: Any
    parts: Mapping[str, Part]
    ranks: ComparedRanks


class _Check:
    """Compares the ranks after updates that are due, by the number of each optimizer's own.

    One rank may have optimizers, or programs, that others do not have.
    """

    def __init__(self, spec: StrategySpec, proof: Evidence) -> None:
        self._changes_programs = bool(spec.strategy or spec.build_strategy)
        self._proof = proof
        # Models of DataParallel.
        self.models: weakref.WeakSet[Any] = weakref.WeakSet()
        # Parameters that had a dense gradient before a compared update.
        self._had_gradient: set[str] = set()
        # By owner: the parameters and ranks that are no longer compared.
        self._done: weakref.WeakKeyDictionary[Any, set[object]] = weakref.WeakKeyDictionary()

    def before_update(self, optimizer: Any) -> None:
        """Record which parameters have gradients: an optimizer may clear them in its step."""
        parameters = _of_optimizer(optimizer)
        for parameter, gradient in zip(parameters, tensors.gradients(parameters)):
            # Group sharding updates slices that it names `slice@` and the parameter's name.
            name = parameter.name.rpartition("@")[2]
            # Mixed precision may keep it beside the parameter.
            if getattr(parameter, "main_grad", None) is not None or (
                gradient is not None and not gradient.is_selected_rows()
            ):
                self._had_gradient.add(name)

    def after_update(self, source: Any, _number: int) -> None:
        """Compare the ranks, if there are several."""
        count = updates.number_of(source)
        # Read here: `paddle.distributed.spawn` sets the number of ranks late.
        if world_size() == 1:
            return
        if hasattr(source, "global_block"):
            self._compare_program(source, count)
        elif hybrid_models.is_late(updates.wrapper_of(source)):
            self._proof.note("the ranks were not compared: the next forward sends parameters")
        else:
            self._compare_trained(source, count)

    def _compare_trained(self, source: Any, count: int) -> None:
        """Compare the parameters that the optimizer SOURCE trains, after COUNT updates."""
        rows = self._trained_by(source)
        for row in rows:
            self._compare(row, count, lambda part: part.parameter.name in self._had_gradient)
        if not self._proof.counts.get("ranks_compared"):
            why = "there is no data-parallel model"
            if rows:
                why = "no two of them hold the same parameters"
            if rows or not self.models:
                self._proof.note(f"the ranks were not compared: {why}")

    def _trained_by(self, optimizer: Any) -> list[_Compared]:
        """Return the parameters that OPTIMIZER updates, in the same order on every rank."""
        own = {id(parameter) for parameter in _of_optimizer(optimizer)}
        models = [
            _Compared(model, _parameters(model), ComparedRanks(model.group and model.group.ranks))
            for model in sorted(self.models, key=lambda model: str(model.full_name()))
            if any(id(parameter) in own for _, parameter in model.named_parameters())
        ]
        if models:
            return models
        copies = hybrid_models.copies(updates.wrapper_of(optimizer))
        return [_Compared(optimizer, parts, ranks) for ranks, parts in copies]

    def _compare_program(self, program: Any, count: int) -> None:
        is_local = any(map(settings.effective, _LOCAL)) and not buckets(program)
        if is_local or settings.is_on("sharding"):
            self._proof.note("the ranks were not compared: with this strategy they may differ")
        elif not _has_allreduces(program):
            self._proof.note("the ranks were not compared: the program has no allreduce")
        else:
            row = _Compared(program, variables_of(program), ComparedRanks())
            self._compare(row, count, lambda _: True)

    def _compare(self, row: _Compared, count: int, is_trained: Callable[[Part], bool]) -> None:
        """Compare the parameters of ROW after COUNT updates.

        Raises Disproved if the copies differ, unless Paddle alone has summed the gradients.
        """
        key, done = (tuple(row.parts), row.ranks.ranks), self._done.setdefault(row.owner, set())
        if key in done:
            return
        outcome = comparison.compare(row.parts, is_trained, row.ranks, count)
        counts = self._proof.counts
        sizes = {"parameters_compared": outcome.parameters}
        sizes["ranks_compared"] = len(row.ranks.ranks) if outcome.parameters else 0
        counts.update({name: max(most, counts.get(name, 0)) for name, most in sizes.items()})
        if outcome.failed is not None:
            # A rank that compared alone would wait for the others forever.
            done.add(key)
            rank = outcome.failed
            self._proof.note(f"the ranks are no longer compared: rank {rank} could not take part")
        elif outcome.difference:
            # Reported once.
            done.add(key)
            self._report_difference(row.owner, outcome.difference, count)
        else:
            self._report_equal(outcome, count)

    def _report_equal(self, outcome: Comparison, count: int) -> None:
        """Report ranks that are equal, and the tolerated differences in OUTCOME."""
        # Where a scaler has skipped all updates, nothing was trained that could differ.
        if not outcome.parameters or not updates.count():
            return
        self._proof.compared_after = count
        if self._proof.ranks_equal is None:
            self._proof.ranks_equal = True
        if outcome.left_out:
            names = comparison.listed(outcome.left_out)
            self._proof.note(
                f"the ranks differ in {names}, which was not compared: no gradient trains it, as"
                " with running statistics, or its gradients are sparse"
            )
        if not outcome.is_exact:
            self._proof.note("the ranks are equal within rounding, not to the last bit")

    def _report_difference(self, owner: Any, difference: str, count: int) -> None:
        self._proof.ranks_equal, self._proof.compared_after = False, count
        text = f"after update {count} {difference}"
        is_ours = self._changes_sums(owner)
        goes_on = ": Paddle alone sums its gradients, as without fleetrun, so the job goes on"
        self._proof.note(text + ("." if is_ours else goes_on))
        self._proof.claim()
        self._proof.write()
        if is_ours:
            raise border.Disproved(
                f"The ranks no longer train the same model: {text}."
                " --check_ranks=-1 disables this check."
            )

    def _changes_sums(self, owner: Any) -> bool:
        """Whether fleetrun changes how the gradients of OWNER are summed."""
        if not hasattr(owner, "global_block"):
            return isinstance(getattr(owner, "_reducer", None), (Reducer, PaddlesReducer))
        return self._changes_programs or any(map(channels.channel_of, programs.operators(owner)))


def _has_allreduces(program: Any) -> bool:
    ops = programs.operators(program)
    return any(op.type in _ALLREDUCES or channels.channel_of(op) for op in ops)


def _of_optimizer(optimizer: Any) -> list[Any]:
    """Return the parameters of OPTIMIZER, also from groups and from an inner optimizer."""
    candidates = map(updates.parameters_of, updates.chain(optimizer))
    whole = hybrid_models.whole_parameters(updates.wrapper_of(optimizer))
    return updates.flat([*next(filter(None, candidates), []), *whole])


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
    """Return by name the parameters of PROGRAM that all ranks hold, without statistics."""
    import paddle

    scope = paddle.static.global_scope()
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
