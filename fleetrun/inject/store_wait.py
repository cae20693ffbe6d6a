"""Waits until a TCP store listens before Paddle connects this rank to it.

A client of Paddle's store that connects too early sleeps for 3 s before it tries again
(`tcp_connect` in Paddle 2.6.2 and 3.3.1: "Retry to connect to ... while the server is not yet
listening"). Ranks start at the same time, so nearly every start of eight ranks lost these seconds.
This needs no strategy, so the module imports nothing that is slow.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from . import border
from .import_hooks import after_import, in_place_of

# After that, Paddle waits in its own way, and reports it.
_LONGEST_S = 60.0
# The kernel answers at once, unless a firewall drops what it is sent.
_CONNECT_S = 1.0
# A thousand ranks must not keep one host busy: each pause is a tenth of the time waited so far.
_SHORTEST_POLL_S, _SHARE, _LONGEST_POLL_S = 0.002, 0.1, 0.25


def arm() -> None:
    """Watch once Paddle is imported."""
    after_import("paddle", lambda _: watch())


def watch() -> None:
    """Wait for the job's store, and for those that `paddle.distributed.rpc` and scripts make."""
    from paddle.base import core

    store: Any = getattr(core, "TCPStore", None)
    if store is None or not hasattr(core, "create_or_get_global_tcp_store"):
        return
    is_created = False

    @in_place_of(core, "create_or_get_global_tcp_store")
    def create_or_get_global_tcp_store(create: Any) -> Any:
        nonlocal is_created
        if not is_created and os.environ.get("PADDLE_TRAINER_ID") != "0":
            is_created = True
            _wait_for_job()
        return create()

    @in_place_of(store, "__init__")
    def connect_once_it_listens(
        connect: Any, self: Any, hostname: str, port: int, is_master: Any, *args: Any, **named: Any
    ) -> None:
        if not is_master:
            wait(hostname, port)
        connect(self, hostname, port, is_master, *args, **named)


@border.watching("the wait for a store")
def wait(host: str, port: int) -> None:
    """Return once HOST:PORT no longer refuses connections."""
    began = time.monotonic()
    while _refuses(host, port) and (waited_s := time.monotonic() - began) < _LONGEST_S:
        time.sleep(min(max(_SHORTEST_POLL_S, waited_s * _SHARE), _LONGEST_POLL_S))


def _refuses(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        # Paddle meets the same error, and reports it.
        pass
    return False


@border.watching("the wait for the job's store")
def _wait_for_job() -> None:
    """Wait for the store at the address that Paddle reads from the same variables."""
    endpoints = os.environ.get("PADDLE_MASTER") or os.environ.get("PADDLE_TRAINER_ENDPOINTS", "")
    host, _, port = endpoints.partition(",")[0].rpartition(":")
    host, port = os.environ.get("MASTER_ADDR", host), os.environ.get("MASTER_PORT", port)
    if host and port:
        wait(host, int(port))
