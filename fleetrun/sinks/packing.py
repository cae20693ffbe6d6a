"""Writes the bytecode file from which the next launch loads its modules."""

from __future__ import annotations

import os
import time
from contextlib import suppress

from fleetrun import bytecode
from fleetrun.run.observers import Sink
from fleetrun.typehints import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import CodeType

    from fleetrun.run.isolation import IsolatedCall
    from fleetrun.run.loop import Waiting

# The modules of a plain launch, in the order in which they are complete; tests/test_floors.py
# compares them with a launch.
EARLY = """
conversion modes errors model plan plan.kinds records records.variables options argv configfile
plan.origin plan.hosts records.secrets request colors plan.visible plan.masks run standard run.proc
probe.files probe.devices plan.command plan.communication plan.use plan.devices records.names
plan.environment probe.scripts probe.plugins probe probe.tcp engines.ports engines planner
run.terminal run.descriptors run.loop run.gathering records.folder run.events run.observers sinks
records.lockfile sinks.rundir sinks.outlet sinks.stderr run.libc run.children run.policy run.worker
run.framing run.guard run.signals supervisor job plan.layout modes.collective engines.local
"""
LATE = """
sinks.console records.reading records.eventfile sinks.eventlog sinks.launchfile sinks.manifest
records.outputtimes sinks.outputtimes sources records.heartbeat sources.watch run.itself
sinks.metrics postmortem postmortem.ending plan.brief postmortem.kernelfacts records.planfile
records.arguments sinks.git plan.hostlist engines.detect records.installed records.manifestfile
replay plan.shell plan.render
"""
# Together with the other late work; a job that is over by then does without.
_AFTER_S, _WRITE_S = 0.4, 20.0


class Packing(Sink):
    """Writes the file once, in a process of its own, where Python would write bytecode."""

    _call: IsolatedCall | None = None

    def open(self, waiting: Waiting) -> None:
        """Write when the ranks have started."""
        self._waiting = waiting
        waiting.timer("packing", time.monotonic() + _AFTER_S, self._write)

    def close(self) -> None:
        """Write nothing if the launch has ended before that."""
        if self._call is not None:
            self._call.abandon()

    def _write(self) -> None:
        from fleetrun.run.isolation import IsolatedCall  # no start needs it

        if os.access(os.path.dirname(path()), os.W_OK):
            with suppress(OSError):
                self._call = IsolatedCall(write)
                self._call.watch(self._waiting, self._on_end, _WRITE_S)

    def _on_end(self, _: object) -> None:
        self._call = None


def path() -> str:
    """Return the path of the file."""
    from importlib.util import cache_from_source

    return cache_from_source(_source())


def _source() -> str:
    return os.path.join(os.path.dirname(bytecode.__file__), "packed.py")


def write() -> None:
    """Write the file with the modules of a launch."""
    from importlib.machinery import SourceFileLoader
    from importlib.util import MAGIC_NUMBER
    from marshal import dumps

    with suppress(OSError), open(path(), "rb") as file:
        if any(file.read(8)[4:]):
            # Whoever compiles by hashes of sources does not trust their times (PEP 552).
            return
    source = _source()
    loader = SourceFileLoader("fleetrun.packed", source)
    status = os.stat(source)
    plain = loader.source_to_code(loader.get_data(source), source)
    early, late = (tuple(_rows(names.split())) for names in (EARLY, LATE))
    parts = bytecode.FORMAT, early, tuple(map(dumps, late))
    code = plain.replace(
        co_consts=tuple(parts if const is ... else const for const in plain.co_consts)
    )
    header = [number & 0xFFFFFFFF for number in (0, int(status.st_mtime), status.st_size)]
    data = MAGIC_NUMBER + b"".join(number.to_bytes(4, "little") for number in header) + dumps(code)
    # At once, by renaming; nobody may write it who may not write the source.
    loader.set_data(path(), data, _mode=status.st_mode & 0o666 | 0o200)


def _rows(names: Sequence[str]) -> Iterator[bytecode.Row]:
    """Yield the rows of the modules NAMES, and of packages before their own modules."""
    root = os.path.dirname(bytecode.__file__)
    begun = {"fleetrun"}
    for name in (f"fleetrun.{name}" for name in names):
        parts = name.split(".")
        for length in range(2, len(parts) + 1):
            part = ".".join(parts[:length])
            file = "/".join(parts[1:length])
            file += "/__init__.py" if os.path.isdir(os.path.join(root, file)) else ".py"
            source = os.path.join(root, file)
            if part == name:
                status = os.stat(source)
                yield name, file, status.st_size, status.st_mtime, _compiled(source)
            elif part not in begun:
                yield part, file, 0, 0.0, None
            begun.add(part)


def _compiled(source: str) -> CodeType:
    """Return the code of the file SOURCE, without some that a launch can do without.

    Docstrings and columns are a sixth of what it reads and keeps; without columns, tracebacks have
    no marks below their lines. The import of `__future__` would load that module, for 0.2 ms.
    """
    import ast

    flags = 0
    with open(source, "rb") as file:
        tree = ast.parse(file.read())
    for at, statement in enumerate(tree.body):
        match statement:
            case ast.ImportFrom(module="__future__", names=[ast.alias(name="annotations")]):
                # The name, of which nothing makes use, and what the import tells the compiler.
                tree.body[at : at + 1] = ast.parse("annotations = ...").body
                flags = annotations.compiler_flag
    for node in ast.walk(tree):
        match node:
            case (
                ast.FunctionDef(body=[ast.Expr(value=ast.Constant(value=str()) as text), *_])
                | ast.ClassDef(body=[ast.Expr(value=ast.Constant(value=str()) as text), *_])
            ):
                # The same for all, and no other constant of theirs.
                text.value = "See the source."
        place = vars(node)
        if "lineno" in place:
            place.update(end_lineno=place["lineno"], col_offset=-1, end_col_offset=-1)
    code: CodeType = compile(tree, source, "exec", flags, dont_inherit=True)
    return code
