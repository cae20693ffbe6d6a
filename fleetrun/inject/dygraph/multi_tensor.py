"""Fused optimizer kernels in dynamic graphs, which Paddle has for Momentum and Adam.

Paddle calls it `use_multi_tensor`: one kernel updates many parameters.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from .. import settings, updates
from ..evidence import EFFECTIVE, NO_EFFECT
from ..import_hooks import after_import, in_place_of

if TYPE_CHECKING:
    from ..evidence import Evidence

FIELD = "fuse_all_optimizer_ops"
# The attribute of a fused optimizer with the names of the parameters in its tables.
_FUSED_NAMES = "_fleetrun_fused"
# By optimizer: its kernels for many parameters and for one.
_KERNELS = {"Momentum": ("merged_momentum_", "momentum_"), "Adam": ("merged_adam_", "adam_")}
# By optimizer: the tables that `_create_multi_tensor_dict` makes.
_TABLES = {
    "Momentum": (
        "_velocity_dict",
        "_master_weight_dict",
        "_regularization_method_dict",
        "_regularization_coeff_dict",
    ),
    "Adam": (
        "_moment1_dict",
        "_moment2_dict",
        "_beta1_pow_acc_dict",
        "_beta2_pow_acc_dict",
        "_master_weight_dict",
    ),
}


def install(proof: Evidence) -> None:
    """Fuse updates and count the kernels of each."""
    fusion = _Fusion(proof)
    for name in _KERNELS:
        after_import(f"paddle.optimizer.{name.lower()}", functools.partial(fusion.patch, name))
    updates.on_update(fusion.report, "the count of fused updates")


class _Fusion:
    """Enables `use_multi_tensor` where it is safe, and counts kernel calls."""

    def __init__(self, proof: Evidence) -> None:
        self._proof = proof
        # Status and text of the last report.
        self._reported = ("", "")
        # In this update: calls of fused kernels, parameters in them, and calls for one parameter.
        self._fused = self._parameters = self._single = 0
        self._why_not = ""

    def patch(self, name: str, module: Any) -> None:
        """Patch the optimizer NAME of MODULE to decide before each update whether it fuses."""

        @in_place_of(getattr(module, name), "_create_optimization_pass")
        def create(create_pass: Any, optimizer: Any, pairs: Any, *args: Any, **options: Any) -> Any:
            if sys.modules["paddle"].in_dynamic_mode():
                self._decide(optimizer, name, pairs)
            return create_pass(optimizer, pairs, *args, **options)

        operations: Any = module._C_ops
        fused, single = _KERNELS[name]
        module._C_ops = _CountingOperations(operations, fused, single, self)

    def count_fused(self, parameters: int) -> None:
        """Count one call of a fused kernel for a number of PARAMETERS."""
        self._fused += 1
        self._parameters += parameters

    def count_single(self) -> None:
        """Count one call of a kernel for one parameter."""
        self._single += 1

    def _decide(self, optimizer: Any, name: str, pairs: Any) -> None:
        if not settings.effective(FIELD):
            return
        known = optimizer.__dict__.get(_FUSED_NAMES)
        if optimizer._use_multi_tensor and known is None:
            # The script has enabled it itself.
            return
        if type(optimizer).__name__ != name:
            self._why_not = f"Paddle fuses {name}, but not its subclass {type(optimizer).__name__}"
            return
        entries = [
            (parameter, gradient)
            for parameter, gradient in ([] if isinstance(pairs, dict) else pairs)
            if not parameter.stop_gradient
        ]
        self._why_not = _obstacle(optimizer, entries)
        if isinstance(pairs, dict):
            self._why_not = "its parameters are in groups, which Paddle's fused kernels mix up"
        if self._why_not:
            optimizer._use_multi_tensor = False
            return
        now = [parameter.name for parameter, _ in entries]
        if not optimizer._use_multi_tensor or known != now:
            _make_tables(optimizer, name)
        optimizer.__dict__[_FUSED_NAMES] = now
        optimizer._use_multi_tensor = True

    def report(self, source: Any, _number: int) -> None:
        """Report the kernels that this update has called."""
        if self._proof.graph != "dygraph":
            return
        fused, parameters, single = self._fused, self._parameters, self._single
        self._fused = self._parameters = self._single = 0
        if settings.script_wins(FIELD):
            return
        if fused:
            text = f"{parameters} parameters in {fused} kernel call{'s' if fused > 1 else ''}"
            if single:
                text += f", {single} separately"
            report = (EFFECTIVE, text)
        else:
            kind = type(source).__name__
            why = self._why_not or f"Paddle has no fused kernel for {kind}"
            report = (NO_EFFECT, why)
        if report == self._reported or self._reported[0] == EFFECTIVE:
            return
        self._reported = report
        self._proof.counts["optimizer_kernels"] = fused + single
        self._proof.field(
            FIELD,
            report[0],
            in_effect=bool(fused),
            reason="" if fused else report[1],
            evidence=report[1] if fused else "",
        )


class _CountingOperations:
    """Paddle's `_C_ops`, with the calls of two kernels counted."""

    def __init__(self, operations: Any, fused: str, single: str, fusion: _Fusion) -> None:
        self._operations = operations
        fused_kernel, single_kernel = getattr(operations, fused), getattr(operations, single)

        def call_many(parameters: Any, *args: Any) -> Any:
            fusion.count_fused(len(parameters))
            return fused_kernel(parameters, *args)

        def call_one(*args: Any) -> Any:
            fusion.count_single()
            return single_kernel(*args)

        setattr(self, fused, call_many)
        setattr(self, single, call_one)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operations, name)


def _obstacle(optimizer: Any, entries: list[Any]) -> str:
    """Return why Paddle's fused kernel cannot update ENTRIES; empty if it can."""
    for parameter, gradient in entries:
        if gradient.is_selected_rows():
            return f"the gradient of {parameter.name} is sparse"
        kind = str(parameter.dtype).rpartition(".")[2].lower()
        if kind not in {"float32", "fp32"}:
            return f"{parameter.name} is {kind}, and only float32 is fused"
    if getattr(optimizer, "_amsgrad", False):
        return "Paddle's fused kernel does not support AMSGrad"
    if not entries:
        return "there is nothing to update"
    return ""


def _make_tables(optimizer: Any, name: str) -> None:
    """Give OPTIMIZER the empty tables that `use_multi_tensor` would have given it.

    Paddle fills them from the accumulators, so the optimizer's state is kept.
    """
    optimizer._param_dict = optimizer._create_multi_tensor_dict()
    for table in _TABLES[name]:
        setattr(optimizer, table, optimizer._create_multi_tensor_dict())
    # `FP32_LODTensor` before Paddle 3, `FP32_DenseTensor` since.
    for kind in optimizer._master_weight_dict:
        if kind.startswith("FP32"):
            optimizer._master_weight_dict[kind] = None
    if name == "Adam":
        optimizer._moment2_max_dict = None
