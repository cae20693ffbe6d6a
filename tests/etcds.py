"""A real etcd 3, of one member or of several on hosts of their own."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import ports
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from lab import Host

CLIENT, PEER = 2379, 2380


def missing() -> str | None:
    """Return why this machine cannot run an etcd, or None."""
    return None if shutil.which("etcd") else "there is no etcd here (Debian: etcd-server)"


def _words(name: str, folder: Path, address: str, client: int, peer: int) -> list[str]:
    here = f"http://{address}:{client}"
    peers = f"http://{address}:{peer}"
    return [
        *("etcd", "--name", name, "--data-dir", str(folder / name)),
        *("--listen-client-urls", here, "--advertise-client-urls", here),
        *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
        *("--unsafe-no-fsync", "--heartbeat-interval", "50", "--election-timeout", "250"),
        *("--log-level", "error"),
    ]


@contextmanager
def one_member(folder: Path) -> Iterator[str]:
    """Start an etcd on this machine, and return its HOST:PORT."""
    client, peer = ports.free(2)
    words = _words("only", folder, "127.0.0.1", client, peer)
    cluster = f"only=http://127.0.0.1:{peer}"
    with (folder / "etcd.log").open("wb") as log:
        member = subprocess.Popen(
            [*words, "--initial-cluster", cluster],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        until(lambda: is_well("127.0.0.1", client))
        yield f"127.0.0.1:{client}"
    finally:
        member.kill()
        member.wait()


def is_well(address: str, port: int) -> bool:
    """Whether the member there has a leader."""
    link = http.client.HTTPConnection(address, port, timeout=1)
    try:
        link.request("GET", "/health")
        return bool(json.loads(link.getresponse().read())["health"] == "true")
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        link.close()


@contextmanager
def on_hosts(hosts: Sequence[Host]) -> Iterator[str]:
    """Start a member on each of HOSTS, and return the value of --master."""
    cluster = ",".join(f"{host.name}=http://{host.ip}:{PEER}" for host in hosts)
    members = [
        host.start(
            *_words(host.name, host.folder, host.ip, CLIENT, PEER),
            *("--initial-cluster", cluster),
            output="etcd.log",
        )
        for host in hosts
    ]
    try:
        for host in hosts:
            until(partial(_is_well_there, host))
        yield "etcd://" + ",".join(f"{host.ip}:{CLIENT}" for host in hosts)
    finally:
        for member in members:
            member.kill()
            member.wait()


def _is_well_there(host: Host) -> bool:
    health = f"http://{host.ip}:{CLIENT}/health"
    ask = f"import urllib.request as u; print(u.urlopen({health!r}, timeout=1).read().decode())"
    return '"true"' in host.run("python3", "-c", ask, check=False).stdout
