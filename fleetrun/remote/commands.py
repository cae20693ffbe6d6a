"""Commands of fleetrun on several hosts at once, by ssh: `doctor` and `ps`."""

from __future__ import annotations

import json
import os
import selectors
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from fleetrun.plan import hosts
from fleetrun.remote.sshconnection import OPTIONS, SSH_FAULT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fleetrun.plan.hostfile import HostEntry

# What the other end runs: folder, variables and words come on its standard input, so that nobody
# sees them in a list of processes. It says first at which address ssh has reached it.
_BOOTSTRAP = (
    "import json, os, sys\n"
    "print('fleetrun address', (os.environ.get('SSH_CONNECTION', '').split() + [''] * 3)[2])\n"
    "sys.stdout.flush()\n"
    "told = json.loads(sys.stdin.readline() or '{}')\n"
    "if told:\n"
    "    os.chdir(told['folder'])\n"
    "    os.environ.update(told['environ'])\n"
    "    os.execv(sys.executable, [sys.executable, '-m', 'fleetrun', *told['words']])\n"
)
# What a command says is some kilobytes.
_MOST, _CHUNK = 1 << 22, 1 << 16
_ADDRESS = b"fleetrun address "


class HostOrder(NamedTuple):
    """What a host is to do: run fleetrun WORDS in FOLDER, with ENVIRON beside its own."""

    folder: str
    environ: Mapping[str, str]
    words: tuple[str, ...]


class CommandResult(NamedTuple):
    """What became of a command: its exit code, its output, and its last words where it failed."""

    code: int
    said: bytes
    last: str

    @property
    def is_of_ssh(self) -> bool:
        """Whether ssh has ended so, not fleetrun."""
        return self.code < 0 or self.code == SSH_FAULT

    @property
    def address(self) -> str:
        """The address at which ssh has reached the host; nothing where its sshd knows none."""
        lines = [line for line in self.said.splitlines() if line.startswith(_ADDRESS)]
        word = lines[-1][len(_ADDRESS) :].decode(errors="replace").strip() if lines else ""
        return word if hosts.is_address(word) else ""


def run_on_all(
    entries: Sequence[HostEntry],
    ssh: Sequence[str],
    orders: Sequence[HostOrder | None],
    limit_s: float,
) -> list[CommandResult]:
    """Run on each of ENTRIES its one of ORDERS (None: nothing) by SSH, all at the same time.

    One that takes longer than LIMIT_S seconds is given up.
    """

    def ask(one: tuple[HostEntry, HostOrder | None]) -> CommandResult:
        return _ask([*ssh, *OPTIONS, one[0].target], one[1], limit_s)

    with ThreadPoolExecutor(max(len(entries), 1)) as pool:
        return list(pool.map(ask, zip(entries, orders, strict=True)))


def _ask(ssh: Sequence[str], order: HostOrder | None, limit_s: float) -> CommandResult:
    """Return the exit code, the output and the last words of the other end that gets ORDER."""
    command = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(_BOOTSTRAP)}"
    text = b"" if order is None else json.dumps(order._asdict()).encode() + b"\n"
    try:
        process = subprocess.Popen(
            [*ssh, command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as fault:
        return CommandResult(-1, b"", os.strerror(fault.errno or 0))
    with process:
        said, noted, trouble = _heard(process, text, limit_s)
        if trouble:
            process.kill()
    lines = noted.decode(errors="replace").strip().splitlines()
    code = process.returncode
    return CommandResult(code, said, trouble or (lines[-1] if lines else f"exit code {code}"))


def _heard(
    process: subprocess.Popen[bytes], text: bytes, limit_s: float
) -> tuple[bytes, bytes, str]:
    """Give PROCESS the TEXT, and return its output, its errors, and why not all of it was heard."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with suppress(BrokenPipeError):
        process.stdin.write(text)
        process.stdin.close()
    parts: dict[int, bytearray] = {
        stream.fileno(): bytearray() for stream in (process.stdout, process.stderr)
    }
    out, err = parts.values()
    until = time.monotonic() + limit_s
    trouble = ""
    with selectors.DefaultSelector() as selector:
        for fd in parts:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map() and not trouble:
            for key, _ in selector.select(max(until - time.monotonic(), 0.0)):
                part = os.read(key.fd, _CHUNK)
                parts[key.fd] += part
                if not part:
                    selector.unregister(key.fd)
            if len(out) + len(err) > _MOST:
                trouble = "it says too much"
            elif time.monotonic() >= until:
                trouble = f"no answer within {limit_s:g} s"
    return bytes(out), bytes(err), trouble
