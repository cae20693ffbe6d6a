"""Checksums of parameters: equal if all bits are, on any device, and computed in place."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from .paddle_api.tensors import made_at

if TYPE_CHECKING:
    from collections.abc import Sequence

# The integer type as which an element's bits are read, by its size in bytes.
_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
# Elements that are summed at a time: Paddle first converts them to integers of 8 bytes.
_MOST_AT_ONCE = 1 << 22
# Each element is weighted by its place: a square modulo this prime. In a plain sum 0.3 and -0.3
# that both grow by 0.0001 would cancel out.
_PRIME, _STEP, _BEGIN = 65521, 40503, 12345
# The period of the weights: 2 MB of them.
_PERIOD = 1 << 18


def of_values(values: Sequence[Any]) -> list[int]:
    """Return the checksum of each of VALUES, tensors of a dynamic graph or of a program.

    Those of a dynamic graph are read on their device.
    """
    # numpy needs a tenth of the time on the host.
    if any(not hasattr(value, "flatten") or value.place.is_cpu_place() for value in values):
        return [of_array(as_array(value)) for value in values]
    import paddle

    try:
        with paddle.no_grad(), made_at(values[0].place):
            sums = paddle.stack([_of_tensor(value, paddle) for value in values]).numpy()
    except RuntimeError:
        # A device's plug-in may lack a kernel, and `FLAGS_use_stride_kernel=0` removes `view`. The
        # sums of a copy are the same.
        return [of_array(value.numpy()) for value in values]
    return [int(total) for total in sums]


def as_array(value: Any) -> Any:
    """Return the tensor VALUE, of a dynamic graph or of a program, as a numpy array."""
    import numpy as np

    return value.numpy() if hasattr(value, "numpy") else np.array(value)


def of_array(array: Any) -> int:
    """Return the sum of the bits of the numpy ARRAY, read as integers and weighted by place.

    Modulo 2**64.
    """
    import numpy as np

    bits = np.ascontiguousarray(array).reshape(-1).view(_INTEGERS[_item_size(array)])
    weights = _table()
    # In an array, as numpy warns when scalars overflow.
    total = np.zeros(1, dtype="int64")
    for start in range(0, len(bits), _PERIOD):
        part = bits[start : start + _PERIOD].astype("int64")
        total += np.dot(part, weights[: len(part)])
    return int(total[0])


@functools.cache
def _table() -> Any:
    """Return the weights of one period, cached: they cost more than the sum itself."""
    import numpy as np

    return _weights(np.arange(_PERIOD, dtype="int64"))


def _weights(places: Any) -> Any:
    """Return the weights of the elements at PLACES, an array or a tensor of int64."""
    numbers = (places % _PERIOD * _STEP + _BEGIN) % _PRIME
    return numbers * numbers % _PRIME + 1


def _item_size(array: Any) -> int:
    # Complex numbers are two of half the size.
    return int(array.dtype.itemsize) // (2 if array.dtype.kind == "c" else 1)


def _of_tensor(tensor: Any, paddle: Any) -> Any:
    bits = paddle.view(tensor.flatten(), _INTEGERS[tensor.element_size()])
    parts = []
    for start in range(0, bits.shape[0], _MOST_AT_ONCE):
        part = bits[start : start + _MOST_AT_ONCE].astype("int64")
        places = paddle.arange(start, start + part.shape[0], dtype="int64")
        parts.append((part * _weights(places)).sum())
    return parts[0] if len(parts) == 1 else paddle.stack(parts).sum()
