"""A client of etcd 3 over its JSON gateway, which blocks: each question is a process of its own.

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
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

if TYPE_CHECKING:
    from collections.abc import Sequence

_AUTHORITY, _CERTIFICATE, _KEY = "ETCDCTL_CACERT", "ETCDCTL_CERT", "ETCDCTL_KEY"
# A record of thousands of hosts is smaller.
_LONGEST = 16 * 1024 * 1024


class UnreachableError(Exception):
    """No member of etcd has answered, and why."""


class RefusedError(Exception):
    """etcd does not do what it was asked."""


class Seen(NamedTuple):
    """What etcd has of a job: the values of its two keys and their revisions, 0 for none.

    `local` is the address of this host that reaches etcd.
    """

    leader: str
    leader_revision: int
    record: str
    record_revision: int
    local: str


class Client:
    """Asks the members of etcd at ENDPOINTS, waiting TIMEOUT_S for each answer, for job NAME.

    IS_SECURE: over TLS.
    """

    def __init__(
        self,
        endpoints: Sequence[tuple[str, int]],
        name: str,
        *,
        timeout_s: float,
        is_secure: bool = False,
    ) -> None:
        self.endpoints = list(endpoints)
        self._timeout_s = timeout_s
        self._is_secure = is_secure
        self._link: http.client.HTTPConnection | None = None
        self._local = ""
        # A job's name may have any characters, and none may lie within another.
        folder = f"/fleetrun/{quote(name, safe='')}"
        self._leader_key, self._record_key = f"{folder}/coordinator", f"{folder}/roster"

    # What is asked ------------------------------------------------------------------------------

    def look(self) -> Seen:
        """Return what etcd has of the job."""
        wanted = [_get(self._leader_key), _get(self._record_key)]
        found = self._ask("/v3/kv/txn", {"success": wanted})
        leader, record = (_first(one) for one in found.get("responses", [{}, {}]))
        return Seen(
            _text(leader),
            _number(leader, "create_revision"),
            _text(record),
            _number(record, "mod_revision"),
            self._local,
        )

    def campaign(self, value: str, ttl_s: int, record_revision: int) -> tuple[int, int] | None:
        """Take the place of the coordinator, if it is free and the record still that of a look.

        Returns the lease and the revision of the key; None where another one was faster. The lease
        ends TTL_S after it was renewed last, or later.
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
        """Put the end of LEASE off; False where it has ended already."""
        answer = self._ask("/v3/lease/keepalive", {"ID": lease})
        return _number(answer.get("result", {}), "TTL") > 0

    def revoke(self, lease: int) -> None:
        """End LEASE, and what depends on it."""
        self._ask("/v3/lease/revoke", {"ID": lease})

    def keep(self, record: str, revision: int, lease: int) -> bool:
        """Keep RECORD, until LEASE ends if that is not 0; False where REVISION leads no more."""
        put = {"key": _coded(self._record_key), "value": _coded(record), "lease": lease}
        return self._guarded(revision, [{"request_put": put}])

    def leave(self, revision: int, lease: int, *, is_final: bool) -> bool:
        """Free the place of the coordinator; the end of the job takes its record, too."""
        keys = [self._leader_key, *([self._record_key] if is_final else [])]
        deletions = [{"request_delete_range": {"key": _coded(key)}} for key in keys]
        is_done = self._guarded(revision, deletions)
        self.revoke(lease)
        return is_done

    def _guarded(self, revision: int, requests: list[dict[str, Any]]) -> bool:
        compare = [_revision_is(self._leader_key, "create", revision)]
        answer = self._ask("/v3/kv/txn", {"compare": compare, "success": requests})
        return bool(answer.get("succeeded"))

    # How ----------------------------------------------------------------------------------------

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
        raise UnreachableError("; ".join(troubles))

    def _ask_member(self, host: str, port: int, path: str, body: bytes) -> dict[str, Any] | str:
        """Return what a member answers, or why it does not."""
        try:
            return self._post(host, port, path, body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return f"{_reason(error)}{self._hint(error)}"

    def _hint(self, error: Exception) -> str:
        """Return what may help where a member hangs up, as one does of which TLS is expected."""
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
            # That is how it says that a lease has ended.
            return {}
        if answer.status != http.client.OK:
            said = text[:200].decode(errors="replace").strip()
            message = f"it answers {answer.status} to {path} ({said})"
            if answer.status in {http.client.UNAUTHORIZED, http.client.BAD_REQUEST}:
                raise RefusedError(message)
            raise http.client.HTTPException(message)
        found = json.loads(text)
        if not isinstance(found, dict):
            message = "its answer is not etcd's"
            raise http.client.HTTPException(message)
        return found

    def _called(self, host: str, port: int) -> http.client.HTTPConnection:
        """Return what calls a member; RefusedError where a file for TLS cannot be read."""
        if not self._is_secure:
            return http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        import ssl

        authority, certificate, key = (
            os.environ.get(name) or None for name in (_AUTHORITY, _CERTIFICATE, _KEY)
        )
        which = f"{_AUTHORITY}={authority}"
        try:
            context = ssl.create_default_context(cafile=authority)
            if certificate is not None:
                which = f"{_CERTIFICATE}={certificate} with {_KEY}={key or ''}"
                context.load_cert_chain(certificate, key)
        except (OSError, ValueError) as error:
            message = f"{which} cannot be used ({_reason(error)})"
            raise RefusedError(message) from None
        return http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=context)

    def close(self) -> None:
        """Hang up; the next question calls again."""
        if self._link is not None:
            self._link.close()
            self._link = None
            self._local = ""


def answer(
    client: Client, what: str, values: Sequence[Any]
) -> tuple[object, str, tuple[tuple[str, int], ...]]:
    """Return what CLIENT answers to WHAT, why it does not, and whom to ask first next time."""
    value, trouble = None, ""
    try:
        if what == "leave":
            revision, lease, is_final = values
            value = client.leave(revision, lease, is_final=is_final)
        else:
            value = getattr(client, what)(*values)
    except (RefusedError, UnreachableError) as error:
        trouble = str(error)
    # The values are plain: what has asked is another process.
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


def _revision_is(key: str, which: str, revision: int) -> dict[str, Any]:
    target = which.upper()
    return {"key": _coded(key), "target": target, f"{which}_revision": revision}


def _first(response: dict[str, Any]) -> dict[str, Any]:
    """Return the first key that was found."""
    found: list[dict[str, Any]] = response.get("response_range", {}).get("kvs", [])
    return found[0] if found else {}


def _text(found: dict[str, Any]) -> str:
    return base64.b64decode(found.get("value", "")).decode(errors="replace")


def _number(found: dict[str, Any], key: str) -> int:
    # The gateway writes 64 bits as text, and leaves zeros out.
    return int(found.get(key, 0))
