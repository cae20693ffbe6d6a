"""One update operator for many parameters: Paddle's merged kernels in place of single ones."""

from __future__ import annotations

import itertools
from typing import Any

from . import program

# By operator: the inputs, outputs and attributes that the merged kernel has. An operator with
# another input is left alone.
_ADAM = "Param Grad LearningRate Moment1 Moment2 Beta1Pow Beta2Pow MasterParam"
_KINDS = {
    "momentum": (
        ["Param", "Grad", "Velocity", "LearningRate", "MasterParam"],
        ["ParamOut", "VelocityOut", "MasterParamOut"],
        ["mu", "use_nesterov", "multi_precision", "rescale_grad"],
    ),
    "adam": (
        _ADAM.split(),
        [f"{name}Out" for name in _ADAM.split() if name not in ("Grad", "LearningRate")],
        ["beta1", "beta2", "epsilon", "multi_precision", "use_global_beta_pow"],
    ),
}
MERGED = tuple(f"merged_{kind}" for kind in _KINDS)


def run(main: Any) -> str:
    """Merge neighbouring updates with equal settings; return why none were, or nothing."""
    for block in main.blocks:
        keys = [_key(block, op) for op in block.ops]
        neighbours = itertools.groupby(range(len(keys)), keys.__getitem__)
        groups = [[*places] for key, places in neighbours if key is not None]
        for group in reversed(groups):
            if len(group) > 1:
                _merge(block, group)
    main._sync_with_cpp()
    kinds = sorted({op.type for op in program.updates(main)})
    if not set(MERGED).isdisjoint(kinds):
        return ""
    only = "Paddle merges updates of momentum and adam only, with equal settings and usual inputs"
    return f"{only}; here: {', '.join(kinds)}"


def _key(block: Any, op: Any) -> object:
    """Return what operators that may be merged have in common; None if OP may not."""
    if op.type not in _KINDS:
        return None
    entries, exits, attributes = _KINDS[op.type]
    used = [name for name in op.input_names if op.input(name)]
    if not set(used) <= set(entries) or program.bytes_of(block, op.input("Grad")[0]) is None:
        return None
    if not {name for name in op.output_names if op.output(name)} <= set(exits):
        return None
    dtypes = [str(block._find_var_recursive(op.input(name)[0]).dtype) for name in ("Param", "Grad")]
    if any("BF16" in dtype or "bfloat16" in dtype for dtype in dtypes):
        # Some versions lack such a kernel (2.6.2's merged_momentum) and would stop.
        return None
    values = [op.attr(name) for name in attributes if op.has_attr(name)]
    return (op.type, sorted(used), op.input("LearningRate"), dtypes, values, program.role(op))


def _merge(block: Any, group: list[int]) -> None:
    """Replace the neighbouring operators GROUP of BLOCK by a merged one."""
    ops = [block.ops[index] for index in group]
    first = ops[0]
    entries, exits, attributes = _KINDS[first.type]
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
    attrs = {name: first.attr(name) for name in attributes if first.has_attr(name)}
    if first.type == "momentum":
        for name in ("regularization_method", "regularization_coeff"):
            attrs[name] = [op.attr(name) for op in ops]
    attrs["op_role"] = program.role(first)
    # Read before the operators are freed.
    merged = f"merged_{first.type}"
    for index in reversed(group):
        block._remove_op(index, sync=False)
    block._insert_op_without_sync(
        group[0], type=merged, inputs=inputs, outputs=outputs, attrs=attrs
    )
