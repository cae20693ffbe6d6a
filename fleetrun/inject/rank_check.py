"""Compares the parameters of the ranks, which must stay equal where they train on shared data.

First every rank sends one number, the checksum of all its parameters. Only where these differ are
the parameters looked at one by one: kernels may round differently on different devices, and that
is no divergence. Neither are running statistics, which are of what each rank sees;
`parameter_history` tells them from what is trained.
"""

from __future__ import annotations

import functools
import json
import operator
import os
import weakref
import zlib
from typing import TYPE_CHECKING, Any

from . import settings, store, updates
from .import_hooks import after_import
from .parameter_history import ParameterHistory, watch_writes
from .static import program as programs
from .static.cpu import channels

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType

    from .evidence import Evidence
    from .spec import StrategySpec

_NEVER = -1
# The ranks of these are meant to differ for a while.
_LOCAL = ("localsgd", "adaptive_localsgd", "a_sync")
_ALLREDUCES = {"all_reduce", "c_allreduce_sum", "c_allreduce_avg"}
# The updates after which ranks are always compared. What a reducer keeps from one backward for the
# next (the order of buckets, their memory) is all in use at the third.
_ALWAYS = (1, 3)
# What updates a parameter: gradients, forward.
_LEARNED, _WRITTEN = 1, 2
# So many names are told.
_NAMED = 4
# How many units of the last place one update may differ by.
_ROUNDINGS = 4


def install(spec: StrategySpec, proof: Evidence) -> None:
    """Compare after the first updates, and after every N where that is asked for."""
    if spec.check_ranks == _NEVER:
        return
    check = _Check(spec.check_ranks, proof)
    after_import("paddle.distributed.parallel", check.watch_models)
    updates.before_update(check.before_update)
    updates.on_update(check.after_update)


def barrier(source: Any) -> None:
    """Return when every rank that trains with this one is here, too."""
    import paddle

    if _world_size() == 1:
        return
    if hasattr(source, "global_block"):
        if _has_allreduces(source):
            _StaticRanks().gather([])
    elif paddle.distributed.is_initialized():
        paddle.distributed.barrier()


