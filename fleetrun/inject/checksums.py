"""Checksums of parameters: equal where all bits are, on any device, and computed where they are."""

from __future__ import annotations

import functools
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# By the bytes of an element, the integers that its bits are read as.
_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
# Elements that are summed at a time: Paddle makes integers of 8 bytes of them first.
_MOST_AT_ONCE = 1 << 22
# Each element counts as often as a number that follows from its place, a square modulo this prime.
# In a plain sum 0.3 and -0.3 that both grow by 0.0001 cancel out.
_PRIME, _STEP, _BEGIN = 65521, 40503, 12345
# The places after which they begin again: 2 MB of them.
_PERIOD = 1 << 18


def are_on_host(tensors: Sequence[Any]) -> bool:
    """Whether all of TENSORS (eager) are in the memory of the host."""
    return all(each.place.is_cpu_place() for each in tensors)


def of_all(arrays: Iterable[Any]) -> int:
    """Return one checksum (CRC-32) of the bits of all numpy ARRAYS, which are taken one by one.

    It costs a tenth of a checksum of each where these are small.
    """
    import numpy as np

    total = 0
    for array in arrays:
        total = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view("uint8").data, total)
    return total


def of_tensors(tensors: Sequence[Any]) -> list[int]:
    """Return the checksum of each of TENSORS (eager): as `of_array`, but on their device."""
    import paddle

    if are_on_host(tensors):
        # numpy needs a tenth of the time for each.
        return [of_array(each.numpy()) for each in tensors]
    try:
        with paddle.no_grad():
            sums = paddle.stack([_of_tensor(each, paddle) for each in tensors]).numpy()
    except RuntimeError:
        # A plug-in for a device may lack a kernel, and `FLAGS_use_stride_kernel=0`, which some
        # set, takes `view` away. The sums of a copy are the same.
        return [of_array(each.numpy()) for each in tensors]
    return [int(each) for each in sums]


def of_array(array: Any) -> int:
    """Return the sum of the bits of the numpy ARRAY, read as integers and weighted by place.

    It is modulo 2**64.
    """
    import numpy as np

    bits = np.ascontiguousarray(array).reshape(-1).view(_INTEGERS[_item_size(array)])
    weights = _table()
    # In an array, as numpy warns of numbers that overflow.
    total = np.zeros(1, dtype="int64")
    for start in range(0, len(bits), _PERIOD):
        part = bits[start : start + _PERIOD].astype("int64")
        total += np.dot(part, weights[: len(part)])
    return int(total[0])


@functools.cache
def _table() -> Any:
    """Return the weights of a period, which would cost more than the sum itself."""
    import numpy as np

    return _weights(np.arange(_PERIOD, dtype="int64"))


def _weights(places: Any) -> Any:
    """Return how often the elements at PLACES count, an array or a tensor of int64."""
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
