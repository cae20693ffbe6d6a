"""What a forked process does to be a rank, from its script's first line to its exit code."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import inspect
import marshal
import os
import random
import signal
import socket
import sys
import threading
import types
import warnings
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

_PR_SET_PDEATHSIG = 1
_CLONE_FS = 0x200
_libc = ctypes.CDLL(None, use_errno=True)


class Wanted(NamedTuple):
    """A rank as it was asked for: with ARGV, of which WORDS are the script and its own."""

    argv: list[str]
    words: list[str]
    ignores_warnings: bool
    folder: str
    environ: dict[str, str]
    # Who is told the exit code, and the standard input, output and error.
    caller: socket.socket
    descriptors: list[int]

    @classmethod
    def parsed(cls, text: bytes, caller: socket.socket, descriptors: list[int]) -> Wanted:
        """Return what TEXT asks for, which a rank of our tests has sent."""
        return cls(**marshal.loads(text), caller=caller, descriptors=descriptors)  # noqa: S302

    @property
    def script(self) -> Path:
        """The script's path."""
        return Path(self.folder, self.words[0])


class Imported:
    """Paddle as one process has imported it: none is there until somebody imports it again."""

    def __init__(self, flags: dict[str, str]) -> None:
        self._flags = flags
        self._modules: dict[str, types.ModuleType] = {}
        self._others: list[tuple[str, str]] = []
        self._environ: dict[str, str] = {}
        self._spec = ModuleSpec("paddle", None)
        self._filters: list[Any] = []
        self._again: Wanted | None = None

    @classmethod
    def load(cls, flags: dict[str, str]) -> Imported:
        """Import Paddle with FLAGS, which are in the environment, and take it away."""
        self = cls(flags)
        environ, modules = dict(os.environ), set(sys.modules)
        with warnings.catch_warnings():
            warnings.resetwarnings()
            paddle = importlib.import_module("paddle")
            import numpy as np

            self._filters = list(warnings.filters)
        # Paddle calls it for operators of static graphs; it looks at all modules the first time.
        inspect.stack()
        # Its first call makes what later ones use.
        np.random.seed()  # noqa: NPY002 - what scripts draw from
        # It would copy the tables of all kernels to this process, and then free them.
        atexit.unregister(paddle.base.core.clear_kernel_factory)
        # The first is set in any case, and it was so before.
        self._environ = {"OMP_NUM_THREADS": "1"}
        self._environ |= {k: v for k, v in os.environ.items() if environ.get(k) != v}
        assert paddle.__spec__ is not None
        self._spec = paddle.__spec__
        for name in [name for name in sys.modules if name not in modules]:
            module = sys.modules[name]
            self._others.append((name, getattr(module, "__file__", None) or ""))
            if name.partition(".")[0] == "paddle":
                self._modules[name] = sys.modules.pop(name)
        return self

    def files(self) -> list[tuple[str, str]]:
        """Return the modules that came with Paddle, and their files."""
        return self._others

    def offer(self, wanted: Wanted) -> None:
        """Let the rank that is WANTED find Paddle when it imports it."""
        self._again = wanted
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of Paddle with this object as its loader."""
        del path, target
        if name != "paddle":
            return None
        given = {k: v for k, v in os.environ.items() if k.startswith("FLAGS_")}
        if {k: v for k, v in given.items() if not k.startswith("FLAGS_selected_")} != self._flags:
            self._start_again()
        spec = ModuleSpec(name, self, origin=self._spec.origin, is_package=True)  # type: ignore[arg-type]
        spec.submodule_search_locations = self._spec.submodule_search_locations
        return spec

    def _start_again(self) -> NoReturn:
        """Be a Python without all this: the script has set flags that count for its import."""
        assert self._again is not None
        os.chdir(self._again.folder)
        os.execve(sys.executable, self._again.argv, self._again.environ)  # noqa: S606

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """Return Paddle."""
        del spec
        return self._modules["paddle"]

    def exec_module(self, module: types.ModuleType) -> None:
        """Do what is left of importing Paddle: the rest of its modules, what it sets."""
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
        module.__spec__, module.__loader__ = self._spec, self._spec.loader
        sys.modules.update(self._modules)
        for name, value in self._environ.items():
            os.environ.setdefault(name, value)
        warnings.filters[:0] = self._filters  # type: ignore[index]
        # What was looked up in them counts no more.
        warnings._filters_mutated()  # type: ignore[attr-defined]


def run(wanted: Wanted, imported: Imported | None) -> NoReturn:
    """Run the script that is WANTED as if Python had been started with it, to the end."""
    code = 1
    try:
        _become(wanted, imported)
        code = 0
    except SystemExit as error:
        # While it lives: who has noted it would think that the script has caught it.
        _end(_exit_code(error.code))
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        error = error.with_traceback(trace)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error, trace)
        _end(-signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)
    _end(code)


def _exit_code(given: object) -> int:
    if given is None:
        return 0
    if isinstance(given, int):
        return given & 255
    print(given, file=sys.stderr, flush=True)
    return 1


def _end(code: int) -> NoReturn:
    """End as Python does, but without destructors: some wait for threads that no fork has."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _spaces_of(caller: socket.socket) -> Path:
    credentials = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return Path(f"/proc/{int.from_bytes(credentials[:4], sys.byteorder)}/ns")


