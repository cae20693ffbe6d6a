"""Counts operators in half precision in dynamic graphs, where only the script can enable AMP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import border, updates
from ..evidence import EFFECTIVE, NO_EFFECT, device_kind
from ..import_hooks import after_import, watch_method

if TYPE_CHECKING:
    from types import ModuleType

    from ..evidence import Evidence

FIELD = "amp"
# Lets Paddle count the operators of each precision.
_FLAG = "FLAGS_low_precision_op_list"
# They only change the dtype of a tensor.
_CASTS = frozenset(("cast", "transfer_dtype"))


def install(proof: Evidence) -> None:
    """Count up to the first update."""
    counter = _PrecisionCounter(proof)
    after_import("paddle", counter.start)
    after_import("paddle.amp.grad_scaler", counter.watch_scalers)
    updates.on_update(counter.report, "the count of precisions", last=1)


class _PrecisionCounter:
    """Counts operators in half precision and finds the GradScaler in use."""

    def __init__(self, proof: Evidence) -> None:
        self._proof = proof
        self._is_counting = False
        # The GradScaler that has scaled a loss.
        self._scaler: Any = None

    def start(self, paddle: Any) -> None:
        """Let Paddle count, unless the user has already enabled that."""
        if not paddle.get_flags(_FLAG)[_FLAG]:
            paddle.set_flags({_FLAG: 1})
            self._is_counting = True

    def watch_scalers(self, module: ModuleType) -> None:
        """Keep the GradScaler that scales a loss."""
        keep = border.watching("the count of precisions")(self._keep_scaler)
        watch_method(module.AmpScaler, "scale", after=keep)

    def _keep_scaler(self, scaler: Any) -> None:
        # Paddle may disable it in the call.
        self._scaler = scaler if scaler.is_enable() else None

    def report(self, _source: Any, _number: int) -> None:
        """Report the counts after the first update."""
        import paddle

        if self._is_counting:
            paddle.set_flags({_FLAG: 0})
        if self._proof.graph != "dygraph":
            return
        low, total = _counted(paddle.base.core.get_low_precision_op_list())
        text = f"{low} of {total} operators in half precision up to the first update; "
        scaler = self._scaler
        text += (
            "no GradScaler"
            if scaler is None
            else f"a GradScaler at {float(scaler.state_dict()['scale'].ravel()[0]):g}"
        )
        if low:
            self._proof.field(FIELD, EFFECTIVE, in_effect=True, evidence=text)
            return
        reason = (
            "Paddle's auto_cast does nothing on the CPU"
            if device_kind() == "cpu"
            else "in dynamic graphs the script must call auto_cast"
        )
        self._proof.field(FIELD, NO_EFFECT, reason=reason, evidence=text)


def _counted(table: Any) -> tuple[int, int]:
    """Return how many operators ran in half precision, and how many there were."""
    low = total = 0
    for name, text in table.items():
        if name not in _CASTS:
            counts = [int(count) for count in str(text).split(",")]
            low += counts[0] + counts[1]
            total += sum(counts)
    return low, total
