"""Records functions of Paddle that communicate within: kernels, programs, waits for others.

Python calls them, but not the collectives in them, so each call is recorded like one collective. A
backward in which their gradients communicate is recorded like that of Paddle's own reducer.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from .flight_recorder import STORE, Operation, replace_in_modules, run_in_groups, watching
from .import_hooks import after_import, in_place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .flight_recorder import FlightRecorder


class _Kernel(NamedTuple):
    """A function of `paddle._C_ops`: which arguments tell where it communicates, and whether."""

    # The id of its group; in `_legacy_C_ops` it follows the word `ring_id`. None: all ranks.
    group: int | None = None
    # The number of ranks, and whether this is a test; neither communicates alone.
    ranks: int | None = None
    is_test: int | None = None
    # Whether its gradient communicates, too.
    is_summed: bool = False


_RING = "ring_id"
_KERNELS = {
    "c_softmax_with_cross_entropy": _Kernel(3),
    "c_softmax_with_multi_label_cross_entropy": _Kernel(),
    "c_concat": _Kernel(3),
    "margin_cross_entropy": _Kernel(3, ranks=5),
    "class_center_sample": _Kernel(3, ranks=5),
    "sync_batch_norm_": _Kernel(is_test=5, is_summed=True),
    "global_scatter": _Kernel(is_summed=True),
    "global_gather": _Kernel(is_summed=True),
    "fused_attention": _Kernel(26, is_summed=True),
    "fused_feedforward": _Kernel(25, is_summed=True),
    "fused_multi_transformer": _Kernel(),
    "fused_multi_transformer_": _Kernel(29),
    **dict.fromkeys(
        (
            *("all_reduce", "all_reduce_", "all_gather", "all_to_all", "reduce_scatter"),
            *("broadcast", "broadcast_", "reduce", "reduce_", "mp_allreduce_sum"),
        ),
        _Kernel(1),
    ),
    **dict.fromkeys(
        (
            *("barrier", "c_allgather", "c_allreduce_sum", "c_allreduce_sum_", "c_allreduce_max"),
            *("c_allreduce_max_", "c_broadcast", "c_broadcast_", "c_reducescatter", "alltoall"),
            *("c_reduce_sum", "c_reduce_max", "c_reduce_min", "c_reduce_prod"),
        ),
        _Kernel(),
    ),
}
_PROGRAM = Operation("program", None)
# Operators with a group's id that do not communicate.
_LOCAL = ("c_identity", "c_split", "c_embedding", "c_sync_", "c_wait_", "c_comm_", "c_gen_")
_MESSAGES = ("send", "recv", "p_send", "p_recv", "partial_send", "partial_recv")
# By module and class: what waits for all ranks, outside of a ProcessGroup.
_BARRIERS = {
    ("paddle.distributed.parallel_with_gloo", ""): {"gloo_barrier": "gloo_barrier"},
    ("paddle.distributed.fleet.base.role_maker", "Gloo"): {
        "barrier": "fleet barrier",
        "all_reduce": "fleet all_reduce",
        "all_gather": "fleet all_gather",
    },
}


def watch(recorder: FlightRecorder) -> None:
    """Record for RECORDER what communicates within."""
    for module in ("paddle._C_ops", "paddle._legacy_C_ops"):
        after_import(module, functools.partial(_patch_kernels, recorder))
    after_import("paddle.base.executor", functools.partial(_patch_executor, recorder))
    for name in ("partial_program", "pir_partial_program"):
        module = f"paddle.jit.dy2static.{name}"
        after_import(module, functools.partial(_patch_partial_programs, recorder))
    after_import("paddle.jit.translated_layer", functools.partial(_patch_loaded, recorder))
    for (module, owner), names in _BARRIERS.items():
        after_import(module, functools.partial(_patch_barriers, recorder, owner, names))
    after_import("paddle.base.core", functools.partial(_patch_store, recorder))


def _recorded(
    recorder: FlightRecorder,
    operation: Operation,
    groups_of: Callable[..., Iterable[Any]],
    function: Callable[..., Any],
    summed_of: Callable[..., Iterable[Any]] = lambda *_: (),
) -> Callable[..., Any]:
    """Return FUNCTION, recorded as one OPERATION in each of the groups that its arguments name.

    In those of SUMMED_OF, the next backward communicates, if the result has a gradient.
    """
    find, begin, end, raised, arm = (
        watching(recorder, hook)
        for hook in (groups_of, recorder.begin, recorder.end, recorder.raised, recorder.arm)
    )
    find_summed = watching(recorder, summed_of)

    @functools.wraps(function)
    def recorded(*args: Any, **options: Any) -> Any:
        called = [(begin(group, operation, args), group) for group in find(*args) or ()]
        call = functools.partial(function, *args, **options)
        result = run_in_groups(called, call, end, raised)
        if _has_gradient(result):
            for group in find_summed(*args) or ():
                arm(group)
        return result

    return recorded


def _has_gradient(result: Any) -> bool:
    """Whether RESULT, or the first tensor in it, has a gradient."""
    while isinstance(result, (list, tuple)) and result:
        result = result[0]
    return not getattr(result, "stop_gradient", True)


# Kernels ------------------------------------------------------------------------------------------


def _patch_kernels(recorder: FlightRecorder, module: Any) -> None:
    """Record the functions of MODULE that communicate."""
    eager = module.core.eager.Tensor
    for name, kernel in _KERNELS.items():
        if hasattr(module, name):
            find = functools.partial(_group_of, recorder, kernel, eager)
            summed = (find,) if kernel.is_summed else ()
            operation = Operation(name.removesuffix("_"), 0)
            setattr(
                module,
                name,
                _recorded(recorder, operation, find, getattr(module, name), *summed),
            )


def _group_of(
    recorder: FlightRecorder, kernel: _Kernel, eager: type, *args: Any
) -> tuple[Any, ...]:
    """Return the group in which KERNEL communicates when called with ARGS; none if it does not."""
    # The same functions build programs.
    if not args or not isinstance(args[0], eager):
        return ()
    words = (at for at, value in enumerate(args[:-1]) if type(value) is str and value == _RING)
    at = next(words, None)
    ring = 0
    if at is not None:
        ring = args[at + 1]
    elif kernel.group is not None:
        ring = args[kernel.group]
    is_alone = kernel.ranks is not None and args[kernel.ranks] < 2
    is_test = kernel.is_test is not None and args[kernel.is_test]
    group = recorder.group_of(ring)
    return () if is_alone or is_test or group is None else (group,)


# Programs -----------------------------------------------------------------------------------------


def _patch_executor(recorder: FlightRecorder, module: Any) -> None:
    """Record each run of a program that communicates."""

    def groups_of(_executor: Any, program: Any = None, *_: Any) -> list[Any]:
        return _groups_in(recorder, program or module.default_main_program())

    kind = module.Executor
    run = kind.run

    @functools.wraps(run)
    def with_program(executor: Any, program: Any = None, *args: Any, **options: Any) -> Any:
        return recorded(executor, program, *args, **options)

    recorded = _recorded(recorder, _PROGRAM, groups_of, run)
    kind.run = with_program


def _patch_partial_programs(recorder: FlightRecorder, module: Any) -> None:
    """Record each run of a program of `to_static` that communicates."""
    kind = module.PartialProgramLayer

    def groups_of(which: str, layer: Any, *_: Any) -> list[Any]:
        # In Paddle 3, programs of its own representation are in another object.
        owner = layer if hasattr(type(layer), which) else layer.program
        return _groups_in(recorder, getattr(owner, which, None))

    for name in ("__call__", "sot_call"):
        if hasattr(kind, name):
            forward = functools.partial(groups_of, "forward_program")
            backward = functools.partial(groups_of, "backward_program")
            function = getattr(kind, name)
            setattr(kind, name, _recorded(recorder, _PROGRAM, forward, function, backward))


def _patch_loaded(recorder: FlightRecorder, module: Any) -> None:
    """Record each run of a program of `jit.load`; those of Paddle 3 are programs of `to_static`."""

    def groups_of(_layer: Any, _inputs: Any, holder: Any) -> list[Any]:
        return _groups_in(recorder, holder.infer_program, holder)

    # Its gradient communicates where it does.
    run = module._run_dygraph
    module._run_dygraph = _recorded(recorder, _PROGRAM, groups_of, run, groups_of)


def _groups_in(recorder: FlightRecorder, program: Any, owner: Any = None) -> list[Any]:
    """Return the groups in which PROGRAM of OWNER communicates; note if one is not known."""
    program = getattr(program, "_program", None) or program
    if program is None:
        return []
    owner = owner or program
    rings = getattr(owner, "_fleetrun_rings", None)
    if rings is None:
        rings = owner._fleetrun_rings = sorted(_rings_in(program))
    groups = [recorder.group_of(ring) for ring in rings]
    if None in groups:
        recorder.note_unrecorded("static programs")
    return [group for group in groups if group is not None]


def _rings_in(program: Any) -> set[int]:
    """Return the ids of the groups that the operators of PROGRAM name; -1 if it sends messages."""
    rings = set()
    if hasattr(program, "blocks"):
        todo = list(program.blocks)
    elif hasattr(program, "num_blocks"):
        # What Paddle's own file describes.
        todo = [program.block(at) for at in range(program.num_blocks())]
    else:
        todo = [program.global_block()]
    while todo:
        block = todo.pop()
        ops = block.ops if hasattr(block, "ops") else map(block.op, range(block.op_size()))
        for operator in ops:
            if hasattr(operator, "attr"):
                kind = operator.type
                name = str(kind() if callable(kind) else kind)
                ring = operator.attr(_RING) if operator.has_attr(_RING) else None
            else:
                name = operator.name().rpartition(".")[2]
                ring = operator.attrs().get(_RING) if operator.has_attr(_RING) else None
                todo += operator.blocks()
            if isinstance(ring, int) and ring >= 0 and not name.startswith(_LOCAL):
                # A message is between two ranks of its group.
                rings.add(-1 if name.startswith(_MESSAGES) else ring)
            if name.startswith("sync_batch_norm"):
                rings.add(0)
    return rings


# Waits --------------------------------------------------------------------------------------------


def _patch_barriers(
    recorder: FlightRecorder, owner: str, names: dict[str, str], module: Any
) -> None:
    """Record the functions NAMES of OWNER in MODULE, each in a channel of its own."""
    patched = getattr(module, owner) if owner else module

    def everyone(*_: Any) -> Sequence[Any]:
        world = recorder.group_of(0)
        return () if world is None else (world,)

    for name, operation in names.items():
        if hasattr(patched, name):
            function = getattr(patched, name)
            barrier = Operation(operation, None, blocks=True)
            recorded = _recorded(recorder, barrier, everyone, function)
            setattr(patched, name, recorded)
            replace_in_modules(name, function, recorded)


def _patch_store(recorder: FlightRecorder, core: Any) -> None:
    """Record what waits for a key of a store: any rank may set it."""
    begin, end, raised = (
        watching(recorder, hook)
        for hook in (recorder.begin_wait, recorder.end_group, recorder.raised)
    )

    def patch(kind: Any, name: str) -> None:
        @in_place_of(kind, name)
        def waits(function: Any, *args: Any, **options: Any) -> Any:
            # Another thread keeps nobody waiting.
            is_main = threading.current_thread() is threading.main_thread()
            number = begin(Operation(f"{STORE}.{name}", None, blocks=True)) if is_main else 0
            try:
                result = function(*args, **options)
            except BaseException:
                if number:
                    raised(number)
                raise
            if number:
                end(number)
            return result

    # A barrier of a script may add 0 until all have come.
    for name in ("add", "get", "wait"):
        if hasattr(core, "TCPStore"):
            patch(core.TCPStore, name)
