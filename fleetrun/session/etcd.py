"""A client of etcd 3 over its JSON gateway; each request runs in a child process.

The gateway is plain HTTP, so the standard library is enough; each request tries every member until
one answers, beginning with the one that answered last. Over TLS the authority, and a certificate
of our own, are named by the variables that etcdctl reads.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote

from fleetrun.run.isolation import CallResult, IsolatedCall
from fleetrun.run.loop import Waiting, nothing
from fleetrun.session.connecting import endpoint
from fleetrun.session.wire import reason

_AUTHORITY, _CERTIFICATE, _KEY = "ETCDCTL_CACERT", "ETCDCTL_CERT", "ETCDCTL_KEY"
# In bytes.
_LONGEST = 1 << 20


class EtcdError(Exception):
    """No member of etcd has answered, or one rejects the request; the message says why."""


class StoreAddress(NamedTuple):
    """Where an etcd keeps job NAME: its members, asked in this order, over TLS if `is_secure`.

    Each answer is awaited for `timeout_s` seconds.
    """

    endpoints: tuple[tuple[str, int], ...]
    name: str
    timeout_s: float
    is_secure: bool = False


class StoreAnswer(NamedTuple):
    """The answer of etcd to a request made at ASKED_AT (monotonic), or why there is none."""

    asked_at: float
    value: Any = None
    trouble: str = ""


class Client:
    """Asks the etcd at ADDRESS about a job; each method raises EtcdError if it cannot."""

    def __init__(self, address: StoreAddress) -> None:
        # Another member comes first after one that does not answer.
        self.endpoints = list(address.endpoints)
        self._address = address
        # Our address towards the member that has answered.
        self._local = ""
        # A job's name may contain any characters, and no job's key may lie within another's.
        self._name = _coded(f"/fleetrun/{quote(address.name, safe='')}/coordinator")

    # Requests -----------------------------------------------------------------------------------

    def look(self) -> tuple[str, int, str]:
        """Return the value of the key and its revision (0: none), and our address towards etcd."""
        entries = self._ask("/v3/kv/range", {"key": self._name}).get("kvs", [])
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
        put = {"key": self._name, "value": _coded(value), "lease": lease}
        request = {
            "compare": [{"key": self._name, **compare}],
            "success": [{"request_put": put}],
        }
        return bool(self._ask("/v3/kv/txn", request).get("succeeded"))

    # Transport ----------------------------------------------------------------------------------

    def _ask(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        troubles: list[str] = []
        for member in list(self.endpoints):
            try:
                return self._post(member, path, json.dumps(request).encode())
            except (OSError, http.client.HTTPException, ValueError) as error:
                troubles.append(f"{endpoint(*member)}: {self._reason(error)}")
            self.endpoints.append(self.endpoints.pop(0))
        raise EtcdError("; ".join(troubles))

    def _post(self, member: tuple[str, int], path: str, body: bytes) -> dict[str, Any]:
        with closing(self._connection(*member)) as link:
            link.request("POST", path, body, {"Content-Type": "application/json"})
            self._local = str(link.sock.getsockname()[0])
            answer = link.getresponse()
            text = answer.read(_LONGEST)
        if answer.status == http.client.NOT_FOUND and path.startswith("/v3/lease"):
            # This is how it reports that a lease has ended.
            return {}
        if answer.status != http.client.OK:
            shown = text[:200].decode(errors="replace").strip()
            message = f"it answers {answer.status} to {path} ({shown})"
            if answer.status in {http.client.UNAUTHORIZED, http.client.BAD_REQUEST}:
                raise EtcdError(message)
            raise http.client.HTTPException(message)
        document = json.loads(text)
        if not isinstance(document, dict):
            raise http.client.BadStatusLine("no JSON object")
        return document

    def _connection(self, host: str, port: int) -> http.client.HTTPConnection:
        """Return a connection to a member; raise EtcdError if a TLS file cannot be read."""
        timeout_s = self._address.timeout_s
        if not self._address.is_secure:
            return http.client.HTTPConnection(host, port, timeout=timeout_s)
        import ssl  # takes 20 ms

        authority, certificate, key = (
            os.environ.get(name) or None for name in (_AUTHORITY, _CERTIFICATE, _KEY)
        )
        setting = f"{_AUTHORITY}={authority}"
        try:
            context = ssl.create_default_context(cafile=authority)
            if certificate is not None:
                setting = f"{_CERTIFICATE}={certificate} with {_KEY}={key or ''}"
                context.load_cert_chain(certificate, key)
        except OSError as error:
            raise EtcdError(f"{setting} cannot be used ({reason(error)})") from None
        return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)

    def _reason(self, error: Exception) -> str:
        doubt = getattr(error, "verify_message", "")
        if doubt:
            return f"its certificate is not trusted ({doubt}); set {_AUTHORITY} to its authority"
        if isinstance(error, json.JSONDecodeError | http.client.BadStatusLine) and not isinstance(
            error, http.client.RemoteDisconnected
        ):
            return "what listens there is not etcd"
        # ssl.SSLError, which most launches need not load.
        if isinstance(error, ConnectionResetError) or type(error).__module__ == "ssl":
            # As a member does if only one side uses TLS.
            hint = f"if it requires a client certificate, set {_CERTIFICATE} and {_KEY}"
            if not self._address.is_secure:
                hint = "for etcd with TLS give etcds://HOST:PORT"
            return f"it closes the connection without an answer; {hint}"
        return reason(error) if isinstance(error, OSError) else str(error)


def _coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _number(entry: dict[str, Any], key: str) -> int:
    # The gateway writes 64 bits as text, and leaves zeros out.
    return int(entry.get(key, 0))


# From the loop ----------------------------------------------------------------------------------


def answer(client: Client, method: str, values: tuple[object, ...]) -> tuple[Any, ...]:
    """Return the result of CLIENT's METHOD, why there is none, and the members in order of use."""
    value, trouble = None, ""
    try:
        value = getattr(client, method)(*values)
    except EtcdError as error:
        trouble = str(error)
    return value, trouble, tuple(client.endpoints)


class JobStore:
    """Asks the etcd at ADDRESS about a job, one request at a time."""

    def __init__(self, address: StoreAddress, waiting: Waiting) -> None:
        self._address, self._waiting = address, waiting
        self._requests: deque[tuple[str, tuple[object, ...], Callable[[StoreAnswer], None]]] = (
            deque()
        )
        self._call: IsolatedCall | None = None

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
        # Taken before it is sent: a lease is renewed no earlier than this.
        asked_at = time.monotonic()
        client = Client(self._address)
        try:
            call = self._call = IsolatedCall(partial(answer, client, method, values))
        except OSError as error:
            why = f"no process can be started to ask etcd ({error.strerror})"
            end = partial(self._answered, asked_at, CallResult(trouble=why))
            self._waiting.timer((id(self), "failed"), asked_at, end)
            return
        call.watch(self._waiting, partial(self._answered, asked_at))

    def _answered(self, asked_at: float, result: CallResult) -> None:
        self._call = None
        value, trouble = None, result.trouble
        if not trouble:
            answered: Any = result.value
            value, trouble, members = answered
            self._address = self._address._replace(endpoints=members)
        _, _, done = self._requests.popleft()
        if self._requests:
            self._begin()
        done(StoreAnswer(asked_at, value, trouble))

    def close(self) -> None:
        """Stop; no callback follows."""
        self._waiting.timer((id(self), "failed"), None, nothing)
        self._requests.clear()
        call, self._call = self._call, None
        if call is not None:
            with suppress(OSError):
                call.abandon()
