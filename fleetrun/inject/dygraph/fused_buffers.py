"""Refuses to send Paddle's buffers of gradients when gradients are no longer in them.

Paddle links the gradients of parameters to a buffer once. `clear_grad` breaks the link: the next
backward puts its gradients elsewhere, and the buffer sends zeros (sharding optimizer V2, from the
second update on: PaddlePaddle/Paddle#66472). Only gradients in `main_grad` stay. Seen with 2.6.2
and 3.3.1, on every kind of device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..import_hooks import after_import, watch_method

if TYPE_CHECKING:
    from types import ModuleType

# The attribute of a buffer: the address of its part for each gradient, by the parameter's id.
_PARTS = "_fleetrun_parts"


def install() -> None:
    """Look at each buffer before it is sent."""
    after_import("paddle.distributed.fleet.utils.tensor_fusion_helper", _patch)


def _patch(module: ModuleType) -> None:
    def remember(buffer: Any) -> None:
        is_linked = not (buffer.use_main_grad or getattr(buffer, "_release_grads", False))
        linked = buffer._params if is_linked else ()
        setattr(buffer, _PARTS, {id(param): param.grad.data_ptr() for param in linked})

    watch_method(module.FusedCommBuffer, "__init__", after=remember)
    watch_method(module.FusedCommBuffer, "_comm_grads", before=_check)


def _check(buffer: Any) -> None:
    """Raise RuntimeError if the gradient of a parameter is not in its part of BUFFER."""
    parts = getattr(buffer, _PARTS)
    for parameter in buffer._params:
        gradient = parameter.grad
        if gradient is not None and parts.get(id(parameter), 0) not in (0, gradient.data_ptr()):
            raise RuntimeError(
                f"fleetrun: the gradient of {parameter.name} is not in the buffer that Paddle"
                " sends, since clear_grad has taken it out: Paddle would train with zeros. Keep"
                " gradients in main_grad (mix_precision_utils.MixPrecisionLayer and"
                " MixPrecisionOptimizer), or use hybrid_configs without split_param and overlap."
            )
