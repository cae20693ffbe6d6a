"""Compares the parameters of the ranks, which must stay equal in data-parallel training.

First every rank sends one checksum of all its parameters, made where they are. Only if these
differ, each parameter gets one, and those that differ are compared one by one. Differences by
rounding are allowed: kernels differ between devices. Running statistics are left out, as each rank
computes them from its own data; see `parameter_history`.

Ranks that differ end the job if gradients were summed by a strategy. What Paddle's own reducer
comes to is a remark, and so are a few rows of a table with sparse gradients.
"""

from __future__ import annotations

import atexit
import functools
import json
import operator
import weakref
import zlib
from collections.abc import Callable, Mapping  # noqa: TC003 - NamedTuple reads it
from typing import TYPE_CHECKING, Any, NamedTuple

from . import border, checksums, settings, updates
from .check_schedule import NEVER, Pace, is_due
from .dygraph.reducer import Reducer
from .import_hooks import after_import
from .parameter_history import ParameterHistory, watch_writes
from .replicas import ModelRanks, StaticRanks, world_size
from .static import program as programs
from .static.cpu import channels

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from .evidence import Evidence
    from .parameter_history import WatchedForward
    from .spec import StrategySpec

# With these, ranks differ between exchanges.
_LOCAL = ("localsgd", "adaptive_localsgd", "a_sync")
_ALLREDUCES = {"all_reduce", "c_allreduce_sum", "c_allreduce_avg"}
# The number of updates up to which the history of parameters is recorded, unless they are compared
# after every N updates. The third is compared in any case.
_WATCHED_UPDATES = 3
# Bits: a parameter is trained by gradients; a forward writes into it; it has sparse gradients.
_TRAINED, _WRITTEN, _SPARSE = 1, 2, 4
# The number of parameters that a note names.
_MOST_NAMES = 4
# Ranks send times in microseconds.
_MICRO = 1e6
# The difference that one update may cause, in units in the last place.
_ULPS_PER_UPDATE = 4
# Of a table with sparse gradients so many rows are a few, or one in so many. Adam on CPUs reads a
# number beyond the rows that have gradients (seen with 2.6.2 and 3.3.1, in one process, too): if it
# is that of a row, as the size of the next block of memory may be, it moves this one as well.
_FEW, _ONE_IN = 8, 100_000
# What a rank says in the place of its numbers if it could not get them.
_FAILED = -1
_WHAT = "the comparison of ranks"
_watching = border.watching(_WHAT)


