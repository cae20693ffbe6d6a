"""`fleetrun doctor --allreduce`: checks and times allreduces of several sizes.

Each rank gets the name of the file to which rank 0 writes the measurements as JSON. Before Paddle
is imported, ranks 0 and 1 measure the throughput of a plain TCP connection between them.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

# Bytes of one allreduce, and its repetitions; reported times are per allreduce.
_SIZES = ((1 << 10, 50), (1 << 14, 50), (1 << 18, 20), (1 << 22, 10), (1 << 26, 3))
_LINK_BYTES, _CHUNK = 1 << 28, 1 << 20
_TIMEOUT_S = 30.0


def measure(rank: int, ranks: int, link: float | None) -> dict[str, Any]:
    """Return what this rank measured: backend, ranks, link (B/s or None), rows.

    A row is bytes, seconds of one allreduce, and whether every sum was right.
    """
    import paddle
    import paddle.distributed as dist

    dist.init_parallel_env()
    on_device = str(paddle.device.get_device()) != "cpu"
    rows = []
    for nbytes, times in _SIZES:
        numbers = paddle.arange(nbytes // 4, dtype="float32") % 97
        summed = numbers * (rank + 1)
        dist.all_reduce(summed)
        expected = numbers * (ranks * (ranks + 1) // 2)
        is_right = bool((summed == expected).all())
        sums = paddle.zeros_like(numbers)
        dist.barrier()
        if on_device:
            paddle.device.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            dist.all_reduce(sums)
        if on_device:
            paddle.device.synchronize()
        rows.append((nbytes, (time.perf_counter() - began) / times, is_right))
    return {
        "backend": os.environ["PADDLE_DISTRI_BACKEND"],
        "ranks": ranks,
        "link": link,
        "rows": rows,
    }


def link_speed(rank: int, endpoints: list[str]) -> float | None:
    """Return the bytes per second of a TCP connection from rank 0 to rank 1, None elsewhere."""
    if rank not in {0, 1} or not endpoints[1:]:
        return None
    host, _, port = endpoints[1].rpartition(":")
    if rank == 1:
        _receive(int(port))
        return None
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            connection = socket.create_connection((host, int(port)), timeout=_TIMEOUT_S)
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    with connection:
        part = memoryview(bytes(_CHUNK))
        began = time.perf_counter()
        for _ in range(_LINK_BYTES // _CHUNK):
            connection.sendall(part)
        connection.shutdown(socket.SHUT_WR)
        # The other side answers when it has everything.
        connection.recv(1)
        return _LINK_BYTES / (time.perf_counter() - began)


def _receive(port: int) -> None:
    with socket.create_server(("", port)) as server:
        server.settimeout(_TIMEOUT_S)
        connection, _ = server.accept()
        with connection:
            connection.settimeout(_TIMEOUT_S)
            buffer = bytearray(_CHUNK)
            while connection.recv_into(buffer):
                pass
            connection.sendall(b"1")
            # Rank 0 closes first, or the port would linger here.
            connection.recv(1)


def main(out: str) -> None:
    """Measure; rank 0 writes the file OUT."""
    rank = int(os.environ["PADDLE_TRAINER_ID"])
    endpoints = os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")
    measured = measure(rank, len(endpoints), link_speed(rank, endpoints))
    if rank == 0:
        Path(out).write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    # Python puts the folder of a script first on the path; our modules must not hide others there.
    sys.path[:] = [entry for entry in sys.path if entry != str(Path(__file__).parent)]
    main(sys.argv[1])
