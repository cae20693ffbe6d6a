"""Lists that the kernel gives by netlink, such as the IP addresses of this host."""

from __future__ import annotations

import _socket  # `socket` and psutil together take 80 ms to import, this one 1
import os
import struct

from fleetrun.model import Address
from fleetrun.typehints import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# From linux/netlink.h, linux/rtnetlink.h and linux/if_addr.h.
_REQUEST_DUMP = 0x301
_ERROR, _DONE = 2, 3
_HEADER = struct.Struct("=IHHII")
_ERROR_NUMBER = struct.Struct("=i")
_ATTRIBUTE = struct.Struct("=HH")
_LONGEST = 1 << 16
# The kernel answers at once; a sandbox's substitute may not.
_ANSWER_S = 2.0
_ROUTE, _GET_ADDRESSES = 0, 22
# Family, length of the prefix, flags, scope, index of the interface.
_BODY = struct.Struct("=BBBBI")
# On a point-to-point link, the first is the address of the other end.
_ADDRESS, _LOCAL = 1, 2


def addresses() -> tuple[Address, ...]:
    """Return every IP address of this host, with the interface that has it, IPv4 first.

    Raises OSError if the kernel refuses.
    """
    names = dict(_socket.if_nameindex())
    addresses = []
    for message in dump(_ROUTE, _GET_ADDRESSES, _BODY.pack(_socket.AF_UNSPEC, 0, 0, 0, 0)):
        family, _, _, _, index = _BODY.unpack_from(message)
        parts = dict(attributes(message[_BODY.size :]))
        packed = parts.get(_LOCAL, parts.get(_ADDRESS))
        is_ip = family in {_socket.AF_INET, _socket.AF_INET6}
        if is_ip and packed is not None and index in names:
            addresses.append(Address(names[index], _socket.inet_ntop(family, packed)))
    return tuple(sorted(addresses, key=lambda address: ":" in address.ip))


def dump(protocol: int, kind: int, body: bytes) -> Iterator[bytes]:
    """Yield the kernel's answers to the request KIND of PROTOCOL with BODY; may raise OSError."""
    link = _socket.socket(_socket.AF_NETLINK, _socket.SOCK_RAW | _socket.SOCK_CLOEXEC, protocol)
    try:
        link.settimeout(_ANSWER_S)
        link.send(_HEADER.pack(_HEADER.size + len(body), kind, _REQUEST_DUMP, 1, 0) + body)
        while answer := link.recv(_LONGEST):
            while len(answer) >= _HEADER.size:
                length, kind, *_ = _HEADER.unpack_from(answer)
                message = answer[_HEADER.size : length]
                answer = answer[max(_padded(length), _HEADER.size) :]
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    (number,) = _ERROR_NUMBER.unpack_from(message)
                    raise OSError(-number, os.strerror(-number))
                yield message
    finally:
        link.close()


def attributes(text: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the kinds and values of the attributes in TEXT."""
    while len(text) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(text)
        yield kind, text[_ATTRIBUTE.size : length]
        text = text[max(_padded(length), _ATTRIBUTE.size) :]


def _padded(length: int) -> int:
    return (length + 3) & ~3