def is_elsewhere(caller: socket.socket) -> bool:
    """Whether CALLER is on another host, which is made of namespaces (lab.py); or is gone."""
    with suppress(OSError):
        own = Path("/proc/self/ns/pid").readlink()
        return (_spaces_of(caller) / "pid").readlink() != own
    return True


def move_to_host_of(caller: socket.socket) -> None:
    """Be on the host of CALLER, as the child of a process that ends as this one does."""
    spaces = _spaces_of(caller)
    if not is_elsewhere(caller):
        return
    # The thread that Paddle 2.6 starts in a fork would keep its view of the files otherwise.
    _check(_libc.unshare(_CLONE_FS))
    for name in ("pid", "net", "uts", "ipc", "mnt"):
        fd = os.open(spaces / name, os.O_RDONLY)
        _check(_libc.setns(fd, 0))
        os.close(fd)
    # Who is forked now is a process of that host.
    rank = os.fork()
    if rank:
        code = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
        if code < 0:
            if -code != signal.SIGKILL:
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _become(wanted: Wanted, imported: Imported | None) -> None:
    os.environ.clear()
    os.environ.update(wanted.environ)
    os.chdir(wanted.folder)
    import numpy as np

    # Forked children would all draw the same.
    random.seed()
    np.random.seed()  # noqa: NPY002 - what scripts draw from
    if not wanted.ignores_warnings:
        warnings.resetwarnings()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=False, write_through=True)  # type: ignore[union-attr]
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    given_script, *words = wanted.words
    sys.argv = [given_script, *words]
    script = str(Path(given_script).resolve())
    sys.orig_argv = wanted.argv
    given = os.environ.get("PYTHONPATH", "")
    sys.path[:1] = [
        str(Path(script).parent),
        *(folder for folder in given.split(os.pathsep) if folder),
    ]
    # What was missing may be there; of a folder that is known, the time tells whether it changed.
    for folder in [path for path, finder in sys.path_importer_cache.items() if finder is None]:
        del sys.path_importer_cache[folder]
    if imported is not None:
        imported.offer(wanted)
    # The modules beside this one are none of the rank's.
    for name in ("sitecustomize", "warm", "warm.ranks"):
        sys.modules.pop(name, None)
    # The launcher's own, if it is a rank of fleetrun's; then this folder's, which does nothing now.
    with suppress(ImportError):
        importlib.import_module("sitecustomize")
    main = types.ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    code = compile(Path(script).read_bytes(), script, "exec")
    if imported is None:
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
                sys.meta_path = [finder for finder in sys.meta_path if finder is not self]

    sys.meta_path.insert(0, Finder())
