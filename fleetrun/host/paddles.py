"""Looks at the Paddle that is installed, without importing it: that would take seconds."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Sequence
from typing import BinaryIO

from fleetrun.model import Script
from fleetrun.run import proc

_LIBRARIES = ("base/libpaddle.so", "fluid/libpaddle.so")
_VERSION = re.compile(r"^full_version\s*=\s*'([^']+)'", re.MULTILINE)
_HIP = re.compile(r"^hip_version\s*=\s*'\d", re.MULTILINE)
# Since Paddle 3 `xpu_xre_version`.
_NO_XPU = re.compile(r"^xpu(?:_xre)?_version\s*=\s*'False'", re.MULTILINE)
_IMPORT = re.compile(rb"^\s*(?:import|from)\s+paddle\b", re.MULTILINE)
# One section header of an ELF file for 64 bits.
_HEADER_BYTES = 64


def installed(path: Sequence[str]) -> tuple[str, str]:
    """Return the folder of the Paddle on PATH and its version file; both empty if there is none."""
    for folder in path:
        root = os.path.join(folder, "paddle")
        text = proc.content(os.path.join(root, "version", "__init__.py")).decode(errors="replace")
        if text:
            return root, text
    return "", ""


def without(symbol: bytes, path: Sequence[str]) -> str | None:
    """Return the version of the Paddle on PATH if its library certainly lacks the text SYMBOL."""
    root, _ = installed(path)
    texts = constants(root) if root else None
    return None if texts is None or symbol in texts else version(path)


def version(path: Sequence[str]) -> str:
    """Return the version of the Paddle on PATH; empty if there is none."""
    _, text = installed(path)
    told = _VERSION.search(text)
    return told[1] if told else "?" if text else ""


def is_for_rocm(path: Sequence[str]) -> bool:
    """Whether the Paddle on PATH says that it is built for AMD's GPUs."""
    return _HIP.search(installed(path)[1]) is not None


def lacks_xpus(path: Sequence[str]) -> bool:
    """Whether the Paddle on PATH says that it is not built for XPUs."""
    return _NO_XPU.search(installed(path)[1]) is not None


def constants(root: str) -> bytes | None:
    """Return the constants of the library of the Paddle in ROOT; None if it has another format.

    They are a few of its hundreds of megabytes.
    """
    for library in _LIBRARIES:
        constants = _constants(os.path.join(root, library))
        if constants is not None:
            return constants
    return None


def imports_paddle(script: Script, cwd: str) -> bool:
    """Whether SCRIPT is Python and itself imports Paddle."""
    if script.form != "file" or not script.target.endswith(".py"):
        return False
    try:
        with open(os.path.join(cwd, script.target), "rb") as file:
            return _IMPORT.search(file.read()) is not None
    except OSError:
        return False


def _constants(path: str) -> bytes | None:
    """Return the constants of the shared library at PATH; None if it has another format."""
    try:
        with open(path, "rb") as file:
            return _read(file, *_section(file, b".rodata"))
    except (OSError, struct.error, KeyError):
        return None


def _section(file: BinaryIO, wanted: bytes) -> tuple[int, int]:
    """Return the offset and the length of a section of FILE, an ELF library for 64 bits.

    Raises KeyError if there is no such section, struct.error for another kind of file.
    """
    head = _read(file, 0, _HEADER_BYTES)
    if head[:6] != b"\x7fELF\x02\x01":
        raise KeyError(wanted)
    (at,) = struct.unpack_from("<Q", head, 40)
    size, count, names = struct.unpack_from("<HHH", head, 58)
    table = _read(file, at, size * count)
    sections = [
        struct.unpack_from("<I", table, size * i) + struct.unpack_from("<QQ", table, size * i + 24)
        for i in range(count)
    ]
    texts = _read(file, *sections[names][1:]) if names < count else b""
    for name, start, length in sections:
        if texts[name:].startswith(wanted + b"\0"):
            return start, length
    raise KeyError(wanted)


def _read(file: BinaryIO, at: int, length: int) -> bytes:
    file.seek(at)
    return file.read(length)
