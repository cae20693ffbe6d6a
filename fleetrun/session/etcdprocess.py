"""The process that asks etcd for a launcher: what it reads is an order, what it writes an answer.

Orders and answers are lines of JSON. It keeps nothing and renews nothing by itself, so a launcher
that is stopped loses its lease.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

from fleetrun.run import itself

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fleetrun.session.etcd import Client


def line(
    endpoints: Sequence[tuple[str, int]],
    name: str,
    *,
    launcher: int,
    timeout_s: float,
    is_secure: bool,
) -> list[str]:
    """Return the command that asks etcd at ENDPOINTS for job NAME while LAUNCHER is alive."""
    return itself.command(
        "from fleetrun.session import etcdprocess; "
        f"etcdprocess.main({tuple(map(tuple, endpoints))!r}, {name!r}, {launcher}, {timeout_s}, "
        f"is_secure={is_secure})"
    )


def main(
    endpoints: Sequence[tuple[str, int]],
    name: str,
    launcher: int,
    timeout_s: float,
    *,
    is_secure: bool,
) -> None:
    """Answer until the launcher ends."""
    from fleetrun.run import libc  # this process only

    libc.prctl(libc.PR_SET_PDEATHSIG, 9)
    libc.prctl(libc.PR_SET_NAME, b"fleetrun-etcd")
    if os.getppid() != launcher:
        return
    from fleetrun.session.etcd import Client

    client = Client(endpoints, name, timeout_s=timeout_s, is_secure=is_secure)
    for order in sys.stdin:
        what, *values = json.loads(order)
        sys.stdout.write(json.dumps(answer(client, what, values)) + "\n")
        sys.stdout.flush()


def answer(client: Client, what: str, values: list[object]) -> dict[str, object]:
    """Do what an order says; `trouble` says why it could not be done, `refused` that it cannot."""
    from fleetrun.session.etcd import RefusedError, UnreachableError

    try:
        return {"value": _do(client, what, values)}
    except UnreachableError as error:
        return {"trouble": str(error)}
    except RefusedError as error:
        return {"refused": str(error)}


def _do(client: Client, what: str, values: list[object]) -> object:
    match what, values:
        case "look", []:
            return client.look()
        case "campaign", [str(value), int(ttl_s), int(record_revision)]:
            return client.campaign(value, ttl_s, record_revision)
        case "renew", [int(lease)]:
            return client.renew(lease)
        case "keep", [str(record), int(revision), int(lease)]:
            return client.keep(record, revision, lease)
        case "leave", [int(revision), int(lease), bool(is_final)]:
            return client.leave(revision, lease, is_final=is_final)
    raise AssertionError(what)
