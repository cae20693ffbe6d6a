"""Waits until a TCP store listens before Paddle connects this rank to it, and makes it quick.

A client of Paddle's store that connects too early sleeps for 3 s before it tries again
(`tcp_connect` in Paddle 2.6.2 and 3.3.1: "Retry to connect to ... while the server is not yet
listening"). Ranks start at the same time, so nearly every start of eight ranks lost these seconds.
Then each request took 44 ms, and takes 0.2 ms with TCP_NODELAY: Paddle writes it in pieces, of
which the next one waited until the peer's kernel acknowledged the last.
This needs no strategy, so the module imports nothing that is slow.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import Any

from . import border
from .import_hooks import in_place_of

# After that, Paddle waits in its own way, and reports it.
_LONGEST_S = 60.0
# The kernel answers at once, unless a firewall drops what it is sent.
_CONNECT_S = 1.0
# A thousand ranks must not keep one host busy: each pause is a tenth of the time waited so far.
_SHORTEST_POLL_S, _SHARE, _LONGEST_POLL_S = 0.002, 0.1, 0.25


def watch(_paddle: Any) -> None:
    """Wait for the job's store, and for those that `paddle.distributed.rpc` and scripts make."""
    from paddle.base import core

    store: Any = getattr(core, "TCPStore", None)
    if store is None or not hasattr(core, "create_or_get_global_tcp_store"):
        return
    is_created = False

    @in_place_of(core, "create_or_get_global_tcp_store")
    def create_or_get_global_tcp_store(create: Any) -> Any:
        nonlocal is_created
        if is_created:
            return create()
        is_created = True
        if os.environ.get("PADDLE_TRAINER_ID") != "0":
            _wait_for_job()
        store = create()
        _send_at_once()
        return store

    @in_place_of(store, "__init__")
    def connect_once_it_listens(
        connect: Any, self: Any, hostname: str, port: int, is_master: Any, *args: Any, **named: Any
    ) -> None:
        if not is_master:
            wait(hostname, port)
        connect(self, hostname, port, is_master, *args, **named)
        _send_at_once(port)


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
    host, port = _job_end()
    if host and port:
        wait(host, port)


def _job_end() -> tuple[str, int]:
    """Return the host and port of the job's store, or ("", 0)."""
    endpoints = os.environ.get("PADDLE_MASTER") or os.environ.get("PADDLE_TRAINER_ENDPOINTS", "")
    host, _, port = endpoints.partition(",")[0].rpartition(":")
    return os.environ.get("MASTER_ADDR", host), int(os.environ.get("MASTER_PORT", port) or 0)


@border.watching("the options of a store's connections")
def _send_at_once(port: int | None = None) -> None:
    """Set TCP_NODELAY on this process's connections to a store, and on the store's own.

    PORT is the store's (None: the job's). Later connections have what is set where it listens.
    """
    port = _job_end()[1] if port is None else port
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(fd))) as end:
                if end.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                is_own = end.getsockname()[1] == port
                if is_own or end.getpeername()[1] == port:
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
