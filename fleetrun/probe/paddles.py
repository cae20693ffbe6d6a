"""Looks at the Paddle that is installed, without importing it: that would take seconds."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from fleetrun.run import proc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fleetrun.model import Script

_LIBRARIES = ("base/libpaddle.so", "fluid/libpaddle.so")
_VERSION = re.compile(r"^full_version\s*=\s*'([^']+)'", re.MULTILINE)
_HIP = re.compile(r"^hip_version\s*=\s*'\d", re.MULTILINE)
_IMPORT = re.compile(rb"^\s*(?:import|from)\s+paddle\b", re.MULTILINE)
# One section header of an ELF file for 64 bits.
_HEADER_BYTES = 64


def without(symbol: bytes, path: Sequence[str]) -> str | None:
    """Return the version of the Paddle on PATH if SYMBOL is surely none of its library's texts."""
    for folder in path:
        root = os.path.join(folder, "paddle")
        text = proc.content(os.path.join(root, "version", "__init__.py")).decode(errors="replace")
        if not text:
            continue
        version = _VERSION.search(text)
        found = constants(root)
        if found is not None and symbol not in found:
            return version.group(1) if version else "?"
        return None
    return None


def version(path: Sequence[str]) -> str:
    """Return the version of the Paddle on PATH; empty where there is none."""
    for folder in path:
        content = proc.content(os.path.join(folder, "paddle", "version", "__init__.py"))
        if content:
            found = _VERSION.search(content.decode(errors="replace"))
            return found.group(1) if found else "?"
    return ""


def is_for_rocm(path: Sequence[str]) -> bool:
    """Whether the Paddle on PATH says that it is built for AMD's GPUs."""
    for folder in path:
        content = proc.content(os.path.join(folder, "paddle", "version", "__init__.py"))
        if content:
            return _HIP.search(content.decode(errors="replace")) is not None
    return False


def constants(root: str) -> bytes | None:
    """Return the constants of the library of the Paddle in the folder ROOT; None: of another kind.

    They are a few of its hundreds of megabytes.
    """
    for library in _LIBRARIES:
        found = _constants(os.path.join(root, library))
        if found is not None:
            return found
    return None


def imports_paddle(script: Script, cwd: str) -> bool:
    """Whether SCRIPT is Python and says itself that it imports Paddle."""
    if script.form != "file" or not script.target.endswith(".py"):
        return False
    try:
        with open(os.path.join(cwd, script.target), "rb") as file:
            return _IMPORT.search(file.read()) is not None
    except OSError:
        return False


def _constants(path: str) -> bytes | None:
    """Return the constants of the shared library at PATH; None where it is of another kind."""
    import struct

    try:
        with open(path, "rb") as file:
            head = file.read(_HEADER_BYTES)
            if head[:6] != b"\x7fELF\x02\x01":
                return None
            (at,) = struct.unpack_from("<Q", head, 40)
            size, count, names = struct.unpack_from("<HHH", head, 58)
            file.seek(at)
            table = file.read(size * count)
            sections = [
                struct.unpack_from("<I", table, size * i)
                + struct.unpack_from("<QQ", table, size * i + 24)
                for i in range(count)
            ]
            file.seek(sections[names][1])
            texts = file.read(sections[names][2])
            for name, start, length in sections:
                if texts[name:].startswith(b".rodata\0"):
                    file.seek(start)
                    return file.read(length)
    except (OSError, struct.error, IndexError):
        return None
    return None
