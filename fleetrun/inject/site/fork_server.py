"""Waits with Paddle imported, in a Python that was started like a rank, and forks ranks.

The guard starts it as it starts a rank; `sitecustomize` calls `serve` before anything else. A fork
returns from `serve` in the state of a new Python of that rank: before the user's `sitecustomize`,
and before the script. So the interpreter itself runs the script, however it was started, and exits
as usual.

Imported modules are hidden until the script imports them. Paddle's start happens then, too: it
reads the flags, finds the devices, chooses one, and registers its exit functions.
"""

from __future__ import annotations

import _socket
import atexit
import ctypes
import gc
import io
import marshal
import os
import random
import signal
import sys
import warnings
from contextlib import suppress
from importlib import import_module, invalidate_caches
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import ModuleType

    from fleetrun.inject.site import import_output, variable_reads
else:
    # As this module was loaded: scripts may have modules of their names.
    _beside = sys.modules["sitecustomize"]._beside
    import_output, variable_reads = map(_beside, ("import_output", "variable_reads"))

# The descriptor of the guard's socket, the guard's pid, and the modules; padded to make room.
VARIABLE = "FLEETRUN_FORK_SERVER"
# The functions that Paddle's start calls, in order.
_START = (
    "init_gflags",
    "init_glog",
    "init_memory_method",
    "init_devices",
    "init_tensor_operants",
    "init_default_kernel_signatures",
)
# Removes Paddle's handlers of signals, and Python's: PaddleFormers calls it when it is imported.
_NO_HANDLERS = "disable_signal_handler"
_CORE = "paddle.base.core"
# Where Paddle has its default device, and becomes dynamic, for which it chooses one.
_FRAMEWORK, _DYGRAPH = "paddle.base.framework", "paddle.base.dygraph.base"
# The versions of Paddle that start a thread when loaded, the sampler of brpc's bvar, which their
# own fork handler starts again.
_SAMPLING = ("2.6.",)
# Device files that any process may have open.
_PLAIN = (
    "/dev/null",
    "/dev/zero",
    "/dev/urandom",
    "/dev/random",
    "/dev/tty",
    "/dev/pts",
    "/dev/shm",
)
# What `random` draws at a time, and the most draws of an import that are done again.
_BITS, _MOST_DRAWN = 32, 1000
_LENGTH = 8
_INT = 4
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class Unfit(Exception):
    """Ranks cannot be forked from this process: the argument says why."""


def serve() -> None:
    """Fork ranks as the guard requests, and return only in them; this process ends here."""
    number, guard, modules, *_ = os.environ.pop(VARIABLE).split(":")
    source = _socket.socket(fileno=int(number))
    os.set_inheritable(int(number), False)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(guard):
        os._exit(0)
    try:
        environ = dict(os.environ)
        policy = _yield_to_others()
        loaded = Loaded(environ)
        try:
            loaded.load([name for name in modules.split(",") if name])
        except Unfit as why:
            _send(source, ("unfit", str(why)))
            os._exit(0)
        gc.freeze()
        os.sched_setscheduler(0, *policy)
        name = _name(b"fork-server")
        _send(source, ("ready", _own_bytes()))
        while True:
            count, _ = _receive(source)
            parked = _park(source, count)
            if parked is not None:
                break
        order, fds = loaded.suitable(parked)
        _name(name)
        _be_rank(order, fds, loaded)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        with suppress(OSError):
            _send(source, ("unfit", repr(error)))
        os._exit(1)


def _yield_to_others() -> tuple[int, os.sched_param]:
    """Let training ranks go first while this process imports; return the previous policy."""
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    # Only with the right to raise priorities can a process leave SCHED_IDLE. A child tries it.
    pid = os.fork()
    if not pid:
        try:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            os.sched_setscheduler(0, *before)
        except BaseException:
            os._exit(1)
        os._exit(0)
    comes_back = os.waitpid(pid, 0)[1] == 0
    # Not permitted everywhere.
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE if comes_back else os.SCHED_BATCH, os.sched_param(0))
    return before


# -- with the guard --------------------------------------------------------------------------------


def _framed(message: Any) -> bytes:
    text = marshal.dumps(message)
    return len(text).to_bytes(_LENGTH, "little") + text


def _send(to: _socket.socket, message: tuple[Any, ...]) -> None:
    to.sendall(_framed(message))


def _receive(source: _socket.socket) -> tuple[Any, list[int]]:
    """Return the guard's message and the descriptors that came with it; exit when it has ended."""
    fds: list[int] = []
    length = int.from_bytes(_read(source, _LENGTH, fds), "little")
    return marshal.loads(_read(source, length, fds)), fds  # noqa: S302 - our own guard's


