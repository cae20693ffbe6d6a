"""A client of etcd 3 over its JSON gateway; each request runs in a child process.

The gateway is plain HTTP, so the standard library is enough; each request tries every member until
one answers.
"""

from __future__ import annotations

import base64
import http.client
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote

from fleetrun.run import isolation
from fleetrun.run.isolation import CallResult
from fleetrun.run.loop import Waiting, nothing
from fleetrun.session.connecting import reason

# In bytes.
_LONGEST = 1 << 20


class EtcdError(Exception):
    """No member of etcd has answered; the message says why."""


class StoreAnswer(NamedTuple):
    """The answer of etcd to a request made at ASKED_AT (monotonic), or why there is none."""

    asked_at: float
    value: Any = None
    trouble: str = ""


class Client:
    """Asks the etcd of MEMBERS about the job JOB_ID; each method raises EtcdError if it cannot.

    Each answer is awaited for TIMEOUT_S seconds.
    """

    def __init__(self, members: Sequence[tuple[str, int]], job_id: str, timeout_s: float) -> None:
        self._members, self._timeout_s = members, timeout_s
        # Our address towards the member that has answered.
        self._local = ""
        # A job's name may contain any characters, and no job's key may lie within another's.
        self._key = _coded(f"/fleetrun/{quote(job_id, safe='')}/coordinator")

    def look(self) -> tuple[str, int, str]:
        """Return the value of the key and its revision (0: none), and our address towards etcd."""
        entries = self._ask("/v3/kv/range", {"key": self._key}).get("kvs", [])
        entry = entries[0] if entries else {}
        text = base64.b64decode(entry.get("value", "")).decode(errors="replace")
        return text, _number(entry, "mod_revision"), self._local

    def campaign(self, value: str, ttl_s: int, revision: int) -> int | None:
        """Put VALUE if the key still has this REVISION; return the lease that it has, or None."""
        lease = self._grant(ttl_s)
        if self._put({"target": "MOD", "mod_revision": revision}, value, lease):
            return lease
        self.revoke(lease)
        return None

    def renew(self, lease: int) -> bool:
        """Renew LEASE; False if it has ended already."""
        answer = self._ask("/v3/lease/keepalive", {"ID": lease})
        return _number(answer.get("result", {}), "TTL") > 0

    def revoke(self, lease: int) -> None:
        """End LEASE and the key that depends on it."""
        self._ask("/v3/lease/revoke", {"ID": lease})

    def bury(self, lease: int, value: str, ttl_s: int) -> bool:
        """Replace the value of the key that depends on LEASE, for TTL_S seconds."""
        is_done = self._put({"target": "LEASE", "lease": lease}, value, self._grant(ttl_s))
        self.revoke(lease)
        return is_done

    def _grant(self, ttl_s: int) -> int:
        return _number(self._ask("/v3/lease/grant", {"TTL": ttl_s}), "ID")

    def _put(self, compare: dict[str, Any], value: str, lease: int) -> bool:
        put = {"key": self._key, "value": _coded(value), "lease": lease}
        request = {
            "compare": [{"key": self._key, **compare}],
            "success": [{"request_put": put}],
        }
        return bool(self._ask("/v3/kv/txn", request).get("succeeded"))

    def _ask(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        troubles: list[str] = []
        for host, port in self._members:
            try:
                return self._post(host, port, path, json.dumps(request).encode())
            except (OSError, http.client.HTTPException, ValueError) as error:
                why = reason(error) if isinstance(error, ConnectionError) else str(error)
            troubles.append(f"{host}:{port}: {why or 'what listens there is not etcd'}")
        raise EtcdError("; ".join(troubles))

    def _post(self, host: str, port: int, path: str, body: bytes) -> dict[str, Any]:
        with closing(http.client.HTTPConnection(host, port, timeout=self._timeout_s)) as link:
            link.request("POST", path, body, {"Content-Type": "application/json"})
            self._local = str(link.sock.getsockname()[0])
            answer = link.getresponse()
            text = answer.read(_LONGEST)
        if answer.status == http.client.NOT_FOUND and path.startswith("/v3/lease"):
            # This is how it reports that a lease has ended.
            return {}
        if answer.status != http.client.OK:
            shown = text[:200].decode(errors="replace").strip()
            raise http.client.HTTPException(f"it answers {answer.status} to {path} ({shown})")
        document = json.loads(text)
        if not isinstance(document, dict):
            raise http.client.HTTPException
        return document


def _coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _number(entry: dict[str, Any], key: str) -> int:
    # The gateway writes 64 bits as text, and leaves zeros out.
    return int(entry.get(key, 0))


def _answer(client: Client, method: str, values: tuple[object, ...]) -> tuple[Any, str]:
    """Return the result of CLIENT's METHOD, or why there is none."""
    try:
        return getattr(client, method)(*values), ""
    except EtcdError as error:
        return None, str(error)


class JobStore:
    """Asks CLIENT from the loop of WAITING, one request at a time."""

    def __init__(self, client: Client, waiting: Waiting) -> None:
        self._client, self._waiting = client, waiting
        self._requests: deque[tuple[str, tuple[object, ...], Callable[[StoreAnswer], None]]] = (
            deque()
        )
        self._abandon: Callable[[], object] = nothing

    @property
    def is_busy(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self._requests)

    def ask(self, done: Callable[[StoreAnswer], None], method: str, *values: object) -> None:
        """Call METHOD of the client; DONE is called with the answer, from the loop."""
        self._requests.append((method, values, done))
        if len(self._requests) == 1:
            self._begin()

    def _begin(self) -> None:
        method, values, _ = self._requests[0]
        call = partial(_answer, self._client, method, values)
        # The time is taken before it is sent: a lease is renewed no earlier than this.
        done = partial(self._answered, time.monotonic())
        self._abandon = isolation.ask(call, self._waiting, done)

    def _answered(self, asked_at: float, result: CallResult) -> None:
        self._abandon = nothing
        answered: Any = result.value or (None, result.trouble)
        _, _, done = self._requests.popleft()
        if self._requests:
            self._begin()
        done(StoreAnswer(asked_at, *answered))

    def close(self) -> None:
        """Stop; no callback follows."""
        self._requests.clear()
        self._abandon()
        self._abandon = nothing
