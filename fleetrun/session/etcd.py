"""A client of etcd 3 over its JSON gateway, which is plain HTTP; a child makes each request."""

from __future__ import annotations

import base64
import http.client
import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote

from fleetrun.run.isolation import CallResult, IsolatedCall
from fleetrun.run.loop import Waiting


class KeyAnswer(NamedTuple):
    """The answer of etcd to a request made at ASKED_AT (monotonic), or why there is none."""

    asked_at: float
    value: Any = None
    trouble: str = ""


class JobKey:
    """The key of the job JOB_ID in the etcd of MEMBERS, asked from the loop of WAITING.

    Each answer is awaited for TIMEOUT_S seconds.
    """

    def __init__(
        self, members: Sequence[tuple[str, int]], job_id: str, timeout_s: float, waiting: Waiting
    ) -> None:
        self._members, self._timeout_s, self._waiting = members, timeout_s, waiting
        # A job's name may contain any characters, and no job's key may lie within another's.
        self._key = _coded(f"/fleetrun/{quote(job_id, safe='')}/coordinator")
        # Our address towards the member that has answered.
        self._local = ""
        # How to abandon each request that is under way.
        self._abandon: dict[object, Callable[[], object]] = {}

    def ask(self, done: Callable[[KeyAnswer], None], method: str, *values: object) -> None:
        """Call one of the methods below; DONE is called with the answer, from the loop."""
        # The time is taken before it is sent: a lease is renewed no earlier than this.
        asked_at, request = time.monotonic(), object()

        def answered(result: CallResult) -> None:
            del self._abandon[request]
            done(KeyAnswer(asked_at, result.value, result.trouble.removeprefix("OSError: ")))

        call = partial(getattr(self, method), *values)
        self._abandon[request] = IsolatedCall(call).watch(self._waiting, answered)

    def is_busy(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self._abandon)

    def close(self) -> None:
        """Stop; no callback follows."""
        for abandon in self._abandon.values():
            abandon()
        self._abandon.clear()

    # In the child: each raises OSError if no member has answered.

    def look(self) -> tuple[str, int, str]:
        """Return the value of the key and its revision (0: none), and our address towards etcd."""
        (entry,) = self._post("/v3/kv/range", {"key": self._key}).get("kvs") or [{}]
        text = base64.b64decode(entry.get("value", "")).decode(errors="replace")
        return text, int(entry.get("mod_revision", 0)), self._local

    def campaign(self, value: str, ttl_s: int, revision: int) -> tuple[int, int] | None:
        """Put VALUE if the key still has this REVISION; return its lease and new revision."""
        lease = int(self._post("/v3/lease/grant", {"TTL": ttl_s})["ID"])
        request = {
            "compare": [{"key": self._key, "target": "MOD", "mod_revision": revision}],
            "success": [
                {"request_put": {"key": self._key, "value": _coded(value), "lease": lease}}
            ],
        }
        answer = self._post("/v3/kv/txn", request)
        if answer.get("succeeded"):
            return lease, int(answer["header"]["revision"])
        self.revoke(lease)
        return None

    def renew(self, lease: int) -> bool:
        """Renew LEASE; False if it has ended already."""
        answer = self._post("/v3/lease/keepalive", {"ID": lease})
        return int(answer.get("result", {}).get("TTL", 0)) > 0

    def revoke(self, lease: int) -> None:
        """End LEASE and the key that depends on it."""
        self._post("/v3/lease/revoke", {"ID": lease})

    def _post(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        troubles: list[str] = []
        for host, port in self._members:
            try:
                return self._post_to(host, port, path, json.dumps(request).encode())
            except OSError as error:
                why = (error.strerror or str(error)).lower()
            except (http.client.HTTPException, ValueError) as error:
                why = str(error) or "what listens there is not etcd"
            troubles.append(f"{host}:{port}: {why}")
        raise OSError("; ".join(troubles))

    def _post_to(self, host: str, port: int, path: str, body: bytes) -> dict[str, Any]:
        with closing(http.client.HTTPConnection(host, port, timeout=self._timeout_s)) as link:
            link.request("POST", path, body, {"Content-Type": "application/json"})
            self._local = str(link.sock.getsockname()[0])
            answer = link.getresponse()
            text = answer.read(1 << 20)
        if answer.status == http.client.NOT_FOUND and path.startswith("/v3/lease"):
            # This is how it reports that a lease has ended.
            return {}
        document = json.loads(text) if answer.status == http.client.OK else None
        if not isinstance(document, dict):
            shown = text[:200].decode(errors="replace").strip()
            raise http.client.HTTPException(f"it answers {answer.status} to {path} ({shown})")
        return document


# The gateway writes bytes in base64, 64 bits as text, and leaves zeros out.
def _coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