def install(spec: StrategySpec, proof: Evidence) -> None:
    """Compare after the first updates, and later ones as `check_ranks` says."""
    if spec.check_ranks == NEVER:
        return
    check = _Check(spec, proof)
    after_import("paddle.distributed.parallel", check.watch_models)
    updates.before_update(check.before_update, _WHAT)
    updates.on_update(check.after_update, _WHAT)
    atexit.register(_watching(check.report_unchanged))


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
        # Updates by optimizer or program. All ranks must compare at the same time, and one rank may
        # have optimizers that the others do not have.
        self._counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        # Updates of the optimizer or program that is compared.
        self._updates = 0
        # By model or program. Where ranks differ by rounding there is no interval, as each
        # comparison is long then.
        self._paces: weakref.WeakKeyDictionary[Any, Pace] = weakref.WeakKeyDictionary()
        # The checksum of each model before its first update, until one has changed its weights.
        self._begun: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        # The names of models that were compared while no update had changed them.
        self._unchanged: set[str] = set()
        # Models and programs that are not compared any more.
        self._done: weakref.WeakSet[Any] = weakref.WeakSet()
        # Tables that differ in a few rows.
        self._tables: set[str] = set()

    def watch_models(self, module: ModuleType) -> None:
        """Keep a history of the parameters of every DataParallel model."""
        kind: Any = module.DataParallel
        begin, forward = kind.__init__, kind.forward

        @functools.wraps(begin)
        def __init__(model: Any, *args: Any, **options: Any) -> None:
            begin(model, *args, **options)
            keep(model)

        @functools.wraps(forward)
        def watched(model: Any, *args: Any, **options: Any) -> Any:
            seen = look(model)
            try:
                return forward(model, *args, **options)
            finally:
                compare(model, seen)

        keep = _watching(self._keep_history)
        look, compare = _watching(self._begin_forward), _watching(self._end_forward)

        kind.__init__, kind.forward = __init__, watched
        watch_writes()

    def _keep_history(self, model: Any) -> None:
        self._histories[model] = ParameterHistory(model)

    def _begin_forward(self, model: Any) -> WatchedForward | None:
        """Return what the forward of MODEL that begins may change; None if it is not watched."""
        known = self._histories.get(model)
        if known is None or not self._watches(known.updates) or world_size() == 1:
            return None
        return known.begin_forward()

    def _end_forward(self, model: Any, seen: WatchedForward | None) -> None:
        if seen is not None:
            self._histories[model].end_forward(seen)

    def before_update(self, optimizer: Any) -> None:
        """Record which parameters have gradients: an optimizer may clear them in its step."""
        count = self._counts.get(optimizer, 0)
        if not (self._watches(count) or self._is_due(count + 1)):
            return
        own = _of_optimizer(optimizer)
        for model, known in list(self._histories.items()):
            known.record_gradients(own)
            if not count and model not in self._paces and _is_updated_by(model, optimizer):
                sums = _own_sums(functools.partial(_parameters, model), known)
                if sums is not None:
                    self._begun[model] = sums.total

    def after_update(self, source: Any, _number: int) -> None:
        """Compare if an update is due."""
        # Read here: `paddle.distributed.spawn` sets the number of ranks late.
        count = self._updates = self._counts.get(source, 0) + 1
        self._counts[source] = count
        if not self._is_due(count) or world_size() == 1:
            return
        if hasattr(source, "global_block"):
            self._compare_program(source)
            return
        # In the order in which the models were created, which is the same on every rank.
        models = [model for model in self._in_order() if _is_updated_by(model, source)]
        if not models:
            if not self._histories:
                self._proof.note("the ranks were not compared: there is no data-parallel model")
            return
        for model in models:
            if self._is_due(count, model):
                known = self._histories[model]
                known.updates = self._updates
                self._compare(
                    model, functools.partial(_parameters, model), ModelRanks(model), known
                )

    def _compare_program(self, program: Any) -> None:
        if any(settings.effective(name) for name in _LOCAL):
            self._proof.note("the ranks were not compared: they may differ by the strategy")
        elif not _has_allreduces(program):
            self._proof.note("the ranks were not compared: the program has no allreduce")
        elif self._is_due(self._updates, program):
            self._compare(program, functools.partial(_variables, program), StaticRanks(), None)

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
        """Whether to record, after so many UPDATES, what updates the parameters."""
        is_regular = isinstance(self._every, int) and self._every > 0
        return is_regular or updates < _WATCHED_UPDATES

    def _compare(
        self,
        trained: Any,
        find: Callable[[], Mapping[str, Any]],
        ranks: ModelRanks | StaticRanks,
        known: ParameterHistory | None,
    ) -> None:
        """Compare the parameters of TRAINED, a model or a program, that FIND returns."""
        pace = self._paces.setdefault(trained, Pace())
        with pace.measured():
            try:
                is_exact = self._compare_all(trained, find, ranks, known, pace)
            except _RanksDiffer as difference:
                is_exact = False
                self._report_difference(trained, str(difference))
        pace.end(self._updates)
        if not is_exact:
            pace.interval = None

    def _compare_all(
        self,
        trained: Any,
        find: Callable[[], Mapping[str, Any]],
        ranks: ModelRanks | StaticRanks,
        known: ParameterHistory | None,
        pace: Pace,
    ) -> bool:
        """Return whether the parameters are equal to the last bit; statistics may differ."""
        own = _own_sums(find, known)
        numbers = [_FAILED, _FAILED] if own is None else [len(own.values), own.total]
        times = [round(each * _MICRO) for each in (pace.check_s, pace.update_s)]
        gathered = ranks.gather([*numbers, *times])
        rows = [row[:2] for row in gathered]
        if self._has_failed(rows, ranks) or own is None:
            return True
        values = own.values
        # The rank that comes last does not wait for others.
        pace.agree(*(min(each) / _MICRO for each in list(zip(*gathered))[2:]))
        self._proof.counts["ranks_compared"] = len(rows)
        self._proof.counts["parameters_compared"] = len(values)
        is_equal = all(row == rows[0] for row in rows)
        if is_equal and self._begun.get(trained) == own.total:
            self._unchanged.add(trained.full_name())
            return True
        if self._begun.pop(trained, None) is not None:
            self._unchanged.discard(trained.full_name())
        if is_equal:
            self._set_equal()
            return True
        return self._compare_each(own, rows, ranks, known)

    def _set_equal(self) -> None:
        self._proof.compared_after = self._updates
        if self._proof.ranks_equal is None:
            self._proof.ranks_equal = True

    def _has_failed(self, rows: list[list[int]], ranks: ModelRanks | StaticRanks) -> bool:
        """Whether any of RANKS could not get its numbers, ROWS; then none compares any more.

        A rank that compared alone would wait for the others for ever.
        """
        failed = [rank for rank, row in zip(ranks.ranks, rows) if row[0] == _FAILED]
        if failed:
            self._every = NEVER
            self._proof.note(
                f"the ranks are not compared any more: rank {failed[0]} could not do its part"
            )
        return bool(failed)

    def _compare_each(
        self,
        own: OwnSums,
        rows: list[list[int]],
        ranks: ModelRanks | StaticRanks,
        known: ParameterHistory | None,
    ) -> bool:
        """Return whether the parameters are equal to the last bit; statistics may differ.

        Raises _RanksDiffer, on all ranks, if a parameter differs by more than rounding.

        ROWS has the number of parameters and the checksum of each rank.
        """
        counts = [row[0] for row in rows]
        if len(set(counts)) > 1:
            raise _RanksDiffer(f"they have different numbers of parameters: {counts}")
        parameters = own.parameters
        each_own = _own_sums_of_each(own, known) or [[_FAILED] * len(own.values)] * 2
        table = ranks.gather(each_own[0])
        kinds = ranks.gather(each_own[1])
        if self._has_failed(kinds, ranks):
            return False
        # A parameter has a bit if any rank has seen it.
        seen = [functools.reduce(operator.or_, each) for each in zip(*kinds)]
        statistics = []
        is_exact = True
        for index, (name, value) in enumerate(parameters.items()):
            if len({row[index] for row in table}) == 1:
                continue
            if seen[index] & ~_SPARSE != _TRAINED:
                statistics.append(name)
                continue
            is_exact = False
            self._compare_parameter(
                name, _array(value), ranks, is_sparse=bool(seen[index] & _SPARSE)
            )
        self._set_equal()
        self._proof.counts["parameters_compared"] = len(parameters) - len(statistics)
        if statistics:
            self._proof.note(
                f"the ranks differ in {_listed(statistics)}, which was not compared: no gradient"
                " trains it, or forward itself writes into it, as with running statistics"
            )
        if not is_exact:
            self._proof.note("the ranks are equal within rounding, not to the last bit")
        return is_exact

    def _compare_parameter(
        self, name: str, array: Any, ranks: ModelRanks | StaticRanks, *, is_sparse: bool
    ) -> None:
        """Compare the parameter NAME, of which this rank has ARRAY, by its values."""
        apart = ranks.apart(array, _ULPS_PER_UPDATE * self._updates)
        if not any(apart):
            return
        bad = [rank for rank, rows in zip(ranks.ranks, apart) if rows]
        size = len(array) if array.ndim else 1
        is_few = is_sparse and max(apart) <= _most_few(size)
        where = f"{max(apart)} of {size} rows of " if is_few else ""
        differ = (
            f"{_these_ranks(bad, ranks.ranks[0])} in {where}the parameter {name}"
            f" of shape {list(array.shape)}"
        )
        if not is_few:
            raise _RanksDiffer(differ)
        if name not in self._tables:
            self._tables.add(name)
            paddles = "as Paddle's own updates of sparse tables may leave them"
            self._proof.note(f"after update {self._updates} {differ}, {paddles}")

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
            raise border.Disproved(
                f"The ranks do not train the same model any more: {text}."
                " --check_ranks=-1 leaves this check out."
            )
        # It is said once.
        self._done.add(trained)

    def _changes_sums(self, trained: Any) -> bool:
        """Whether gradients of TRAINED are summed otherwise than by Paddle alone."""
        if not hasattr(trained, "global_block"):
            return isinstance(getattr(trained, "_reducer", None), Reducer)
        return self._changes_programs or any(
            channels.channel_of(op) is not None for block in trained.blocks for op in block.ops
        )

    def report_unchanged(self) -> None:
        """Note the models whose weights no update has changed, which proves nothing."""
        if self._unchanged:
            self._proof.note(
                "no update has changed the weights: that the ranks are equal proves nothing"
                " (a GradScaler skips updates whose gradients are not finite)"
            )
            self._proof.write()