def _read(source: _socket.socket, length: int, fds: list[int]) -> bytes:
    text = b""
    while len(text) < length:
        part, ancillary, _, _ = source.recvmsg(length - len(text), _socket.CMSG_SPACE(2 * _INT))
        if not part:
            os._exit(0)
        text += part
        for _level, _kind, numbers in ancillary:
            fds += [
                int.from_bytes(numbers[at : at + _INT], sys.byteorder)
                for at in range(0, len(numbers), _INT)
            ]
    return text


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _park(source: _socket.socket, count: int) -> _socket.socket | None:
    """Fork COUNT processes, children of the guard; return in each of them the guard's connection.

    The guard gets the other ends, and a process ends when the guard closes its end.
    """
    pairs = [_socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM) for _ in range(count)]
    pids_in, pids_out = os.pipe()
    with warnings.catch_warnings():
        # Newer Pythons warn of forks beside threads.
        warnings.simplefilter("ignore")
        middle = _forked()
        if middle == 0:
            for ours, theirs in pairs:
                pid = _forked()
                if pid is None:
                    break
                if pid == 0:
                    fd = ours.detach()
                    for pair in pairs:
                        for end in pair:
                            end.close()
                    source.close()
                    _close((pids_in, pids_out))
                    return _socket.socket(fileno=fd)
                os.write(pids_out, pid.to_bytes(_INT, "little"))
                theirs.close()
            os._exit(0)
    os.close(pids_out)
    with open(pids_in, "rb") as file:
        pids = file.read()
    if middle is not None:
        # From now on they are the guard's children.
        os.waitpid(middle, 0)
    for at, (ours, theirs) in enumerate(pairs):
        ours.close()
        # Missing if no more processes are allowed.
        pid = int.from_bytes(pids[at * _INT : (at + 1) * _INT], "little")
        sent = theirs.fileno().to_bytes(_INT, sys.byteorder)
        source.sendmsg([_framed(("parked", pid))], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, sent)])
        theirs.close()
    return None


def _forked() -> int | None:
    """Fork this process; None if no more processes are allowed."""
    try:
        return os.fork()
    except OSError:
        return None


def _name(name: bytes) -> bytes:
    """Set the name of this process, and return the previous one."""
    with open("/proc/self/comm", "rb+", buffering=0) as file:
        before = file.read().rstrip(b"\n")
        file.write(name)
    return before


# -- in the rank -----------------------------------------------------------------------------------


def _be_rank(order: Mapping[str, Any], fds: list[int], loaded: Loaded) -> None:
    """Become the rank of ORDER, in the state of a new Python."""
    os.setsid()
    threading: Any = sys.modules.get("threading")
    if threading is not None:
        # Older Pythons leave it what it was before the fork.
        threading.main_thread()._set_native_id()
    output, errors = fds
    os.dup2(output, 1)
    os.dup2(errors, 2)
    _close(fds)
    if not order["takes_stdin"]:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
    with suppress(OSError):
        # CPUs may have been taken away; a new process would not have them either.
        os.sched_setaffinity(0, order["cpus"])
    sys.stdin = _standard_input()
    _set_environment(order["env"], order["argv"])
    invalidate_caches()
    loaded.offer(order["env"])


def _standard_input() -> Any:
    """Return a new sys.stdin for descriptor 0, which may be another file now."""
    old: Any = sys.stdin
    file: Any = open(0, "rb", closefd=False)  # noqa: SIM115 - it lives as long as the process
    file.raw.name = old.name
    new = io.TextIOWrapper(
        file,
        encoding=old.encoding,
        errors=old.errors,
        newline="\n",
        line_buffering=old.line_buffering,
        write_through=old.write_through,
    )
    new.mode = "r"  # type: ignore[misc]
    sys.__stdin__ = new  # type: ignore[misc]
    return new


def _set_environment(environ: Mapping[bytes, bytes], argv: Sequence[str]) -> None:
    """Replace environment and arguments, also where /proc shows them."""
    with open("/proc/self/stat", "rb") as file:
        words = file.read().rpartition(b")")[2].split()
    os.environ.clear()
    for name, value in environ.items():
        os.environb[name] = value
    # Nothing refers to the old strings now.
    block = b"".join(b"%s=%s\0" % pair for pair in environ.items())
    _overwrite(int(words[47]), int(words[48]), block)
    if list(argv) != sys.orig_argv:
        sys.argv[1:] = argv[_fixed() :]
        sys.orig_argv[:] = argv
        _overwrite(int(words[45]), int(words[46]), b"".join(os.fsencode(w) + b"\0" for w in argv))


