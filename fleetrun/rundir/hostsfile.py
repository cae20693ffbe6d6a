"""`hosts.json`: how each host of a job ended; schema 1.

`hosts` has one entry for each host, in the order of their node ranks, with the fields of `HostEnd`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fleetrun.rundir import names, reading
from fleetrun.rundir.folder import Folder

SCHEMA = 1


class HostEnd(NamedTuple):
    """The end of one host; `what` is a sentence without its full stop."""

    node_rank: int
    host: str
    hostname: str
    # The number of its ranks.
    ranks: int
    what: str
    exit_code: int
    # Whether the verdict is about it.
    is_first: bool = False
    # Whether it failed because another had.
    is_victim: bool = False


def write(folder: Folder, hosts: Sequence[HostEnd], redact: Callable[[str], str] = str) -> None:
    """Write the ends of HOSTS into FOLDER atomically; OSError if that fails."""
    document = {"schema": SCHEMA, "hosts": reading.plain(hosts)}
    folder.write_json(names.HOSTS, document, redact)