class _RanksDiffer(Exception):
    """A parameter differs between ranks by more than rounding."""


class OwnSums(NamedTuple):
    """The parameters of this rank that are compared, one checksum of all, and of each if known."""

    parameters: Mapping[str, Any]
    total: int
    sums: list[int] | None

    @property
    def values(self) -> list[Any]:
        """The parameters themselves."""
        return list(self.parameters.values())


@_watching
def _own_sums(find: Callable[[], Mapping[str, Any]], known: ParameterHistory | None) -> OwnSums:
    parameters = find()
    values = list(parameters.values())
    if known is not None:
        known.record_gradients(values)
    if known is None or checksums.are_on_host(values):
        return OwnSums(parameters, checksums.of_all(map(_array, values)), None)
    # On a device a sum of each is no more work than one of all.
    sums = checksums.of_tensors(values)
    return OwnSums(parameters, zlib.crc32(json.dumps(sums).encode()), sums)


@_watching
def _own_sums_of_each(own: OwnSums, known: ParameterHistory | None) -> list[list[int]]:
    """Return the checksum of each parameter, and the bits that this rank has seen of it."""
    sums = own.sums or [checksums.of_array(_array(each)) for each in own.values]
    # `_variables` has left out what the forward of a static program writes into.
    kinds = [
        _TRAINED
        if known is None
        else _TRAINED * known.is_trained(each)
        | _WRITTEN * known.is_written(each)
        | _SPARSE * known.is_sparse(each)
        for each in own.values
    ]
    return [sums, kinds]


