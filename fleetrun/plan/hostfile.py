"""The hosts of a job as users list them: `--hosts a:8,b:8`, or lines `a slots=8` of a file."""

from __future__ import annotations

from typing import NamedTuple

from fleetrun.errors import UsageError
from fleetrun.plan.hosts import NO_IPV6, is_ipv6
from fleetrun.text import is_digits

# More ranks than any host has: a typing error, or the port of an sshd.
_MOST_SLOTS = 1024


class HostEntry(NamedTuple):
    """One host: `target` is the destination for ssh, `name` the same without a user.

    `slots` is its number of ranks; None if not given.
    """

    target: str
    slots: int | None = None

    @property
    def name(self) -> str:
        """The host without the user name before it."""
        return self.target.rpartition("@")[2]


def parse(text: str, option: str = "--hosts") -> tuple[HostEntry, ...]:
    """Return the hosts of TEXT, `NAME` or `NAME:SLOTS` with commas; UsageError if invalid.

    >>> parse("a:8, me@b:8,c")
    (HostEntry(target='a', slots=8), HostEntry(target='me@b', slots=8), \
HostEntry(target='c', slots=None))
    """
    entries: list[HostEntry] = []
    for word in text.split(","):
        _add(entries, *word.strip().partition(":"), where=f"{option}={text}")
    return tuple(entries)


def read(text: str, path: str) -> tuple[HostEntry, ...]:
    """Return the hosts of the file PATH with TEXT: lines `NAME [slots=N]`, and comments after #.

    The format is that of DeepSpeed and MPI. Raises UsageError with file:line.
    """
    entries: list[HostEntry] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where, (name, *more) = f"{path}:{number}", words
        key, mark, slots = more[0].partition("=") if more else ("slots", "", "")
        if key != "slots" or len(more) > 1 or (more and not mark):
            raise UsageError(f"{where}: {' '.join(more)}: write one `NAME slots=N` a line.")
        _add(entries, name, mark, slots, where=where)
    if not entries:
        raise UsageError(f"{path}: no host is in this file: write one `NAME slots=N` a line.")
    return tuple(entries)


def _add(entries: list[HostEntry], target: str, mark: str, slots: str, *, where: str) -> None:
    """Add a host to ENTRIES, if it is one; MARK is empty if it has no number of SLOTS."""
    user, at, name = target.rpartition("@")
    if name.startswith("[") or is_ipv6(f"{name}{mark}{slots}") or is_ipv6(name):
        raise UsageError(f"{where}: {NO_IPV6}; give each host's name or IPv4 address.")
    is_plain = all(letter.isalnum() or letter in "-_.@" for letter in target)
    # ssh would take a name that begins with a hyphen for an option.
    is_option = target.startswith("-")
    if not name or (at and not user) or is_option or not is_plain or not target.isascii():
        raise UsageError(f"{where}: {target or 'an empty name'} is not a host name or address.")
    is_number = is_digits(slots) and 0 < int(slots[:5]) <= _MOST_SLOTS
    if mark and not is_number:
        raise UsageError(
            f"{where}: {slots or 'nothing'} is not a number of slots, 1 to {_MOST_SLOTS}. A port "
            "of sshd belongs in ~/.ssh/config, or in --ssh."
        )
    if any(name == entry.name for entry in entries):
        raise UsageError(f"{where}: {name} is named twice; name each host once.")
    entries.append(HostEntry(target, int(slots) if mark else None))