def _overwrite(start: int, end: int, text: bytes) -> None:
    """Write as much of TEXT as fits over the strings that the kernel placed there."""
    if start:
        ctypes.memmove(start, text[: end - start - 1].ljust(end - start, b"\0"), end - start)


def _fixed() -> int:
    """Return how many words of our command line precede the script's own arguments."""
    return len(sys.orig_argv) - len(sys.argv) + 1


def _own_bytes() -> int:
    """Return the bytes of this process that are not shared with a file: its cost for the host."""
    with open("/proc/self/status", "rb") as file:
        rows = dict(line.split(b":", 1) for line in file)
    return int(rows.get(b"RssAnon", b"0").split()[0]) * 1024


# -- loaded modules --------------------------------------------------------------------------------


class Loaded:
    """Modules that were imported with ENVIRON, and are hidden until the script imports them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._reads = variable_reads.VariableReads(environ)
        self._modules: dict[str, ModuleType] = {}
        # Root packages that bring all other modules.
        self._whole: set[str] = set()
        self._start: list[tuple[str, Callable[..., None], tuple[Any, ...]]] = []
        # The device on which Paddle is imported; and what makes it dynamic in ranks, by which it
        # chooses theirs.
        self._place: object = None
        self._become_dynamic: Callable[[], object] = bool
        # Calls of `atexit.register`, which ranks make in their own order.
        self._at_exit: list[tuple[Any, ...]] = []
        self._said = import_output.ImportOutput()
        self._logging = import_output.ImportLogging()
        # How many numbers of `random` imports draw.
        self._drawn = 0
        self._warnings = import_output.ImportWarnings()
        self._finders: list[Any] = []
        # What imports have added to the path: setuptools, the folder of its own needs.
        self._folders: list[str] = []
        self._changed: dict[str, str] = {}
        # The environment that the rank was started with.
        self._given: Mapping[bytes, bytes] = {}

    def load(self, modules: Sequence[str]) -> None:
        """Import numpy, Paddle and MODULES, and hide them; raise Unfit if that prevents forking."""
        before, path, finders = set(sys.modules), list(sys.path), list(sys.meta_path)
        state = random.getstate()
        # As the interpreter sets it when it runs the script.
        if not getattr(sys.flags, "safe_path", False):
            script = sys.argv[0]
            sys.path.insert(
                0, os.getcwd() if script == "-m" else os.path.dirname(os.path.abspath(script))
            )
        known = set(sys.path)
        if modules:
            # It copies all variables, as ranks do again (`offer`); prometheus_client imports it.
            import_module("wsgiref.handlers")
        register = atexit.register

        def at_exit(function: Any, /, *words: Any, **named: Any) -> Any:
            self._at_exit.append((register, (function, *words), named))
            return function

        with (
            self._reads.noting(),
            import_output.replaced(atexit, "register", at_exit),
            self._said.keeping(),
            self._logging.noting(self._said.note),
            self._warnings.noting(self._said.note),
        ):
            sys.meta_path.insert(0, _AfterExecution(_CORE, self._put_off_start))
            sys.meta_path.insert(0, _AfterExecution(_FRAMEWORK, self._begin_on_cpu))
            self._import("numpy", _openblas_threads)
            self._import("paddle", _paddle_threads)
            for name in modules:
                self._import_unchanged(name)
            self._put_off_choice()
        held = _open_devices()
        if held:
            raise Unfit(f"importing {', '.join(('paddle', *modules))} opens {held}")
        self._drawn = _drawn(state)
        self._whole = {"paddle", *(name.partition(".")[0] for name in modules)}
        self._changed = {
            name: value for name, value in os.environ.items() if self._environ.get(name) != value
        }
        for name in set(sys.modules) - before:
            if name.partition(".")[0] not in sys.stdlib_module_names:
                self._modules[name] = sys.modules.pop(name)
        self._finders = [finder for finder in sys.meta_path if finder not in finders]
        self._folders = [folder for folder in sys.path if folder not in known]
        sys.path[:], sys.meta_path[:] = path, finders

    def _import(self, name: str, known_threads: Callable[[], int]) -> None:
        threads, self._reads.loading = _threads(), name
        try:
            import_module(name)
        except (Exception, SystemExit) as error:
            raise Unfit(f"{name} cannot be imported in advance ({error!r})") from None
        more = _threads() - threads
        if more > known_threads():
            raise Unfit(f"importing {name} starts {more} thread{'s' * (more != 1)}")

    def _import_unchanged(self, name: str) -> None:
        """Import a module that is not known; raise Unfit if it changes what ranks inherit."""
        before, files = _inherited(), set(_shared_files())
        self._import(name, int)
        after = _inherited()
        for what in before:
            if after[what] != before[what]:
                raise Unfit(f"importing {name} {what}")
        for file in sorted(set(_shared_files()) - files):
            raise Unfit(f"importing {name} leaves {file} open")

    def _put_off_start(self, core: ModuleType) -> None:
        """Leave Paddle's start to each rank: it reads flags and finds devices."""
        for name in (*_START, _NO_HANDLERS):
            real = getattr(core, name, None)
            if real is not None:
                setattr(core, name, self._noting(name, real))

    def _noting(self, name: str, real: Callable[..., None]) -> Callable[..., None]:
        return lambda *words: self._start.append((name, real, words))

    def _begin_on_cpu(self, framework: Any) -> None:
        """Set a default device: Paddle would look for GPUs, and so open CUDA, unfit for forks."""
        self._place = framework._global_expected_place_ = framework.core.CPUPlace()

    def _put_off_choice(self) -> None:
        """Leave the choice of a device to each rank, unless a module has made it."""
        framework: Any = sys.modules.get(_FRAMEWORK)
        if framework is None or framework._global_expected_place_ is not self._place:
            return
        if framework.global_var._functional_dygraph_context_manager is not None:
            dygraph: Any = sys.modules[_DYGRAPH]
            dygraph.disable_dygraph()
            self._become_dynamic = dygraph.enable_dygraph
        framework._global_expected_place_ = None

    def _refusal(self, environ: Mapping[bytes, bytes], argv: Sequence[str]) -> str:
        """Return why the rank with ENVIRON and ARGV must start normally; empty if it need not."""
        if list(argv[: _fixed()]) != sys.orig_argv[: _fixed()]:
            return "its command differs"
        name = self._reads.differs({os.fsdecode(k): os.fsdecode(v) for k, v in environ.items()})
        reader = self._reads.reader(name)
        reader = "Paddle" if reader in {None, "", "numpy", "paddle"} else reader
        return f"{name}, which is read when {reader} is loaded, has another value" if name else ""

    def suitable(self, source: _socket.socket) -> tuple[Mapping[str, Any], list[int]]:
        """Wait for an order that this process can serve; exit when the guard has ended."""
        while True:
            order, fds = _receive(source)
            why_not = self._refusal(order["env"], order["argv"])
            _send(source, ("refused", why_not) if why_not else ("forked", 0))
            if not why_not:
                source.close()
                return order, fds
            _close(fds)

    def offer(self, environ: Mapping[bytes, bytes]) -> None:
        """Let the rank, which was started with ENVIRON, import the loaded modules."""
        self._given = environ
        numpy = self._modules.get("numpy.random")
        if numpy is not None:
            # Otherwise all forks would draw the same numbers.
            numpy.seed()
        handlers: Any = sys.modules.get("wsgiref.handlers")
        if handlers is not None:
            handlers.BaseHandler.os_environ = handlers.read_environ()
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return a spec for the module NAME if it is hidden here."""
        del path, target
        module = self._modules.get(name)
        if module is None or "." in name:
            return None
        changed = self._reads.differs(os.environ)
        if changed:
            self._start_again(f"{changed} was set before {name} is imported, which reads it")
        real = module.__spec__
        spec = ModuleSpec(name, self, origin=getattr(real, "origin", None), is_package=True)  # type: ignore[arg-type]
        spec.submodule_search_locations = getattr(real, "submodule_search_locations", None)
        self._real = real
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module itself."""
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Complete the import."""
        module.__spec__ = self._real
        if self._real is not None:
            module.__loader__ = self._real.loader
        name = module.__name__
        if name not in self._whole:
            for hidden in [key for key in self._modules if key.partition(".")[0] == name]:
                sys.modules[hidden] = self._modules.pop(hidden)
            return
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self] + self._finders
        sys.path += [folder for folder in self._folders if folder not in sys.path]
        sys.modules.update(self._modules)
        self._modules.clear()
        for variable, value in self._changed.items():
            os.environ.setdefault(variable, value)
        # Paddle lets only the first rank print through this one.
        is_first = os.environ.get("PADDLE_TRAINER_ID", "0") == "0"
        self._logging.again(silent="" if is_first else "hapi")
        try:
            self._said.again()
        except Warning:
            self._start_again(f"importing {name} warns, which is an error here")
        self._warnings.filter_again()
        _draw(self._drawn)
        self._start_paddle()
        # `sitecustomize` waits for the first import after Paddle's start to restore faulthandler.
        handlers = (f for f in sys.meta_path if type(f).__name__ == "_CrashHandlerFinder")
        for finder in list(handlers):
            finder.find_spec("paddle.")  # type: ignore[call-arg]
        for called, real, _ in self._start:
            if called == _NO_HANDLERS:
                real()

    def _start_paddle(self) -> None:
        """Let Paddle read the flags, find the devices and register its exit functions."""
        core: Any = sys.modules.get(_CORE)
        for called, real, _ in self._start:
            setattr(core, called, real)
        for called, real, words in self._start:
            if called != _NO_HANDLERS:
                real(*words)
        self._become_dynamic()
        for words in self._at_exit:
            words[0](*words[1], **words[2])

    def _start_again(self, why: str) -> NoReturn:
        """Replace this process by a new Python, so that the script's settings count."""
        sys.stderr.write(f"fleetrun: {why}: this rank starts again, and imports it then.\n")
        sys.stderr.flush()
        for signum in (signal.SIGPIPE, signal.SIGXFSZ):
            # Python ignores them, and a new one would inherit that.
            signal.signal(signum, signal.SIG_DFL)
        os.execve(sys.orig_argv[0], sys.orig_argv, dict(self._given))  # noqa: S606


