"""Forks ranks from a process that holds Paddle's library: most of what `import paddle` costs.

Run by the Python of one Paddle: `server.py SOCKET`. It ends with its standard input. A rank that
wants to be forked sends its descriptors, arguments, folder and environment (sitecustomize.py in
this folder does), and gets the exit code. The library and all modules from outside Paddle are
loaded before the fork, the code of Paddle's own modules is read; Paddle itself is imported by the
rank, so that what happens at its import (flags, hooks) happens there.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import marshal
import os
import random
import select
import signal
import socket
import sys
import types
import warnings
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

# Standard input, output and error of a rank.
_DESCRIPTORS = 3
_MOST_BYTES = 1 << 20

_codes: dict[str, types.CodeType] = {}


def _preload() -> None:
    """Load what does not depend on the environment of a rank."""
    warnings.simplefilter("ignore")
    # One thread, or there would be others at the fork.
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    paddle = next(place for entry in sys.path if (place := Path(entry) / "paddle").is_dir())
    if not _starts_threads(paddle):
        _load_libraries(paddle)
    for name, path in _imported_with_paddle():
        if name.partition(".")[0] != "paddle":
            # Some are made by others, and cannot be imported by their name.
            with suppress(Exception):
                importlib.import_module(name)
        elif path.endswith(".py"):
            code = SourceFileLoader(name, path).get_code(name)
            if code is not None:
                _codes[path] = code
    read = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, fullname: str) -> types.CodeType | None:
        return _codes.get(self.path) or read(self, fullname)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]
    gc.freeze()


def _load_libraries(paddle: Path) -> None:
    for library in sorted(paddle.glob("libs/*.so*")):
        with suppress(OSError):
            ctypes.CDLL(str(library))
    for library in paddle.glob("*/libpaddle.so"):
        ctypes.CDLL(str(library))


def _starts_threads(paddle: Path) -> bool:
    """Whether the libraries of PADDLE start threads when they are loaded, as 2.6.2's do.

    A fork has no such thread, and waits for it at its end for ever.
    """
    pid = os.fork()
    if not pid:
        _load_libraries(paddle)
        os._exit(len(list(Path("/proc/self/task").iterdir())) > 1)
    return os.waitpid(pid, 0)[1] != 0


def _imported_with_paddle() -> list[tuple[str, str]]:
    """Let a child import Paddle; return the modules that came with it, and their files."""
    reader, writer = os.pipe()
    if not os.fork():
        os.close(reader)
        before = set(sys.modules)
        importlib.import_module("paddle")
        found = [
            (name, getattr(module, "__file__", None) or "")
            for name, module in sys.modules.items()
            if name not in before
        ]
        with os.fdopen(writer, "wb") as pipe:
            marshal.dump(found, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        modules: list[tuple[str, str]] = marshal.load(pipe)  # noqa: S302 - our own child's
    os.wait()
    return modules


class _Server:
    """Who is connected, and which of our children it waits for."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen()
        self._children: dict[int, socket.socket] = {}

    def serve(self) -> dict[str, Any] | None:
        """Serve until standard input ends; in a child, return what it is to run."""
        listener = self._listener.fileno()
        while True:
            exits = {os.pidfd_open(pid): pid for pid in self._children}
            callers = {each.fileno(): pid for pid, each in self._children.items()}
            try:
                ready, _, _ = select.select([0, listener, *exits, *callers], [], [])
            finally:
                for pidfd in exits:
                    os.close(pidfd)
            for one in ready:
                if one == 0:
                    for pid in self._children:
                        os.kill(pid, signal.SIGKILL)
                    return None
                if one == listener:
                    wanted = self._accept()
                    if wanted is not None:
                        return wanted
                elif one in exits:
                    self._tell(exits[one])
                elif callers[one] in self._children:
                    # The process that stands for the rank is gone; the rank goes, too.
                    os.kill(callers[one], signal.SIGKILL)
                    self._tell(callers[one])

    def _accept(self) -> dict[str, Any] | None:
        caller, _ = self._listener.accept()
        text, descriptors, _, _ = socket.recv_fds(caller, _MOST_BYTES, _DESCRIPTORS)
        size = int.from_bytes(text[:4], "big")
        while len(text) - 4 < size:
            text += caller.recv(_MOST_BYTES)
        pid = os.fork()
        if pid:
            for descriptor in descriptors:
                os.close(descriptor)
            self._children[pid] = caller
            return None
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        self._listener.close()
        caller.close()
        for other in self._children.values():
            other.close()
        wanted: dict[str, Any] = marshal.loads(text[4:])  # noqa: S302 - from our own tests
        return wanted

    def _tell(self, pid: int) -> None:
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        with suppress(OSError), self._children.pop(pid) as caller:
            caller.sendall(code.to_bytes(2, "big", signed=True))


def _become(wanted: dict[str, Any]) -> None:
    """Be the rank: run its script as if Python had been started with it."""
    os.environ.clear()
    os.environ.update(wanted["environ"])
    os.chdir(wanted["folder"])
    import numpy as np  # loaded before

    # Forked children would all draw the same.
    random.seed()
    np.random.seed()  # noqa: NPY002 - what scripts draw from
    if not wanted["ignores_warnings"]:
        warnings.resetwarnings()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=False, write_through=True)  # type: ignore[union-attr]
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    given_script, *words = wanted["words"]
    sys.argv = [given_script, *words]
    script = str(Path(given_script).resolve())
    sys.orig_argv = wanted["argv"]
    given = os.environ.get("PYTHONPATH", "")
    sys.path[:1] = [str(Path(script).parent), *(one for one in given.split(os.pathsep) if one)]
    sys.path_importer_cache.clear()
    sys.modules.pop("sitecustomize", None)
    # The launcher's own, if it is a rank of fleetrun's; then this folder's, which does nothing now.
    with suppress(ImportError):
        importlib.import_module("sitecustomize")
    main = types.ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    code = compile(Path(script).read_bytes(), script, "exec")
    # Paddle's modules are many, and none of what they are made of goes away.
    gc.disable()
    _enable_after_paddle()
    exec(code, main.__dict__)  # noqa: S102 - that is the job


def _enable_after_paddle() -> None:
    """Collect garbage again when Paddle is imported."""

    class Finder:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            del name, path, target
            paddle = sys.modules.get("paddle")
            spec = getattr(paddle, "__spec__", None)
            if paddle is not None and not getattr(spec, "_initializing", False):
                gc.enable()
                sys.meta_path = [each for each in sys.meta_path if each is not self]

    sys.meta_path.insert(0, Finder())


def main() -> None:
    _preload()
    wanted = _Server(sys.argv[1]).serve()
    if wanted is None:
        return
    try:
        _become(wanted)
    except SystemExit:
        raise
    except BaseException as error:  # as Python's own main does
        sys.last_value = error
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


if __name__ == "__main__":
    main()
