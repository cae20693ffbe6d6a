"""Checksums of parameters: equal where all bits are, on any device, and computed where they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

# By the bytes of an element, the integers that its bits are read as.
_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
# Elements that are summed at a time: Paddle makes integers of 8 bytes of them first.
_MOST_AT_ONCE = 1 << 24


def of_tensors(tensors: Sequence[Any]) -> list[int]:
    """Return the checksum of each of TENSORS (eager): as `of_array`, but on their device."""
    import paddle

    if not tensors or all(each.place.is_cpu_place() for each in tensors):
        # numpy needs a tenth of the time for each.
        return [of_array(each.numpy()) for each in tensors]
    with paddle.no_grad():
        sums = paddle.stack([_of_tensor(each, paddle) for each in tensors]).numpy()
    return [int(each) for each in sums]


def of_array(array: Any) -> int:
    """Return the sum of the bits of the numpy ARRAY, read as integers, modulo 2**64."""
    import numpy as np

    bits = np.ascontiguousarray(array).reshape(-1).view(_INTEGERS[_item_size(array)])
    return int(bits.sum(dtype="int64"))


def _item_size(array: Any) -> int:
    # Complex numbers are two of half the size.
    return int(array.dtype.itemsize) // (2 if array.dtype.kind == "c" else 1)


def _of_tensor(tensor: Any, paddle: Any) -> Any:
    bits = paddle.view(tensor.flatten(), _INTEGERS[tensor.element_size()])
    parts = [
        paddle.sum(bits[start : start + _MOST_AT_ONCE], dtype="int64")
        for start in range(0, bits.shape[0], _MOST_AT_ONCE)
    ]
    return parts[0] if len(parts) == 1 else paddle.stack(parts).sum()
