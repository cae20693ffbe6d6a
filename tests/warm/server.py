"""Forks ranks from processes that hold Paddle: most of what `import paddle` costs is spent once.

Run by the Python of one Paddle: `server.py SOCKET`. It ends when nobody has its standard input open
for writing any more. A rank that wants to be forked sends its descriptors, arguments, folder and
environment (sitecustomize.py in this folder does), and gets the exit code.

A rank is forked from a process that has imported Paddle without any hooks; it finds the modules
when it imports Paddle itself, so what waits for that import happens then. There is such a process
for each of the settings in `_SETTINGS`, which count when Paddle is imported. Ranks with other flags
are forked from a process that holds no more than the library and the code of Paddle's modules, and
import Paddle as always.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import marshal
import os
import re
import select
import shutil
import signal
import socket
import sys
import warnings
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING

# As the checkers know it.
sys.path[0] = str(Path(__file__).parents[1])
from warm.ranks import Imported, Wanted, is_elsewhere, move_to_host_of, run  # noqa: E402

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Iterable

# Standard input, output and error of a rank, and through what it answers if it is asked something.
_DESCRIPTORS = 4
_SIZE_BYTES = 4
_READ_BYTES = 1 << 20
# The flags with which processes import Paddle for others.
_SETTINGS: tuple[dict[str, str], ...] = ({}, {"FLAGS_enable_pir_api": "0"})
# What a script sets by itself before it imports Paddle; what is indented is for static graphs.
_OWN_FLAG = re.compile(
    r"""^( *)os\.environ(?:\.setdefault\(|\[)"(FLAGS_\w+)"(?:, |\] = )"(\w*)\"""", re.MULTILINE
)
# What most ranks load of fleetrun.
_INJECT = Path(__file__).parents[2] / "fleetrun" / "inject"
# A CPU has none of them.
_DEVICES = "FLAGS_selected_"


def _load_libraries(paddle: Path) -> None:
    for library in sorted(paddle.glob("libs/*.so*")):
        with suppress(OSError):
            ctypes.CDLL(str(library))
    for library in paddle.glob("*/libpaddle.so"):
        ctypes.CDLL(str(library))


def _starts_threads(paddle: Path) -> bool:
    """Whether the libraries of PADDLE start threads when they are loaded, as 2.6.2's do.

    A fork has no such thread, and destructors of the library wait for it: ranks end without them.
    """
    pid = os.fork()
    if not pid:
        _load_libraries(paddle)
        os._exit(len(list(Path("/proc/self/task").iterdir())) > 1)
    return os.waitpid(pid, 0)[1] != 0


def _load_all_but_paddle(modules: list[tuple[str, str]]) -> None:
    """Import those of MODULES, which come with Paddle, that are not its own; read its code."""
    for name, _ in modules:
        if name.partition(".")[0] != "paddle":
            # Some are made by others, and cannot be imported by their name.
            with suppress(Exception):
                importlib.import_module(name)
    _read_code([path for name, path in modules if name.partition(".")[0] == "paddle"])


def _read_code(paths: Iterable[str]) -> None:
    """Read the code of the modules in PATHS, for all imports in ranks."""
    codes: dict[str, types.CodeType] = {}
    for path in paths:
        if path.endswith(".py"):
            code = SourceFileLoader(path, path).get_code(path)
            if code is not None:
                codes[path] = code
    read = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, fullname: str) -> types.CodeType | None:
        return codes.get(self.path) or read(self, fullname)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]