class _AfterExecution:
    """Calls CHANGE with the module NAME right after its execution."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._change = change

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of the module, with a loader that changes it."""
        del path, target
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _drawn(before: tuple[Any, ...]) -> int:
    """Return how many numbers were drawn from `random` since it was BEFORE; 0 if very many."""
    after = random.getstate()
    random.setstate(before)
    for count in range(_MOST_DRAWN):
        if random.getstate() == after:
            return count
        _draw(1)
    return 0


def _draw(count: int) -> None:
    for _ in range(count):
        random.getrandbits(_BITS)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _openblas_threads() -> int:
    """Return how many threads numpy may start: OpenBLAS stops its own before a fork."""
    with open("/proc/self/maps", encoding="utf-8") as file:
        return (os.cpu_count() or 1) if "openblas" in file.read().lower() else 0


def _paddle_threads() -> int:
    """Return how many threads this Paddle may start: those that it restarts in a fork."""
    version = getattr(sys.modules["paddle"], "__version__", "")
    return int(version.startswith(_SAMPLING))


def _open_devices() -> str:
    """Return an open device file, or nothing."""
    for _, file in _open_files():
        if file.startswith("/dev/") and not file.startswith(_PLAIN):
            return file
    return ""


def _open_files() -> Iterator[tuple[str, str]]:
    """Yield each open descriptor and its file."""
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            yield fd, os.readlink(f"/proc/self/fd/{fd}")


