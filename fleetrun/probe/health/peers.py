"""Meeting the check-ups of the job's other hosts on the ports that the job will use.

Each host listens on its own ports and connects to each of the others'. On a connection the caller
sends one line of JSON and gets one back: who the host is, its versions, its clock.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from fleetrun.doctor.facts import Connect, HostDescription, Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MAGIC = "fleetrun doctor 1"
_MOST_BYTES = 4096
_PAUSE_S = 0.1
# So long a peer that is reached may take to answer.
_ANSWER_S = 3.0
# After so long, say who is waited for, and name so many.
_SILENCE_S, _MOST_NAMED = 1.0, 5


class HostPorts(NamedTuple):
    """A host of the job, and the ports that it has there."""

    host: str
    ports: tuple[int, ...]


class _Met(NamedTuple):
    """One exchange with a peer: its card, and its clock against ours."""

    card: HostDescription
    ahead_s: float
    accuracy_s: float


def meet(
    spots: Sequence[HostPorts],
    me: int,
    card: HostDescription,
    *,
    timeout_s: float,
    address: str | None = None,
    say: Callable[[str], None] | None = None,
) -> tuple[Peer, ...]:
    """Return what became of meeting the hosts SPOTS, but for ME, within TIMEOUT_S seconds.

    We listen on ADDRESS, or on all. A port that cannot be listened on is left out. SAY gets a line
    about who is waited for when that takes longer than a second.
    """
    return asyncio.run(_PeerCheck(spots, me, card, timeout_s).hold(address, say))


class _PeerCheck:
    """One host's part of the meeting."""

    def __init__(
        self, spots: Sequence[HostPorts], me: int, card: HostDescription, timeout_s: float
    ) -> None:
        self._spots = spots
        self._me = me
        self._card = card
        self._until = time.monotonic() + timeout_s
        # Which hosts have come to which of our ports.
        self._came: set[tuple[int, int]] = set()
        self._everybody_came = asyncio.Event()

    async def hold(
        self, address: str | None, say: Callable[[str], None] | None
    ) -> tuple[Peer, ...]:
        """Meet everybody; return when all have met all, or it is too late."""
        loop = asyncio.get_running_loop()
        remark = loop.call_later(_SILENCE_S, self._say_who_is_late, say) if say else None
        servers = []
        for port in self._spots[self._me].ports:
            # Who has it is a finding of its own.
            with suppress(OSError):
                servers.append(await asyncio.start_server(self._receive, address, port))
        others = [index for index in range(len(self._spots)) if index != self._me]
        try:
            peers = await asyncio.gather(*map(self._peer, others))
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._everybody_came.wait(), self._left())
        finally:
            if remark is not None:
                remark.cancel()
            for server in servers:
                server.close()
        return tuple(peers)

    def _say_who_is_late(self, say: Callable[[str], None]) -> None:
        came = {node for node, _ in self._came}
        late = [
            spot.host
            for node, spot in enumerate(self._spots)
            if node != self._me and node not in came
        ]
        if late:
            shown = ", ".join(late[:_MOST_NAMED]) + (", ..." if late[_MOST_NAMED:] else "")
            say(f"Waiting up to {self._left():.0f} s for the check-ups of {shown}.")

    def _left(self) -> float:
        return max(self._until - time.monotonic(), 0.001)

    def _words(self) -> bytes:
        """Return our line."""
        document = {
            "what": _MAGIC,
            "node": self._me,
            "clock": time.time(),
            "card": self._card._asdict(),
        }
        return json.dumps(document).encode() + b"\n"

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer who has called us."""
        try:
            line = await asyncio.wait_for(reader.readline(), _ANSWER_S)
            reported = _parsed(line)
            if reported is None:
                return
            writer.write(self._words())
            await writer.drain()
            self._came.add((int(reported["node"]), writer.get_extra_info("sockname")[1]))
            ports = self._spots[self._me].ports
            if len(self._came) >= len(ports) * (len(self._spots) - 1):
                self._everybody_came.set()
        except (OSError, asyncio.TimeoutError, ValueError):
            # Another program's call, or one that broke off; the peer says so on its side.
            return
        finally:
            writer.close()

    async def _peer(self, index: int) -> Peer:
        """Call each port of host INDEX."""
        spot = self._spots[index]
        called = await asyncio.gather(*(self._call(spot.host, port) for port in spot.ports))
        met = min(
            (each for _, each in called if each is not None),
            key=lambda each: each.accuracy_s,
            default=None,
        )
        connects = tuple(connect for connect, _ in called)
        if met is None:
            return Peer(spot.host, connects)
        return Peer(spot.host, connects, met.card, met.ahead_s, met.accuracy_s)

    async def _call(self, host: str, port: int) -> tuple[Connect, _Met | None]:
        """Call PORT of HOST until it answers, or it is too late."""
        outcome = Connect(port, "silent", os.strerror(errno.ETIMEDOUT))
        while time.monotonic() < self._until:
            try:
                reader, writer = await asyncio.wait_for(
                    asyncio.open_connection(host, port), self._left()
                )
            except ConnectionRefusedError:
                outcome = Connect(port, "refused")
            except asyncio.TimeoutError:
                return Connect(port, "silent", os.strerror(errno.ETIMEDOUT)), None
            except OSError as error:
                outcome = Connect(port, "silent", error.strerror or str(error))
            else:
                met = await self._exchange(reader, writer)
                if met is not None:
                    return Connect(port, "connected"), met
                outcome = Connect(port, "another program")
            # It may not have begun yet.
            await asyncio.sleep(min(_PAUSE_S, self._left()))
        return outcome, None

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> _Met | None:
        """Tell who we are and read who they are; None where it is somebody else."""
        try:
            began, wall = time.monotonic(), time.time()
            writer.write(self._words())
            line = await asyncio.wait_for(reader.readline(), min(_ANSWER_S, self._left()))
            took = time.monotonic() - began
            reported = _parsed(line)
            if reported is None:
                return None
            card = HostDescription(
                **{name: str(reported["card"].get(name, "")) for name in HostDescription._fields}
            )
            return _Met(card, float(reported["clock"]) - (wall + took / 2), took / 2)
        except (OSError, asyncio.TimeoutError, ValueError):
            return None
        finally:
            writer.close()


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return what LINE says if it is one of ours."""
    try:
        reported = json.loads(line[:_MOST_BYTES])
    except ValueError:
        return None
    is_ours = (
        isinstance(reported, dict)
        and reported.get("what") == _MAGIC
        and isinstance(reported.get("node"), int)
        and isinstance(reported.get("clock"), float)
        and isinstance(reported.get("card"), dict)
    )
    return reported if is_ours else None
