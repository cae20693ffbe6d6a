"""Refuses models with tensors that ranks cannot send or average, before anything is sent.

Over gloo Paddle silently ends the process if a model has a complex tensor; trained integers fail in
the first backward, on the ranks that reach it.
"""

from __future__ import annotations

from typing import Any


def check(model: Any) -> None:
    """Raise RuntimeError if MODEL has complex tensors or trained integers.

    Tensors marked `no_sync` belong to one rank, and may have any type.
    """
    import paddle

    trained = dict(model.named_parameters())
    # The class's method, as Paddle sends this: a model's own `state_dict` may differ.
    for name, tensor in paddle.nn.Layer.state_dict(model).items():
        dtype = str(tensor.dtype).rpartition(".")[2].lower()
        if getattr(tensor, "no_sync", False):
            continue
        kind = "parameter" if name in trained else "buffer"
        text = f"fleetrun: DataParallel cannot train this model: the {kind} {name} is {dtype}"
        if dtype.startswith("complex"):
            hint = "keep its real and imaginary parts, and combine them in forward"
            if kind == "buffer":
                hint += "; or register it with persistable=False"
            raise RuntimeError(f"{text}: {hint}.")
        if kind == "parameter" and "int" in dtype and not tensor.stop_gradient:
            raise RuntimeError(f"{text} and trained: set its stop_gradient, or make it a buffer.")
