"""Refuses models with tensors that ranks can neither send nor average, before anything is sent.

Over gloo Paddle ends the process without a word where a model has a complex tensor; integers that
are trained fail in the first backward, on the ranks that come to it.
"""

from __future__ import annotations

from typing import Any


def check(model: Any) -> None:
    """Raise RuntimeError if the layers MODEL have complex tensors, or integers that are trained.

    What is marked `no_sync` is each rank's own, and may have any type.
    """
    import paddle

    trained = dict(model.named_parameters())
    # Of the class: a model may have its own `state_dict`, of what is saved. Paddle sends the same.
    for name, tensor in paddle.nn.Layer.state_dict(model).items():
        dtype = str(tensor.dtype).rpartition(".")[2].lower()
        if getattr(tensor, "no_sync", False):
            continue
        what = "parameter" if name in trained else "buffer"
        text = f"fleetrun: DataParallel cannot train this model: the {what} {name} is {dtype}"
        if dtype.startswith("complex"):
            hint = "keep its real and its imaginary part, and put them together in forward"
            if what == "buffer":
                hint += "; or register it with persistable=False"
            raise RuntimeError(f"{text}: {hint}.")
        if what == "parameter" and "int" in dtype and not tensor.stop_gradient:
            message = f"{text} and trained: set its stop_gradient, or make it a buffer."
            raise RuntimeError(message)
