"""Checksums of parameters, computed where they are: equal on ranks whose bits are equal."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

from .paddle_api.tensors import made_at

if TYPE_CHECKING:
    from collections.abc import Sequence

# The integer type as which an element's bits are read, by its size in bytes.
_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
# Elements that are summed at a time: Paddle first converts them to integers of 8 bytes.
_MOST_AT_ONCE = 1 << 22
# On a device, each element is weighted by its place: a square modulo this prime. In a plain sum 0.3
# and -0.3 that both grow by 0.0001 would cancel out.
_PRIME, _STEP, _BEGIN = 65521, 40503, 12345
_PERIOD = 1 << 18


def of_values(values: Sequence[Any]) -> list[int]:
    """Return the checksum of each of VALUES, tensors of a dynamic graph or of a program.

    All ranks with the same kind of device compute the same.
    """
    are_on_device = all(
        hasattr(value, "flatten") and not value.place.is_cpu_place() for value in values
    )
    if values and are_on_device:
        import paddle

        try:
            with paddle.no_grad(), made_at(values[0].place):
                sums = paddle.stack([_of_tensor(value, paddle) for value in values]).numpy()
            return [int(total) for total in sums]
        except RuntimeError:
            # A device's plug-in may lack a kernel, and `FLAGS_use_stride_kernel=0` removes `view`.
            pass
    return [of_array(as_array(value)) for value in values]


def as_array(value: Any) -> Any:
    """Return the tensor VALUE, of a dynamic graph or of a program, as a numpy array."""
    import numpy as np

    return value.numpy() if hasattr(value, "numpy") else np.array(value)


def of_array(array: Any) -> int:
    """Return the checksum of the bits of the numpy ARRAY."""
    return zlib.crc32(array.tobytes())


def _of_tensor(tensor: Any, paddle: Any) -> Any:
    """Return the sum of the bits of TENSOR, read as integers and weighted by place, in int64."""
    bits = paddle.view(tensor.flatten(), _INTEGERS[tensor.element_size()])
    parts = []
    for start in range(0, bits.shape[0], _MOST_AT_ONCE):
        part = bits[start : start + _MOST_AT_ONCE].astype("int64")
        places = paddle.arange(start, start + part.shape[0], dtype="int64")
        numbers = (places % _PERIOD * _STEP + _BEGIN) % _PRIME
        parts.append((part * (numbers * numbers % _PRIME + 1)).sum())
    return parts[0] if len(parts) == 1 else paddle.stack(parts).sum()