def _most_few(size: int) -> int:
    """Return how many of SIZE rows are a few.

    >>> [_most_few(size) for size in (80, 600, 10_000, 9_000_000)]
    [0, 6, 8, 90]
    """
    return min(max(_FEW, size // _ONE_IN), size // 100)


def _these_ranks(bad: Sequence[int], first: int) -> str:
    """Say that the ranks BAD differ from the rank FIRST.

    >>> _these_ranks([1], 0), _these_ranks([1, 3], 0)
    ('rank 1 and rank 0 differ', 'ranks 1, 3 differ from rank 0')
    """
    if len(bad) == 1:
        return f"rank {bad[0]} and rank {first} differ"
    return f"ranks {', '.join(map(str, bad))} differ from rank {first}"


def _listed(names: Sequence[str]) -> str:
    """Join the first of NAMES, and count the others.

    >>> _listed(["a", "b"]), _listed(list("abcdef"))
    ('a, b', 'a, b, c, d and 2 more')
    """
    rest = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _has_allreduces(program: Any) -> bool:
    return any(
        op.type in _ALLREDUCES or channels.channel_of(op) is not None
        for block in program.blocks
        for op in block.ops
    )


def _is_updated_by(model: Any, optimizer: Any) -> bool:
    own = {id(parameter) for parameter in _of_optimizer(optimizer)}
    return any(id(parameter) in own for parameter in model.parameters())


def _of_optimizer(optimizer: Any) -> list[Any]:
    """Return the parameters of OPTIMIZER, also from groups and from an inner optimizer."""
    found = updates.parameters_of(optimizer)
    inner = getattr(optimizer, "inner_optimizer", None)
    return found or ([] if inner is None else _of_optimizer(inner))


def _parameters(model: Any) -> dict[str, Any]:
    """Return by name the parameters of MODEL that must be equal; statistics may be among them."""
    return {
        # Without the prefix that DataParallel adds.
        name.partition("_layers.")[2] or name: parameter
        for name, parameter in model.named_parameters()
        if parameter.trainable
        and not getattr(parameter, "is_distributed", False)
        and not getattr(parameter, "no_sync", False)
    }


def _variables(program: Any) -> dict[str, Any]:
    import paddle

    scope = paddle.static.global_scope()
    # Running statistics differ between ranks.
    statistics = programs.written_by_forward(program)
    return {
        parameter.name: scope.find_var(parameter.name).get_tensor()
        for parameter in sorted(program.all_parameters(), key=lambda each: str(each.name))
        if not getattr(parameter, "is_distributed", False)
        and not getattr(parameter, "optimize_attr", {}).get("no_sync", False)
        and scope.find_var(parameter.name) is not None
        and parameter.trainable
        and parameter.name not in statistics
    }


def _array(value: Any) -> Any:
    import numpy as np

    return value.numpy() if hasattr(value, "numpy") else np.array(value)
