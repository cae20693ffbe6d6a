"""A blocking client of etcd 3 over its JSON gateway; each request runs in a child process.

The gateway is plain HTTP, so the standard library is enough; each request tries every member until
one answers, beginning with the one that answered last. Over TLS the authority, and a certificate
of our own, are named by the variables that etcdctl reads.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from fleetrun.session.jobrecord import StoreAddress

_AUTHORITY, _CERTIFICATE, _KEY = "ETCDCTL_CACERT", "ETCDCTL_CERT", "ETCDCTL_KEY"
# In bytes; a record of thousands of hosts is smaller.
_LONGEST = 16 * 1024 * 1024


class EtcdError(Exception):
    """No member of etcd has answered, or one rejects the request; the message says why."""


class Seen(NamedTuple):
    """What etcd has about a job: the values of its two keys, and their revisions (0: none).

    `local` is the address of this host that reaches etcd.
    """

    leader: str
    leader_revision: int
    record: str
    record_revision: int
    local: str


class Client:
    """Asks the etcd at ADDRESS about a job."""

    def __init__(self, address: StoreAddress) -> None:
        self.endpoints = list(address.endpoints)
        self._timeout_s = address.timeout_s
        self._is_secure = address.is_secure
        self._link: http.client.HTTPConnection | None = None
        self._local = ""
        # A job's name may contain any characters, and no job's keys may lie within another's.
        folder = f"/fleetrun/{quote(address.name, safe='')}"
        self._leader_key, self._record_key = f"{folder}/coordinator", f"{folder}/roster"

    # Requests -----------------------------------------------------------------------------------

    def look(self) -> Seen:
        """Return what etcd has about the job."""
        requests = [_get(self._leader_key), _get(self._record_key)]
        answer = self._ask("/v3/kv/txn", {"success": requests})
        leader, record = (_first(response) for response in answer.get("responses", [{}, {}]))
        return Seen(
            _text(leader),
            _number(leader, "create_revision"),
            _text(record),
            _number(record, "mod_revision"),
            self._local,
        )

    def campaign(self, value: str, ttl_s: int, record_revision: int) -> tuple[int, int] | None:
        """Take the coordinator's place if it is free and the record still has RECORD_REVISION.

        Returns the lease and the revision of the key; None if another launcher was faster. The
        lease ends TTL_S or more after its last renewal.
        """
        granted = self._ask("/v3/lease/grant", {"TTL": ttl_s})
        lease = _number(granted, "ID")
        put = {"key": _coded(self._leader_key), "value": _coded(value), "lease": lease}
        answer = self._ask(
            "/v3/kv/txn",
            {
                "compare": [
                    _revision_is(self._leader_key, "create", 0),
                    _revision_is(self._record_key, "mod", record_revision),
                ],
                "success": [{"request_put": put}],
            },
        )
        if not answer.get("succeeded"):
            self.revoke(lease)
            return None
        return lease, _number(answer.get("header", {}), "revision")

    def renew(self, lease: int) -> bool:
        """Renew LEASE; False if it has ended already."""
        answer = self._ask("/v3/lease/keepalive", {"ID": lease})
        return _number(answer.get("result", {}), "TTL") > 0

    def revoke(self, lease: int) -> None:
        """End LEASE and the keys that depend on it."""
        self._ask("/v3/lease/revoke", {"ID": lease})

    def keep(self, record: str, revision: int, lease: int) -> bool:
        """Store RECORD, until LEASE ends unless that is 0; False if REVISION no longer leads."""
        put = {"key": _coded(self._record_key), "value": _coded(record), "lease": lease}
        return self._guarded(revision, [{"request_put": put}])

    def leave(self, revision: int, lease: int, *, is_final: bool) -> bool:
        """Free the coordinator's place; IS_FINAL: remove the record as well."""
        keys = [self._leader_key, *([self._record_key] if is_final else [])]
        deletions = [{"request_delete_range": {"key": _coded(key)}} for key in keys]
        is_done = self._guarded(revision, deletions)
        self.revoke(lease)
        return is_done

    def _guarded(self, revision: int, requests: list[dict[str, Any]]) -> bool:
        compare = [_revision_is(self._leader_key, "create", revision)]
        answer = self._ask("/v3/kv/txn", {"compare": compare, "success": requests})
        return bool(answer.get("succeeded"))

    # Transport ----------------------------------------------------------------------------------

    def _ask(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        body = json.dumps(request).encode()
        troubles: list[str] = []
        for host, port in list(self.endpoints):
            answer = self._ask_member(host, port, path, body)
            if not isinstance(answer, str):
                return answer
            self.close()
            # Another member is asked first next time.
            self.endpoints.append(self.endpoints.pop(0))
            troubles.append(f"{f'[{host}]' if ':' in host else host}:{port}: {answer}")
        raise EtcdError("; ".join(troubles))

    def _ask_member(self, host: str, port: int, path: str, body: bytes) -> dict[str, Any] | str:
        """Return a member's answer, or why there is none."""
        try:
            return self._post(host, port, path, body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return f"{_reason(error)}{self._hint(error)}"

    def _hint(self, error: Exception) -> str:
        """Return a hint if a member hangs up, as it does if only one side uses TLS."""
        is_refusal = bool(getattr(error, "verify_message", ""))
        # ssl.SSLError, which most launches need not load.
        has_hung_up = isinstance(error, ConnectionResetError | BrokenPipeError) or (
            type(error).__module__ == "ssl" and not is_refusal
        )
        if not has_hung_up:
            return ""
        if not self._is_secure:
            return "; for etcd with TLS give etcds://HOST:PORT"
        return f"; if it requires a client certificate, set {_CERTIFICATE} and {_KEY}"

    def _post(self, host: str, port: int, path: str, body: bytes) -> dict[str, Any]:
        link = self._link
        if link is None:
            link = self._link = self._called(host, port)
        link.request("POST", path, body, {"Content-Type": "application/json"})
        if not self._local and isinstance(link.sock, socket.socket):
            self._local = str(link.sock.getsockname()[0])
        answer = link.getresponse()
        text = answer.read(_LONGEST)
        if answer.will_close:
            self.close()
        if answer.status == http.client.NOT_FOUND and path.startswith("/v3/lease"):
            # This is how it reports that a lease has ended.
            return {}
        if answer.status != http.client.OK:
            body_text = text[:200].decode(errors="replace").strip()
            message = f"it answers {answer.status} to {path} ({body_text})"
            if answer.status in {http.client.UNAUTHORIZED, http.client.BAD_REQUEST}:
                raise EtcdError(message)
            raise http.client.HTTPException(message)
        document = json.loads(text)
        if not isinstance(document, dict):
            message = "its answer is not etcd's"
            raise http.client.HTTPException(message)
        return document

    def _called(self, host: str, port: int) -> http.client.HTTPConnection:
        """Return a connection to a member; raise EtcdError if a TLS file cannot be read."""
        if not self._is_secure:
            return http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        import ssl

        authority, certificate, key = (
            os.environ.get(name) or None for name in (_AUTHORITY, _CERTIFICATE, _KEY)
        )
        setting = f"{_AUTHORITY}={authority}"
        try:
            context = ssl.create_default_context(cafile=authority)
            if certificate is not None:
                setting = f"{_CERTIFICATE}={certificate} with {_KEY}={key or ''}"
                context.load_cert_chain(certificate, key)
        except (OSError, ValueError) as error:
            raise EtcdError(f"{setting} cannot be used ({_reason(error)})") from None
        return http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=context)

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._link is not None:
            self._link.close()
            self._link = None
            self._local = ""


def answer(
    client: Client, method: str, values: Sequence[Any]
) -> tuple[object, str, tuple[tuple[str, int], ...]]:
    """Return the result of CLIENT's METHOD, why there is none, and the members in order of use."""
    value, trouble = None, ""
    try:
        if method == "leave":
            revision, lease, is_final = values
            value = client.leave(revision, lease, is_final=is_final)
        else:
            value = getattr(client, method)(*values)
    except EtcdError as error:
        trouble = str(error)
    # Plain values, as they go to another process.
    return tuple(value) if isinstance(value, tuple) else value, trouble, tuple(client.endpoints)


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, http.client.RemoteDisconnected):
        return "it closes the connection without an answer"
    doubt = getattr(error, "verify_message", "")
    if doubt:
        return f"its certificate is not trusted ({doubt}); set {_AUTHORITY} to its authority"
    if isinstance(error, json.JSONDecodeError | http.client.BadStatusLine):
        return "what listens there is not etcd"
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or repr(error)
    return text[:1].lower() + text[1:]


def _coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _get(key: str) -> dict[str, Any]:
    return {"request_range": {"key": _coded(key)}}


def _revision_is(key: str, kind: str, revision: int) -> dict[str, Any]:
    target = kind.upper()
    return {"key": _coded(key), "target": target, f"{kind}_revision": revision}


def _first(response: dict[str, Any]) -> dict[str, Any]:
    """Return the first entry of RESPONSE."""
    entries: list[dict[str, Any]] = response.get("response_range", {}).get("kvs", [])
    return entries[0] if entries else {}


def _text(entry: dict[str, Any]) -> str:
    return base64.b64decode(entry.get("value", "")).decode(errors="replace")


def _number(entry: dict[str, Any], key: str) -> int:
    # The gateway writes 64 bits as text, and leaves zeros out.
    return int(entry.get(key, 0))
