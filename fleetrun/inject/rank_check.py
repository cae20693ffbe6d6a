"""Compares the parameters of the ranks, which must stay equal in data-parallel training.

Ranks that differ end the job if a strategy sums the gradients. Differences after Paddle's own
reducer are a remark, and so are a few rows of a table with sparse gradients.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from . import (
    border,
    comparison,
    hybrid_models,
    paddle_api,
    process_meshes,
    settings,
    store,
    updates,
)
from .check_schedule import NEVER, Pace, is_due, next_due
from .comparison import FAILED, WHAT
from .dygraph.reducer import Reducer
from .import_hooks import after_import, watch_method
from .paddle_api import private_names, tensors
from .parameter_history import ParameterHistory, watch_writes
from .replicas import KINDS, GroupRanks, Part, StaticRanks, world_size
from .static import program as programs
from .static.cpu import channels

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import ModuleType

    from .comparison import Differences, OwnSums
    from .evidence import Evidence
    from .parameter_history import WatchedForward
    from .spec import StrategySpec

# With these fields ranks differ between exchanges.
_LOCAL = ("localsgd", "adaptive_localsgd", "a_sync")
_ALLREDUCES = {"all_reduce", "c_allreduce_sum", "c_allreduce_avg"}
# The updates during which the history of parameters is recorded, unless they are compared after
# every N updates. The third is always compared.
_WATCHED_UPDATES = 3
# Ranks send times in microseconds.
_MICRO = 1e6
# In the job's store: how many ranks cannot compare.
_REFUSALS = "fleetrun/check/refusals"
_COUNTED = ("ranks_compared", "parameters_compared")
_watching = border.watching(WHAT)


def install(spec: StrategySpec, proof: Evidence) -> None:
    """Compare after the first updates, and after later ones as `check_ranks` says."""
    if spec.check_ranks == NEVER:
        return
    if not paddle_api.has(private_names.CHECK):
        # Before the first update or comparison in which the others would wait for this rank.
        store.when_connected(_watching(_refuse))
        return
    check = _Check(spec, proof)
    after_import("paddle.distributed.parallel", check.watch_models)
    hybrid_models.watch()
    updates.before_update(check.before_update, WHAT, may_rest=True)
    updates.on_update(check.after_update, WHAT)
    # Ranks that have skipped an update still compare with those that have not.
    updates.on_skipped(check.after_update, WHAT)
    atexit.register(_watching(check.report_unchanged))


def _refuse() -> None:
    """Tell the other ranks that this one compares nothing."""
    store.job_store().add(_REFUSALS, 1)


def barrier(source: Any) -> None:
    """Wait for all ranks that train SOURCE, an optimizer or a program."""
    import paddle

    if world_size() == 1:
        return
    if hasattr(source, "global_block"):
        if _has_allreduces(source):
            StaticRanks().gather([])
    elif paddle.distributed.is_initialized():
        paddle.distributed.barrier()


class _Check:
    """Compares the ranks after the updates for which `is_due` holds with SPEC.check_ranks."""

    def __init__(self, spec: StrategySpec, proof: Evidence) -> None:
        self._every = spec.check_ranks
        self._changes_programs = bool(spec.strategy or spec.build_strategy)
        self._proof = proof
        self._histories: weakref.WeakKeyDictionary[Any, ParameterHistory] = (
            weakref.WeakKeyDictionary()
        )
        # The ids of the models whose forwards are watched.
        self._forwards: set[int] = set()
        # By the id of an optimizer or program. All ranks must compare at the same time, and one
        # rank may have optimizers that the others do not have.
        self._progress: dict[int, _CheckProgress] = {}
        # Updates of the optimizer or program that is compared.
        self._updates = 0
        # By model or program. If ranks differ by rounding there is no interval, as each comparison
        # takes long then.
        self._paces: weakref.WeakKeyDictionary[Any, Pace] = weakref.WeakKeyDictionary()
        # The checksums of each model before its first update, until one changes its weights.
        self._begun: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        # The names of models that were compared while no update had changed them.
        self._unchanged: set[str] = set()
        # By optimizer that fleet or group sharding wraps.
        self._wrapped: weakref.WeakKeyDictionary[Any, ParameterHistory] = (
            weakref.WeakKeyDictionary()
        )
        # Models and programs that are no longer compared.
        self._done: weakref.WeakSet[Any] = weakref.WeakSet()
        # Tables that differ in a few rows.
        self._tables: set[str] = set()
        self._has_asked = False

    def watch_models(self, module: ModuleType) -> None:
        """Keep a history of the parameters of every DataParallel model."""
        kind: Any = module.DataParallel
        forward = kind.forward

        @functools.wraps(forward)
        def watched(model: Any, *args: Any, **options: Any) -> Any:
            begun = look(model)
            # Once all are known, forwards cost nothing more; unless others have wrapped this.
            if not self._forwards and kind.forward is watched:
                kind.forward = forward
            try:
                return forward(model, *args, **options)
            finally:
                if begun is not None:
                    compare(model, begun)

        def keep(model: Any) -> None:
            self._histories[model] = ParameterHistory(model.parameters())
            self._forwards.add(id(model))
            if kind.forward is forward:
                kind.forward = watched

        look, compare = _watching(self._begin_forward), _watching(self._end_forward)
        watch_method(kind, "__init__", after=_watching(keep))
        kind.forward = watched
        watch_writes()

    def _begin_forward(self, model: Any) -> WatchedForward | None:
        """Return the record of MODEL's forward that begins; None if it is not watched."""
        if id(model) not in self._forwards:
            return None
        history = self._histories.get(model)
        if history is None or not self._watches(history.updates):
            self._forwards.discard(id(model))
            return None
        if world_size() == 1:
            return None
        return history.begin_forward()

    def _end_forward(self, model: Any, forward: WatchedForward) -> None:
        self._histories[model].end_forward(forward)

    def before_update(self, optimizer: Any) -> None:
        """Record which parameters have gradients: an optimizer may clear them in its step."""
        progress = updates.of_source(self._progress, optimizer, _CheckProgress)
        if progress.late:
            late, progress.late = progress.late, 0
            self._compare_trained(optimizer, late)
        count = updates.number_of(optimizer)
        if count + 1 < progress.next:
            return
        parameters = _of_optimizer(optimizer)
        for trained, find, _, history in self._trained_by(optimizer):
            history.record_gradients(parameters)
            if not count and trained not in self._paces:
                sums = comparison.own_sums(find, history)
                if sums is not None:
                    self._begun[trained] = sums.totals

    def after_update(self, source: Any, _number: int) -> float:
        """Compare if an update is due; return the next one to look at."""
        progress = updates.of_source(self._progress, source, _CheckProgress)
        count = updates.number_of(source)
        if count >= progress.next:
            self._updates = count
            progress.next = count + 1 if self._watches(count) else next_due(self._every, count + 1)
            # Read here: `paddle.distributed.spawn` sets the number of ranks late.
            if self._is_due(count) and world_size() > 1:
                self._compare_after(source, progress, count)
        return 0 if progress.late else progress.next

    def _compare_after(self, source: Any, progress: _CheckProgress, count: int) -> None:
        if hasattr(source, "global_block"):
            self._compare_program(source)
        elif hybrid_models.is_late(updates.wrapper_of(source)):
            progress.late = count
        else:
            self._compare_trained(source, count)

    def _compare_trained(self, source: Any, count: int) -> None:
        """Compare the parameters that the optimizer SOURCE trains, after COUNT updates."""
        self._updates = count
        compared = self._trained_by(source)
        if not compared and not self._histories:
            why = (
                "no two of them hold the same parameters"
                if process_meshes.are_used(source)
                else "there is no data-parallel model"
            )
            self._proof.note(f"the ranks were not compared: {why}")
        for trained, find, ranks, history in compared:
            if self._is_due(count, trained):
                history.updates = count
                self._compare(trained, find, ranks, history)
        if compared and not self._proof.counts.get("ranks_compared"):
            self._proof.note("the ranks were not compared: no two of them hold the same parameters")

    def _trained_by(self, optimizer: Any) -> list[_Compared]:
        """Return the parameters that OPTIMIZER updates, in the same order on every rank."""
        # In the order in which the models were created.
        models = [model for model in self._in_order() if _is_updated_by(model, optimizer)]
        if models:
            return [
                _Compared(
                    model,
                    functools.partial(_parameters, model),
                    GroupRanks(getattr(model, "group", None)),
                    self._histories[model],
                )
                for model in models
            ]
        wrapper = updates.wrapper_of(optimizer)
        ranks = hybrid_models.ranks_of(wrapper)
        if ranks is None and not process_meshes.are_used(optimizer):
            return []
        history = self._wrapped.get(optimizer)
        if history is None:
            whole = hybrid_models.whole_parameters(wrapper)
            history = self._wrapped[optimizer] = ParameterHistory(whole)
        if ranks is None:
            return [
                _Compared(sharing, parts.copy, sharing, history)
                for sharing, parts in process_meshes.copies(optimizer).items()
            ]
        return [
            _Compared(
                optimizer, functools.partial(hybrid_models.parts_of, wrapper), ranks, history
            ),
            *(
                _Compared(layer, weights, sharing, history)
                for layer, sharing, weights in hybrid_models.shared_weights(wrapper)
            ),
        ]

    def _compare_program(self, program: Any) -> None:
        if any(settings.effective(name) for name in _LOCAL):
            self._proof.note("the ranks were not compared: with this strategy they may differ")
        elif not _has_allreduces(program):
            self._proof.note("the ranks were not compared: the program has no allreduce")
        elif self._is_due(self._updates, program):
            self._compare(program, functools.partial(variables_of, program), StaticRanks(), None)

    def _in_order(self) -> list[Any]:
        return sorted(self._histories, key=lambda model: str(model.full_name()))

    def _is_due(self, update: int, trained: Any = None) -> bool:
        """Whether TRAINED, a model or a program, is compared after UPDATE; None: anything."""
        if trained is not None and trained in self._done:
            return False
        pace = self._paces.get(trained) if trained is not None else None
        return (
            is_due(self._every, update)
            if pace is None
            else is_due(self._every, update, interval=pace.interval)
        )

    def _watches(self, updates: int) -> bool:
        """Whether to record the history of parameters after UPDATES updates."""
        is_regular = isinstance(self._every, int) and self._every > 0
        return is_regular or updates < _WATCHED_UPDATES

    def _compare(
        self,
        trained: Any,
        find: Callable[[], Mapping[str, Part]],
        ranks: GroupRanks | StaticRanks,
        known: ParameterHistory | None,
    ) -> None:
        """Compare the parameters that FIND returns for TRAINED, a model, program or optimizer."""
        if not self._has_asked and self._is_refused(ranks):
            return
        pace = self._paces.setdefault(trained, Pace())
        outcome = None
        with pace.measured(), contextlib.ExitStack() as placed:
            own = comparison.own_sums(find, known)
            placed.enter_context(_made_with(own))
            numbers = [FAILED] * (2 * len(KINDS)) if own is None else own.numbers
            times = [round(time_s * _MICRO) for time_s in (pace.check_s, pace.update_s)]
            gathered = ranks.gather([*numbers, *times])
            rows = [row[:-2] for row in gathered]
            failed = [rank for rank, row in zip(ranks.ranks, rows) if row[0] == FAILED]
            if not failed and own is not None:
                # The last rank to arrive does not wait for others, so its time is the true one.
                pace.agree(*(min(times) / _MICRO for times in list(zip(*gathered))[-2:]))
                outcome = comparison.compare(own, rows, ranks, known, self._updates)
                failed = [] if outcome.failed is None else [outcome.failed]
            if failed:
                # A rank that compared alone would wait for the others forever.
                self._every = NEVER
                self._proof.note(
                    f"the ranks are no longer compared: rank {failed[0]} could not take part"
                )
            elif outcome is not None and own is not None:
                self._report(trained, outcome, is_begun=self._begun.get(trained) == own.totals)
        pace.end(self._updates)
        if outcome is not None and not outcome.are_all_exact:
            pace.interval = None

    def _is_refused(self, ranks: GroupRanks | StaticRanks) -> bool:
        """Whether a rank, perhaps none of RANKS, cannot compare; then none does from now on."""
        self._has_asked = True
        if isinstance(ranks, StaticRanks):
            # `_refuse` is not called there, as they are connected in another way.
            self._proof.use(private_names.CHECK)
        elif store.job_store().add(_REFUSALS, 0):
            self._every = NEVER
            self._proof.note("the ranks are not compared, because some of them cannot")
        return self._every == NEVER

    def _report(self, trained: Any, outcome: Differences, *, is_begun: bool) -> None:
        """Report the OUTCOME of a comparison; IS_BEGUN: no update has changed what was compared.

        Raises Disproved if the copies differ, unless Paddle alone has summed the gradients.
        """
        counts, name = self._proof.counts, _name_of(trained)
        for key, number in zip(_COUNTED, (outcome.ranks, outcome.parameters)):
            counts[key] = max(number, counts.get(key, 0))
        if outcome.is_any_apart:
            # Reported once.
            self._done.add(trained)
        if outcome.difference:
            self._report_difference(trained, outcome.difference)
        elif not outcome.ranks:
            return
        elif is_begun and outcome.is_exact and not outcome.statistics:
            self._unchanged.add(name)
            return
        else:
            self._proof.compared_after = self._updates
            if self._proof.ranks_equal is None:
                self._proof.ranks_equal = True
        self._begun.pop(trained, None)
        self._unchanged.discard(name)
        self._report_rest(outcome)

    def _report_rest(self, outcome: Differences) -> None:
        """Note the tolerated differences in OUTCOME."""
        for table, differ in outcome.tables.items():
            if table not in self._tables:
                self._tables.add(table)
                why = "which Paddle's own updates of sparse tables can cause"
                self._proof.note(f"after update {self._updates} {differ}, {why}")
        if outcome.difference:
            return
        if outcome.statistics:
            self._proof.note(
                f"the ranks differ in {comparison.listed(outcome.statistics)}, which was not"
                " compared: no gradient trains it, or forward itself writes into it, as with"
                " running statistics"
            )
        if not outcome.is_exact:
            self._proof.note("the ranks are equal within rounding, not to the last bit")

    def _report_difference(self, trained: Any, difference: str) -> None:
        """Report the DIFFERENCE of the ranks that train TRAINED.

        Raises Disproved unless Paddle alone has summed the gradients.
        """
        self._proof.ranks_equal, self._proof.compared_after = False, self._updates
        text = f"after update {self._updates} {difference}"
        is_ours = self._changes_sums(trained)
        goes_on = ": Paddle alone sums its gradients, as without fleetrun, so the job goes on"
        self._proof.note(text + ("." if is_ours else goes_on))
        self._proof.claim()
        self._proof.write()
        if is_ours:
            doubt = getattr(getattr(trained, "_reducer", None), "doubt", "")
            raise border.Disproved(
                f"The ranks no longer train the same model: {text}. {doubt}"
                "--check_ranks=-1 disables this check."
            )

    def _changes_sums(self, trained: Any) -> bool:
        """Whether fleetrun changes how the gradients of TRAINED are summed."""
        if not hasattr(trained, "global_block"):
            return isinstance(getattr(trained, "_reducer", None), Reducer)
        operators = programs.operators(trained)
        return self._changes_programs or any(map(channels.channel_of, operators))

    def report_unchanged(self) -> None:
        """Note the models whose weights no compared update has changed, which proves nothing."""
        if self._unchanged:
            self._proof.note(
                "until the last comparison no update had changed the weights, so equal ranks prove"
                " nothing (a GradScaler skips updates whose gradients are not finite)"
            )
            self._proof.write()


