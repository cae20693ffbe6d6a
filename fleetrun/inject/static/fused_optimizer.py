"""One update operator for many parameters: Paddle's merged kernels in place of single ones."""

from __future__ import annotations

from typing import Any

from . import program

# An operator with an input that the merged kernel lacks is left alone.
_KINDS = {
    "momentum": (
        ("Param", "Grad", "Velocity", "LearningRate", "MasterParam"),
        ("ParamOut", "VelocityOut", "MasterParamOut"),
        ("mu", "use_nesterov", "multi_precision", "rescale_grad"),
    ),
    "adam": (
        (
            "Param",
            "Grad",
            "LearningRate",
            "Moment1",
            "Moment2",
            "Beta1Pow",
            "Beta2Pow",
            "MasterParam",
        ),
        ("ParamOut", "Moment1Out", "Moment2Out", "Beta1PowOut", "Beta2PowOut", "MasterParamOut"),
        ("beta1", "beta2", "epsilon", "multi_precision", "use_global_beta_pow"),
    ),
}
MERGED = tuple(f"merged_{kind}" for kind in _KINDS)


def run(main: Any) -> str:
    """Merge updates with equal settings; return why none could be merged, or an empty string."""
    done = 0
    for block in main.blocks:
        done += sum(_merge(block, group) for group in reversed(_groups(block)))
    if done:
        main._sync_with_cpp()
        return ""
    kinds = sorted({op.type for op in program.updates(main)})
    return f"Paddle merges the updates of momentum and adam only; here: {', '.join(kinds)}"


def _groups(block: Any) -> list[list[int]]:
    """Return groups of indexes of operators that may be merged."""
    groups: list[list[int]] = []
    key: object = None
    touched: set[str] = set()
    for index, op in enumerate(block.ops):
        op_key = _key(block, op)
        names = {*op.input_arg_names, *op.output_arg_names}
        if op_key is None:
            # A group runs at its last operator's place; nothing may touch its variables earlier.
            if touched & names:
                key = None
            continue
        if op_key != key:
            groups.append([])
            key, touched = op_key, set()
        groups[-1].append(index)
        touched |= names - set(op.input("LearningRate"))
    return [group for group in groups if len(group) > 1]


def _key(block: Any, op: Any) -> object:
    if op.type not in _KINDS:
        return None
    entries, exits, settings = _KINDS[op.type]
    used = [name for name in op.input_names if op.input(name)]
    if not set(used) <= set(entries) or program.bytes_of(block, op.input("Grad")[0]) is None:
        return None
    if not {name for name in op.output_names if op.output(name)} <= set(exits):
        return None
    dtypes = [str(block._find_var_recursive(op.input(name)[0]).dtype) for name in ("Param", "Grad")]
    if any(_is_bfloat16(dtype) for dtype in dtypes):
        # Some versions lack such a kernel (2.6.2's merged_momentum) and would stop.
        return None
    values = [op.attr(name) for name in settings if op.has_attr(name)]
    return (op.type, sorted(used), op.input("LearningRate"), dtypes, values, program.role(op))


def _is_bfloat16(dtype: str) -> bool:
    """Whether DTYPE is Paddle's name for bfloat16.

    >>> [_is_bfloat16(name) for name in ("VarType.BF16", "paddle.bfloat16", "VarType.FP16")]
    [True, True, False]
    """
    return dtype.lower().rpartition(".")[2] in ("bf16", "bfloat16")


def _merge(block: Any, group: list[int]) -> int:
    ops = [block.ops[index] for index in group]
    first = ops[0]
    entries, exits, settings = _KINDS[first.type]
    inputs = {
        name: [block._find_var_recursive(op.input(name)[0]) for op in ops]
        for name in entries
        if name in first.input_names and first.input(name)
    }
    outputs = {
        name: [block._find_var_recursive(op.output(name)[0]) for op in ops]
        for name in exits
        if name in first.output_names and first.output(name)
    }
    attrs = {name: first.attr(name) for name in settings if first.has_attr(name)}
    if first.type == "momentum":
        attrs["regularization_method"] = [op.attr("regularization_method") for op in ops]
        attrs["regularization_coeff"] = [op.attr("regularization_coeff") for op in ops]
    attrs["op_role"] = program.role(first)
    merged = f"merged_{first.type}"
    for index in reversed(group):
        block._remove_op(index, sync=False)
    at = group[-1] - len(group) + 1
    block._insert_op_without_sync(at, type=merged, inputs=inputs, outputs=outputs, attrs=attrs)
    return len(group)