class _Check:
    def __init__(self, every: int, proof: Evidence) -> None:
        self._every = every
        self._proof = proof
        self._histories: weakref.WeakKeyDictionary[Any, ParameterHistory] = (
            weakref.WeakKeyDictionary()
        )
        # By optimizer or program: another one may be at work in one rank only, and all must
        # compare at the same time.
        self._counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        # Of the one that is compared.
        self._updates = 0

    def watch_models(self, module: ModuleType) -> None:
        """Remember every data-parallel model, and what its forward changes."""
        kind: Any = module.DataParallel
        begin, forward = kind.__init__, kind.forward

        @functools.wraps(begin)
        def __init__(model: Any, *args: Any, **options: Any) -> None:
            begin(model, *args, **options)
            self._histories[model] = ParameterHistory(model)

        @functools.wraps(forward)
        def watched(model: Any, *args: Any, **options: Any) -> Any:
            known = self._histories.get(model)
            if known is None or not self._is_to_come(known.updates):
                return forward(model, *args, **options)
            with known.watching_forward():
                return forward(model, *args, **options)

        kind.__init__, kind.forward = __init__, watched
        watch_writes()

    def before_update(self, optimizer: Any) -> None:
        """See which parameters have gradients: optimizers may clear them when they step."""
        if not self._is_to_come(self._counts.get(optimizer, 0)):
            return
        own = _of_optimizer(optimizer)
        for known in list(self._histories.values()):
            known.see_gradients(own)

    def after_update(self, source: Any, _number: int) -> None:
        """Compare, if it is time."""
        # Not sooner: `paddle.distributed.spawn` tells its processes late how many there are.
        if not self._is_time(source) or _world_size() == 1:
            return
        if hasattr(source, "global_block"):
            self._after_run(source)
            return
        # The order of models is that of their making, which is the same in every rank.
        models = [model for model in self._in_order() if _is_updated_by(model, source)]
        if not models:
            if not self._histories:
                self._proof.note("the ranks were not compared: there is no data-parallel model")
            return
        for model in models:
            known = self._histories[model]
            known.updates = self._updates
            parameters = _parameters(model)
            known.see_gradients(list(parameters.values()))
            self._compare(parameters, _ModelRanks(model), known)

    def _after_run(self, program: Any) -> None:
        if any(settings.effective(name) for name in _LOCAL):
            self._proof.note("the ranks were not compared: they may differ by the strategy")
        elif not _has_allreduces(program):
            self._proof.note("the ranks were not compared: the program has no allreduce")
        else:
            self._compare(_variables(program), _StaticRanks(), None)

    def _in_order(self) -> list[Any]:
        return sorted(self._histories, key=lambda model: str(model.full_name()))

    def _is_time(self, source: Any) -> bool:
        count = self._updates = self._counts.get(source, 0) + 1
        self._counts[source] = count
        return count in _ALWAYS or (self._every > 0 and count % self._every == 0)

    def _is_to_come(self, count: int) -> bool:
        """Whether ranks are to be compared at any time after COUNT updates."""
        return self._every > 0 or count < _ALWAYS[-1]

    def _compare(
        self,
        parameters: Mapping[str, Any],
        ranks: _ModelRanks | _StaticRanks,
        known: ParameterHistory | None,
    ) -> None:
        arrays = {name: _array(value) for name, value in parameters.items()}
        sums = [zlib.crc32(array.tobytes()) for array in arrays.values()]
        total = zlib.crc32(json.dumps(sums).encode())
        rows = ranks.gather([len(sums), total])
        self._proof.counts["ranks_compared"] = len(rows)
        self._proof.counts["parameters_compared"] = len(sums)
        self._proof.compared_after = self._updates
        if all(row == rows[0] for row in rows):
            self._proof.ranks_equal = True
            return
        # In a static graph, what forward writes into was left out already.
        origins_of = [
            _LEARNED
            if known is None
            else _LEARNED * known.is_learned(each) | _WRITTEN * known.is_written(each)
            for each in parameters.values()
        ]
        self._look_closer(arrays, sums, rows, origins_of, ranks)

    def _look_closer(
        self,
        arrays: dict[str, Any],
        sums: list[int],
        rows: list[list[int]],
        origins_of: list[int],
        ranks: _ModelRanks | _StaticRanks,
    ) -> None:
        """Find the first parameter that differs by more than rounding, and stop; all ranks do."""
        counts = [row[0] for row in rows]
        if len(set(counts)) > 1:
            self._fail(f"they have different numbers of parameters: {counts}")
        table = ranks.gather(sums)
        # What one rank has seen holds for all.
        seen = [functools.reduce(operator.or_, each) for each in zip(*ranks.gather(origins_of))]
        statistics = []
        is_exact = True
        for index, (name, array) in enumerate(arrays.items()):
            if len({row[index] for row in table}) == 1:
                continue
            if seen[index] != _LEARNED:
                statistics.append(name)
                continue
            is_exact = False
            distances = ranks.distances(array)
            bad = [
                ranks.names[place]
                for place, distance in enumerate(distances)
                if not distance <= _ROUNDINGS * self._updates
            ]
            if bad:
                named = ", ".join(map(str, bad))
                self._fail(
                    f"rank {named} and rank {ranks.names[0]} differ in the parameter {name}"
                    f" of shape {list(array.shape)}"
                    if len(bad) == 1
                    else f"ranks {named} differ from rank {ranks.names[0]} in the parameter {name}"
                    f" of shape {list(array.shape)}"
                )
        self._proof.ranks_equal = True
        self._proof.counts["parameters_compared"] = len(arrays) - len(statistics)
        if statistics:
            self._proof.note(
                f"the ranks differ in {_listed(statistics)}, which was not compared: no gradient"
                " trains it, or forward itself writes into it, as with running statistics"
            )
        if not is_exact:
            self._proof.note("the ranks are equal within rounding, not to the last bit")

    def _fail(self, text: str) -> None:
        self._proof.ranks_equal = False
        self._proof.note(f"after update {self._updates} {text}.")
        self._proof.claim()
        self._proof.write()
        raise RuntimeError(
            f"The ranks do not train the same model any more: after update {self._updates} {text}."
            " --check_ranks=-1 leaves this check out."
        )


class _ModelRanks:
    """The ranks that share a data-parallel model in a dynamic graph."""

    def __init__(self, model: Any) -> None:
        import paddle

        self._paddle: Any = paddle
        self._group = getattr(model, "group", None)
        own = None if self._group is None else getattr(self._group, "ranks", None)
        self.names = list(own) if own else list(range(paddle.distributed.get_world_size()))

    def gather(self, numbers: list[int]) -> list[list[int]]:
        """Return the numbers of every rank."""
        return [list(map(int, row)) for row in self._gather(numbers, "int64")]

    def _gather(self, numbers: list[Any], kind: str) -> list[list[Any]]:
        paddle = self._paddle
        with paddle.no_grad():
            own = paddle.to_tensor(numbers, dtype=kind)
            rows: list[Any] = []
            paddle.distributed.all_gather(rows, own, group=self._group)
            return [row.numpy().tolist() for row in rows]

    def distances(self, array: Any) -> list[float]:
        """Return how far each rank is from the first, in units of the last place."""
        paddle = self._paddle
        with paddle.no_grad():
            first = paddle.to_tensor(array)
            paddle.distributed.broadcast(first, src=self.names[0], group=self._group)
            own = _distance(array, first.numpy())
        return [row[0] for row in self._gather([own], "float64")]