class _Server:
    """The ranks that were forked here, and who waits for the end of each."""

    def __init__(self, source: socket.socket, receive: Callable[[], Wanted | None]) -> None:
        self._source = source
        self._receive = receive
        self._children: dict[int, socket.socket] = {}
        # Those that wait for the end of a rank on another host.
        self._waiting: set[int] = set()

    def serve(self) -> Wanted | None:
        """Serve until standard input or SOURCE ends; in a child, return what it is to run."""
        source = self._source.fileno()
        while True:
            exits = {os.pidfd_open(pid): pid for pid in self._children}
            callers = {caller.fileno(): pid for pid, caller in self._children.items()}
            try:
                ready, _, _ = select.select([0, source, *exits, *callers], [], [])
            finally:
                for pidfd in exits:
                    os.close(pidfd)
            for descriptor in ready:
                if descriptor == 0:
                    self._end()
                    return None
                if descriptor == source:
                    wanted = self._receive()
                    if wanted is not None and not self._fork(wanted):
                        return wanted
                elif descriptor in exits:
                    self._tell(exits[descriptor])
                elif callers[descriptor] in self._children:
                    # The process that stands for the rank is gone; the rank goes, too.
                    self._kill(callers[descriptor])
                    self._tell(callers[descriptor])

    def _fork(self, wanted: Wanted) -> int:
        """Fork a rank; return its pid, 0 in itself."""
        is_moved = is_elsewhere(wanted.caller)
        pid = os.fork()
        if pid:
            for descriptor in wanted.descriptors:
                os.close(descriptor)
            self._children[pid] = wanted.caller
            if is_moved:
                self._waiting.add(pid)
            return pid
        for number, descriptor in enumerate(wanted.descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        for number in range(len(wanted.descriptors), _DESCRIPTORS):
            os.close(number)
        for connection in (self._source, *self._children.values()):
            connection.close()
        try:
            move_to_host_of(wanted.caller)
        except OSError:
            # Its host has gone meanwhile. Paddle's destructors would wait for what a fork lacks.
            os._exit(1)
        wanted.caller.close()
        return 0

    def _kill(self, pid: int) -> None:
        """Kill the rank of PID, so that it is gone when PID is."""
        rank = ""
        if pid in self._waiting:
            rank = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        os.kill(int(rank or pid), signal.SIGKILL)

    def _tell(self, pid: int) -> None:
        self._waiting.discard(pid)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        with suppress(OSError), self._children.pop(pid) as caller:
            caller.sendall(code.to_bytes(2, "big", signed=True))

    def _end(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)


def _received(source: socket.socket, descriptors: int) -> tuple[bytes, list[int]]:
    """Return the next message of SOURCE; it has as many DESCRIPTORS, if SOURCE has not ended."""
    size, numbers, _, _ = socket.recv_fds(source, _SIZE_BYTES, descriptors)
    text = b""
    while size and len(text) < int.from_bytes(size, "big"):
        text += source.recv(min(_READ_BYTES, int.from_bytes(size, "big") - len(text)))
    return text, numbers


class _Importer:
    """A process that has imported Paddle, as we see it."""

    def __init__(self, flags: dict[str, str]) -> None:
        self.flags = flags
        self.pipe, theirs = socket.socketpair()
        reader, writer = socket.socketpair()
        if not os.fork():
            # A rank's output ends when nobody has it open.
            _close_all_but({*range(_DESCRIPTORS), theirs.fileno(), writer.fileno()})
            _serve_imported(theirs, writer, flags)
        theirs.close()
        writer.close()
        with reader.makefile("rb") as file:
            self.modules: list[tuple[str, str]] = marshal.load(file)  # noqa: S302 - our own child's
        reader.close()

    def fork(self, text: bytes, wanted: Wanted) -> None:
        """Let that process fork what is WANTED, of which TEXT tells."""
        descriptors = [wanted.caller.fileno(), *wanted.descriptors]
        socket.send_fds(self.pipe, [len(text).to_bytes(_SIZE_BYTES, "big")], descriptors)
        self.pipe.sendall(text)
        wanted.caller.close()
        for descriptor in wanted.descriptors:
            os.close(descriptor)


def _close_all_but(kept: set[int]) -> None:
    for descriptor in [int(link.name) for link in Path("/proc/self/fd").iterdir()]:
        if descriptor not in kept:
            # The one that the folder was read by is closed.
            with suppress(OSError):
                os.close(descriptor)


def _serve_imported(source: socket.socket, ready: socket.socket, flags: dict[str, str]) -> None:
    """Import Paddle with FLAGS; serve what SOURCE asks for. Never return."""
    os.environ.update(flags)
    imported = Imported.load(flags)
    with ready.makefile("wb") as file:
        marshal.dump(imported.files(), file)
    ready.close()
    _read_code(map(str, _INJECT.rglob("*.py")))
    gc.collect()
    gc.freeze()

    def receive() -> Wanted | None:
        text, numbers = _received(source, 1 + _DESCRIPTORS)
        if not numbers:
            os._exit(0)
        return Wanted.parsed(text, socket.socket(fileno=numbers[0]), numbers[1:])

    wanted = _Server(source, receive).serve()
    if wanted is None:
        os._exit(0)
    run(wanted, imported)


def _flags(wanted: Wanted) -> dict[str, str] | None:
    """Return the flags that count when WANTED imports Paddle; None if only it can know."""
    given = {
        name: value
        for name, value in wanted.environ.items()
        if name.startswith("FLAGS_") and not name.startswith(_DEVICES)
    }
    if wanted.environ.get("OMP_NUM_THREADS", "1") != "1":
        return None
    text = wanted.script.read_text(encoding="utf-8") if wanted.script.exists() else ""
    own = _OWN_FLAG.findall(text)
    is_static = "--static" in wanted.words
    return given | {name: value for indent, name, value in own if is_static or not indent}


def _reserve_descriptors() -> None:
    """Keep descriptors of ours out of the places that a rank's will take."""
    while os.open(os.devnull, os.O_RDWR) < _DESCRIPTORS - 1:
        pass


def main() -> None:
    warnings.simplefilter("ignore")
    _reserve_descriptors()
    # One thread, or there would be others at the fork.
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    paddle = next(place for entry in sys.path if (place := Path(entry) / "paddle").is_dir())
    if not _starts_threads(paddle):
        _load_libraries(paddle)
    importers = [_Importer(_SETTINGS[0])]
    _load_all_but_paddle(importers[0].modules)
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"{sys.argv[1]}.new")
    listener.listen()
    # Who sees it can connect.
    Path(f"{sys.argv[1]}.new").rename(sys.argv[1])

    def receive() -> Wanted | None:
        caller, _ = listener.accept()
        text, descriptors = _received(caller, _DESCRIPTORS)
        if not text:
            # Killed before it could ask.
            caller.close()
            return None
        wanted = Wanted.parsed(text, caller, descriptors)
        flags = _flags(wanted)
        if flags not in _SETTINGS:
            return wanted
        importer = [known for known in importers if known.flags == flags]
        if not importer:
            # Some test runs need none.
            importer = [_Importer(flags)]
            importers.extend(importer)
        importer[0].fork(text, wanted)
        return None

    wanted = _Server(listener, receive).serve()
    if wanted is not None:
        for importer in importers:
            importer.pipe.close()
        run(wanted, None)
    for importer in importers:
        importer.pipe.close()
    for _ in importers:
        os.wait()
    place = Path(sys.argv[1]).parent
    shutil.rmtree(place)
    with suppress(OSError):
        # The other Paddle's may be there.
        place.parent.rmdir()


if __name__ == "__main__":
    main()
