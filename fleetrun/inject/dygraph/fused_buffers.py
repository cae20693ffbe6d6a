"""Keeps gradients in the buffers from which Paddle sends them.

Paddle links the gradients of parameters to a buffer once. `clear_grad` breaks the link: the next
backward puts its gradients elsewhere, and the buffer sends zeros (sharding optimizer V2, from the
second update on: PaddlePaddle/Paddle#66472), or Paddle raises (overlap with backward). Only
gradients in `main_grad` stay. Seen with 2.6.2 and 3.3.1, on every kind of device.

Between gradients a buffer has gaps, over which Paddle clips, too: after an update that GradScaler
has skipped for a NaN they would have NaNs for ever.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ..evidence import plural
from ..import_hooks import after_import, watch_method

if TYPE_CHECKING:
    from types import ModuleType

    from ..evidence import Evidence

# The attributes of a buffer: its part for each gradient, and whether it has one for the next send.
_VIEWS, _IS_BEGUN = "_fleetrun_views", "_fleetrun_is_begun"
_PUT_BACK = (
    "clear_grad takes gradients out of Paddle's communication buffers, which then send zeros (as"
    " without fleetrun): fleetrun puts them back"
)
# How many gradients have arrived in buffers, and how many had when each buffer was sent.
_arrived = 0
_sent: list[int] = []
# Enough for the first update, which is reported.
_MOST_COUNTED = 4096


def described() -> str:
    """Describe how many buffers Paddle has sent during the backward, if any."""
    early = sum(arrived_before < _arrived for arrived_before in _sent)
    sent = f"{early} of {plural(len(_sent), 'buffer')}"
    return f"; {sent} went out before the last gradient was ready" if _sent and _arrived else ""


def install(proof: Evidence) -> None:
    """Copy gradients that were computed outside their buffer into it before it is sent."""
    after_import(
        "paddle.distributed.fleet.utils.tensor_fusion_helper", functools.partial(_patch, proof)
    )


def _patch(proof: Evidence, module: ModuleType) -> None:
    kind: Any = module.FusedCommBuffer
    add = kind.add_grad

    def linked(buffer: Any) -> None:
        is_linked = not (buffer.use_main_grad or getattr(buffer, "_release_grads", False))
        views = {id(param): param.grad for param in buffer._params} if is_linked else {}
        setattr(buffer, _VIEWS, views)

    @functools.wraps(add)
    def add_grad(buffer: Any, param: Any, *args: Any, **options: Any) -> Any:
        global _arrived  # of one training
        put_back(buffer, param)
        _arrived += 1
        return add(buffer, param, *args, **options)

    def send(buffer: Any) -> None:
        for parameter in buffer._params:
            put_back(buffer, parameter)
        if len(_sent) < _MOST_COUNTED:
            _sent.append(_arrived)
        setattr(buffer, _IS_BEGUN, False)

    def put_back(buffer: Any, parameter: Any) -> None:
        if _put_back(buffer, parameter):
            proof.note(_PUT_BACK)

    kind.add_grad = add_grad
    watch_method(kind, "__init__", after=linked)
    watch_method(kind, "_comm_grads", before=send)


def _put_back(buffer: Any, parameter: Any) -> bool:
    """Copy the gradient of PARAMETER to its part of BUFFER; return whether it was elsewhere."""
    import paddle

    views = getattr(buffer, _VIEWS)
    view, gradient = views.get(id(parameter)), parameter.grad
    if view is None or _is_in(view, gradient):
        return False
    with paddle.no_grad():
        if not getattr(buffer, _IS_BEGUN, False):
            setattr(buffer, _IS_BEGUN, True)
            if not any(_is_in(views[id(param)], param.grad) for param in buffer._params):
                buffer.grad_storage.zero_()
        if gradient is None:
            view.zero_()
        else:
            view.copy_(gradient, False)
        parameter._copy_gradient_from(view)
    return gradient is not None


def _is_in(view: Any, gradient: Any) -> bool:
    """Whether GRADIENT is in its part VIEW of a buffer."""
    return gradient is not None and bool(gradient.data_ptr() == view.data_ptr())
