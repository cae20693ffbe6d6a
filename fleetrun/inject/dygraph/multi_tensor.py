"""Fused optimizer kernels in dynamic graphs, which Paddle has for Momentum and Adam.

Paddle calls it `use_multi_tensor`: one kernel updates many parameters.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from .. import settings, updates
from ..evidence import EFFECTIVE, NO_EFFECT, plural
from ..import_hooks import after_import, in_place_of

if TYPE_CHECKING:
    from ..evidence import Evidence

FIELD = "fuse_all_optimizer_ops"
# The attribute of a fused optimizer with the names of the parameters in its tables.
_FUSED_NAMES = "_fleetrun_fused"
# By optimizer: its kernel for many parameters.
_KERNELS = {"Momentum": "merged_momentum_", "Adam": "merged_adam_"}
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
    """Enables `use_multi_tensor` where it is safe, and counts the calls of fused kernels."""

    def __init__(self, proof: Evidence) -> None:
        self._proof = proof
        # The reason of the last report.
        self._reported: str | None = None
        # In this update: the parameters of each call of a fused kernel.
        self._calls: list[int] = []
        self._why_not = ""

    def patch(self, name: str, module: Any) -> None:
        """Patch the optimizer NAME of MODULE to decide before each update whether it fuses."""

        @in_place_of(getattr(module, name), "_create_optimization_pass")
        def create(create_pass: Any, optimizer: Any, pairs: Any, *args: Any, **options: Any) -> Any:
            if sys.modules["paddle"].in_dynamic_mode():
                self._decide(optimizer, name, pairs)
            return create_pass(optimizer, pairs, *args, **options)

        @in_place_of(module._C_ops, _KERNELS[name])
        def update(kernel: Any, parameters: Any, *args: Any) -> Any:
            self._calls.append(len(parameters))
            return kernel(parameters, *args)

    def _decide(self, optimizer: Any, name: str, pairs: Any) -> None:
        if not settings.effective(FIELD):
            return
        known = optimizer.__dict__.get(_FUSED_NAMES)
        if optimizer._use_multi_tensor and known is None:
            # The script has enabled it itself.
            return
        entries = (
            [] if isinstance(pairs, dict) else [pair for pair in pairs if not pair[0].stop_gradient]
        )
        self._why_not = _obstacle(optimizer, name, entries, in_groups=isinstance(pairs, dict))
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
        calls, self._calls = self._calls, []
        # Of this update alone: the next one may be another optimizer's.
        why, self._why_not = "" if calls else self._why_not, ""
        why = why if calls or why else f"Paddle has no fused kernel for {type(source).__name__}"
        if self._reported in ("", why) or self._proof.graph != "dygraph":
            return
        if settings.script_wins(FIELD):
            return
        self._reported = why
        self._proof.field(
            FIELD,
            NO_EFFECT if why else EFFECTIVE,
            in_effect=not why,
            reason=why,
            evidence=f"{sum(calls)} parameters in {plural(len(calls), 'kernel call')}" * (not why),
        )


def _obstacle(optimizer: Any, name: str, entries: list[Any], *, in_groups: bool) -> str:
    """Return why Paddle's fused kernel of NAME cannot update ENTRIES; empty if it can."""
    if type(optimizer).__name__ != name:
        return f"Paddle fuses {name}, but not its subclass {type(optimizer).__name__}"
    if in_groups:
        return "its parameters are in groups, which Paddle's fused kernels mix up"
    if getattr(optimizer, "_amsgrad", False):
        return "Paddle's fused kernel does not support AMSGrad"
    for parameter, gradient in entries:
        if gradient.is_selected_rows():
            return f"the gradient of {parameter.name} is sparse"
        kind = str(parameter.dtype).rpartition(".")[2].lower()
        if kind not in {"float32", "fp32"}:
            return f"{parameter.name} is {kind}, and only float32 is fused"
    why = "" if entries else "there is nothing to update"
    if len({id(parameter) for parameter, _ in entries}) < len(entries):
        why = "its list has a parameter twice, which one kernel would update at once"
    return why


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