class _StaticRanks:
    """All ranks of a static graph, which exchange values through the job's store."""

    # Several programs may be compared, each after its own first update: no key may be used twice.
    _comparisons = 0

    def __init__(self) -> None:
        _StaticRanks._comparisons += 1
        self._key = f"fleetrun/check/{_StaticRanks._comparisons}"
        self._gathers = 0
        self._rank = int(os.environ["PADDLE_TRAINER_ID"])
        self.names = list(range(_world_size()))

    def gather(self, numbers: list[Any]) -> list[list[Any]]:
        """Return the numbers of every rank."""
        self._gathers += 1
        return store.all_gather(f"{self._key}/{self._gathers}", numbers, self._rank, self.names)

    def distances(self, array: Any) -> list[float]:
        """Return how far each rank is from the first; see `_distance`."""
        import numpy as np

        key = f"{self._key}/{self._gathers}/values"
        shared = store.job_store()
        if self._rank == 0:
            shared.set(key, array.tobytes())
        first = np.frombuffer(bytes(shared.get(key)), dtype=array.dtype).reshape(array.shape)
        return [row[0] for row in self.gather([_distance(array, first)])]


def _listed(names: Sequence[str]) -> str:
    """Name the first of NAMES, and count the unsupported.

    >>> _listed(["a", "b"]), _listed(list("abcdef"))
    ('a, b', 'a, b, c, d and 2 more')
    """
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _has_allreduces(program: Any) -> bool:
    return any(
        op.type in _ALLREDUCES or channels.channel_of(op) is not None
        for block in program.blocks
        for op in block.ops
    )


def _world_size() -> int:
    text = os.environ.get("PADDLE_TRAINERS_NUM", "")
    return int(text) if text.isdigit() else 1


def _is_updated_by(model: Any, optimizer: Any) -> bool:
    own = {id(parameter) for parameter in _of_optimizer(optimizer)}
    return any(id(parameter) in own for parameter in model.parameters())


def _of_optimizer(optimizer: Any) -> list[Any]:
    """Return the parameters of OPTIMIZER, which may be in groups, or be those of another."""
    found: list[Any] = []
    inner = getattr(optimizer, "inner_optimizer", None)
    for entry in getattr(optimizer, "_parameter_list", None) or []:
        found.extend(entry["params"] if isinstance(entry, dict) else [entry])
    return found or ([] if inner is None else _of_optimizer(inner))


def _parameters(model: Any) -> dict[str, Any]:
    """Return the parameters of MODEL that all ranks must have alike, and perhaps statistics."""
    return {
        # Without the name that DataParallel gives to what it wraps.
        name.partition("_layers.")[2] or name: parameter
        for name, parameter in model.named_parameters()
        if parameter.trainable
        and not getattr(parameter, "is_distributed", False)
        and not getattr(parameter, "no_sync", False)
    }


def _variables(program: Any) -> dict[str, Any]:
    import paddle

    scope = paddle.static.global_scope()
    # Running statistics are of what each rank sees.
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


def _distance(own: Any, first: Any) -> float:
    """Return the largest difference in units of the last place of the largest value."""
    import numpy as np

    if own.tobytes() == first.tobytes():
        return 0.0
    if own.dtype.kind != "f":
        # bfloat16 comes as bare 16 bits: its first half is all there is to be seen.
        own, first = (_widened(array) for array in (own, first))
        unit = 2.0**-8
    else:
        unit = float(np.finfo(own.dtype).eps)
    own, first = own.astype("float64"), first.astype("float64")
    largest = float(np.max(np.abs(first)))
    distance = float(np.max(np.abs(own - first)))
    # Where either has become infinite or no number at all, it is farther than anything.
    return distance / (unit * largest) if distance < np.inf and largest else float("inf")


def _widened(array: Any) -> Any:
    import numpy as np

    if array.dtype != np.uint16:
        return array
    return (array.astype("uint32") << 16).view("float32")
