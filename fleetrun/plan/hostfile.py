"""The hosts of a job as users list them: `--hosts a:8,b:8`, or lines `a slots=8` of a file."""

# No `from __future__ import annotations` here, for the reason given in model.py.
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from fleetrun.errors import UsageError
from fleetrun.plan.hosts import NO_IPV6, is_ipv6
from fleetrun.text import is_digits

# More ranks than any host has: a typing error.
_MOST_SLOTS = 4096


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
    entries = []
    for word in text.split(","):
        _refuse_ipv6(word.strip(), f"{option}={text}")
        target, colon, slots = word.strip().partition(":")
        entries.append(_host(target, slots if colon else None, f"{option}={text}"))
    return _distinct(entries, f"{option}={text}")


def read(text: str, path: str) -> tuple[HostEntry, ...]:
    """Return the hosts of the file PATH with TEXT: lines `NAME [slots=N]`, and comments after #.

    The format is that of DeepSpeed and MPI. Raises UsageError with file:line.
    """
    entries: list[HostEntry] = []
    names: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{path}:{number}"
        _refuse_ipv6(words[0], where)
        slots = None
        for word in words[1:]:
            key, equals, value = word.partition("=")
            if key != "slots" or not equals or slots is not None:
                raise UsageError(f"{where}: {word}: write one `NAME slots=N` a line.")
            slots = value
        host = _host(words[0], slots, where)
        if host.name in names:
            raise _twice(host.name, where)
        names.add(host.name)
        entries.append(host)
    if not entries:
        raise UsageError(f"{path}: no host is in this file: write one `NAME slots=N` a line.")
    return tuple(entries)


def _refuse_ipv6(word: str, where: str) -> None:
    address = word.rpartition("@")[2]
    if address.startswith("[") or is_ipv6(address):
        raise UsageError(f"{where}: {NO_IPV6}; give each host's name or IPv4 address.")


def _host(target: str, slots: str | None, where: str) -> HostEntry:
    """Return the host, checked; WHERE names the file and line."""
    user, at, name = target.rpartition("@")
    # ssh would take a name that begins with a hyphen for an option.
    if not name or (at and not user) or target.startswith("-") or not _is_plain(target):
        raise UsageError(f"{where}: {target or 'an empty name'} is not a host name or address.")
    if slots is None:
        return HostEntry(target)
    if not _is_number(slots) or not 0 < int(slots) <= _MOST_SLOTS:
        raise UsageError(f"{where}: {slots or 'nothing'} is not a number of slots, 1 or more.")
    return HostEntry(target, int(slots))


def _distinct(hosts: Sequence[HostEntry], where: str) -> tuple[HostEntry, ...]:
    counts = Counter(host.name for host in hosts)
    for name, count in counts.items():
        if count > 1:
            raise _twice(name, where)
    return tuple(hosts)


def _twice(name: str, where: str) -> UsageError:
    return UsageError(f"{where}: {name} is named twice; name each host once.")


def _is_plain(text: str) -> bool:
    return text.isascii() and all(letter.isalnum() or letter in "-_.@" for letter in text)


def _is_number(text: str) -> bool:
    return is_digits(text) and len(text) <= len("4096")