class _CheckProgress:
    """Which update of an optimizer or a program to examine next."""

    def __init__(self, source: weakref.ref[Any]) -> None:
        self._source = source
        self.next = 1.0
        # The last due update, if parameters are whole only after the next forward; else 0.
        self.late = 0


class _Compared(NamedTuple):
    """What is compared: its trainer, its parameters, the comparing ranks, and its history."""

    trained: Any
    find: Callable[[], Mapping[str, Part]]
    ranks: GroupRanks | StaticRanks
    known: ParameterHistory


def _has_allreduces(program: Any) -> bool:
    return any(
        op.type in _ALLREDUCES or channels.channel_of(op) for op in programs.operators(program)
    )


def _is_updated_by(model: Any, optimizer: Any) -> bool:
    parameters = {id(parameter) for parameter in _of_optimizer(optimizer)}
    return any(id(parameter) in parameters for parameter in model.parameters())


def _of_optimizer(optimizer: Any) -> list[Any]:
    """Return the parameters of OPTIMIZER, also from groups and from an inner optimizer."""
    candidates = map(updates.parameters_of, updates.chain(optimizer))
    return next(filter(None, candidates), []) + hybrid_models.whole_parameters(
        updates.wrapper_of(optimizer)
    )


def _made_with(own: OwnSums | None) -> AbstractContextManager[None]:
    """Create tensors on the device of the parameters of which OWN has checksums."""
    values = [part.value for part in own.parts.values()] if own is not None else []
    # Those of static programs, which ranks compare through the store, are not eager tensors.
    if not values or not hasattr(values[0], "place"):
        return contextlib.nullcontext()
    return tensors.made_at(values[0].place)


def _name_of(trained: Any) -> str:
    return str(trained.full_name()) if hasattr(trained, "full_name") else str(id(trained))


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
