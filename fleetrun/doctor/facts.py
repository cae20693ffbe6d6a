"""What the hosts of a job tell each other in a check-up."""

# No `from __future__ import annotations` here, for the reason given in model.py.
from typing import NamedTuple


class Connect(NamedTuple):
    """An attempt to connect to one port of another host.

    `outcome` is connected, refused (the host answers, nothing listens), silent (no answer at all),
    or another program (which listens there); `text` says more.
    """

    port: int
    outcome: str
    text: str = ""


class HostDescription(NamedTuple):
    """The properties that hosts exchange and compare."""

    host: str
    fleetrun: str
    python: str
    paddle: str
    cuda: str
    nccl: str
    driver: str


class Peer(NamedTuple):
    """Another host of the job; `card` is None if it did not answer."""

    host: str
    connects: tuple[Connect, ...]
    card: HostDescription | None = None
    # By how many seconds its clock is ahead of ours, and the error of that.
    ahead_s: float = 0.0
    accuracy_s: float = 0.0