def _shared_files() -> Iterator[str]:
    """Yield open files that forks must not share: sockets, pipes and files open for writing."""
    for fd, file in _open_files():
        with suppress(OSError):
            with open(f"/proc/self/fdinfo/{fd}", "rb") as info:
                flags = int(dict(line.split(b":", 1) for line in info)[b"flags"], 8)
            # Devices are another obstacle.
            is_written = flags & os.O_ACCMODE != os.O_RDONLY and not file.startswith("/dev/")
            if is_written or not file.startswith("/"):
                yield file


_STREAM_SETTINGS = ("line_buffering", "write_through", "encoding", "errors")


def _inherited() -> dict[str, object]:
    """Return the state that a fork inherits and an import may change, by the words for a change."""
    with open("/proc/self/status", "rb") as file:
        rows = dict(line.split(b":", 1) for line in file)
    with open("/proc/self/limits", "rb") as file:
        limits = file.read()
    with open(f"/proc/self/task/{os.getpid()}/children", "rb") as file:
        processes = file.read()
    masks = [rows.get(name) for name in (b"SigBlk", b"SigIgn", b"SigCgt")]
    return {
        "changes the working folder": os.getcwd(),
        "changes the umask": rows.get(b"Umask"),
        "changes the limits": limits,
        "changes the handling of signals": (
            masks,
            [signal.getsignal(number) for number in sorted(signal.valid_signals())],
        ),
        "changes sys.argv": list(sys.argv),
        "changes standard output or error": [
            # A module may put anything in their place.
            [id(stream), *(getattr(stream, name, None) for name in _STREAM_SETTINGS)]
            for stream in (sys.stdout, sys.stderr)
        ],
        "starts a process": processes,
    }
