"""Runs first in every Python of a rank: reports a fatal exception, and shows stacks on request.

Below `fleetrun exec` it also runs first in every Python, and replaces Paddle's launcher by
fleetrun there.

Python imports `sitecustomize` when it starts, and the launcher puts this folder first on the ranks'
PYTHONPATH. The script must see no difference. A script may start an older Python, so the syntax
stays plain, and nothing is imported before it is needed.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    # For the type comments.
    from collections.abc import Callable, Sequence  # noqa: F401
    from importlib.machinery import ModuleSpec  # noqa: F401
    from types import ModuleType, TracebackType  # noqa: F401
    from typing import Any, NoReturn  # noqa: F401

# How the launcher recognises this descriptor; see fleetrun/postmortem/stackdumps.py.
_STACKS = "fleetrun-stacks"
# The package beside this folder, under a unique name.
_INJECT = "_fleetrun_inject"
# The most characters of a message or stack: some exceptions quote a whole tensor.
_MOST = 256 * 1024
# The most recorded frames of a stack, as many as the interpreter prints.
_FRAMES = 1000
# The most recorded failing exits that the script has caught.
_MOST_EXITS = 100
# Each of these variables requests a change to Paddle.
_FOR_PADDLE = (
    "FLEETRUN_STRATEGY_FILE",
    "FLEETRUN_PROFILE",
    "FLEETRUN_REPORT_UPDATES",
    "FLEETRUN_FLIGHT_RECORDER",
    "FLEETRUN_VERIFY",
)
# The longest life of a callback that has swallowed an interrupt.
_CALLBACK_S = 0.02


def _import_hidden():
    # type: () -> None
    """Import the `sitecustomize` of the user or the system, which this one hides."""
    here = os.path.dirname(__file__)
    sys.path[:] = [entry for entry in sys.path if entry != here]
    sys.path_importer_cache.pop(here, None)
    ours = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        # The module that is being imported must be in sys.modules, whichever it is.
        sys.modules.setdefault("sitecustomize", ours)


def _report_fatal_exceptions(path):
    # type: (str) -> None
    """Append the exception that ends this process to PATH; the printed output is unchanged."""
    import atexit

    pid = os.getpid()
    previous = sys.excepthook
    reported = [None]  # type: list[BaseException | None]

    def report(error):
        # type: (BaseException | None) -> None
        if (
            error is None
            or error is reported[0]
            or isinstance(error, (KeyboardInterrupt, SystemExit))
        ):
            return
        reported[0] = error
        # Forked children are not the rank. A failure of ours must not hide the user's.
        try:
            if os.getpid() == pid and _is_main(path):
                _rank_records().append(path, "exception", _describe(error))
        except Exception:
            pass

    def excepthook(kind, error, trace):
        # type: (type[BaseException], BaseException, TracebackType | None) -> None
        # A script may call it to print an exception, and continue.
        if not _is_called_by_the_script():
            report(error)
        previous(kind, error, trace)

    sys.excepthook = excepthook
    _record_exits(path, pid)
    # Libraries may replace our hook; Python keeps the exception in sys.last_value.
    atexit.register(lambda: report(getattr(sys, "last_value", None)))


def _is_called_by_the_script():
    # type: () -> bool
    """Whether the script's code is running, and no exception has ended it."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name in ("<module>", "_run_module_as_main")


def _record_exits(path, pid):
    # type: (str, int) -> None
    """Record a failing exit in PATH at once: the end of the process may take long."""
    from _thread import get_ident

    main = get_ident()
    caught = []  # type: list[None]

    class Mark:
        """Deleted with the exception; withdraws the record if the script has caught it."""

        def __del__(self):
            # type: () -> None
            if os.getpid() == pid and _is_called_by_the_script():
                caught.append(None)
                _rank_records().append(path, "exit", {"code": None})

    def note(error):
        # type: (SystemExit) -> None
        """Record that ERROR ends the rank, if its code is not 0."""
        try:
            code = error.code
            code = 0 if code is None else code & 255 if isinstance(code, int) else 1
            is_main = os.getpid() == pid and get_ident() == main and _is_main(path)
            # A script that catches them again and again must not fill the disk.
            if code and is_main and len(caught) < _MOST_EXITS:
                _rank_records().append(path, "exit", {"code": code})
                vars(error)["fleetrun"] = Mark()
        except Exception:
            pass

    _note_exits(note)


def _note_exits(note):
    # type: (Callable[[SystemExit], None]) -> None
    """Call NOTE with what sys.exit, exit and quit raise."""
    import builtins

    leave = sys.exit

    def exit(*status):  # noqa: A001 - it replaces that one
        # type: (object) -> NoReturn
        try:
            leave(*status)  # type: ignore[arg-type]
        except SystemExit as error:
            note(error)
            raise

    exit.__doc__ = leave.__doc__
    sys.exit = exit
    # The class of `exit` and `quit`.
    quitter = type(getattr(builtins, "exit", None))  # type: Any
    if quitter.__name__ == "Quitter":
        call = quitter.__call__

        def __call__(self, code=None):
            # type: (object, object) -> None
            try:
                call(self, code)
            except SystemExit as error:
                note(error)
                raise

        quitter.__call__ = __call__


def _is_main(path):
    # type: (str) -> bool
    """Whether this is the rank's first Python, not one that another Python of it has started."""
    mark = b"\0FLEETRUN_RECORDS=" + os.fsencode(path) + b"\0"
    pid = os.getppid()
    while pid > 1:
        try:
            with open("/proc/%d/environ" % pid, "rb") as file:
                if mark not in b"\0" + file.read():
                    return True
            if "python" in os.path.basename(os.readlink("/proc/%d/exe" % pid)):
                return False
            with open("/proc/%d/stat" % pid, "rb") as file:
                pid = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            return True
    return True


def _describe(error):
    # type: (BaseException) -> dict[str, str]
    """Return the record of ERROR."""
    import traceback

    kind = type(error)
    try:
        message = str(error)
    except Exception as trouble:
        message = "its text is unavailable (%s)" % type(trouble).__name__
    # Formatting a million frames would take minutes.
    lines = traceback.format_exception(kind, error, error.__traceback__, limit=-_FRAMES)
    stack = "".join(lines)
    if len(stack) > _MOST:
        stack = stack[: _MOST // 2] + "\n[...]\n" + stack[-_MOST // 2 :]
    return {
        "class": kind.__name__,
        "module": kind.__module__,
        "message": message[:_MOST],
        "stack": stack,
    }


def _rank_records():
    # type: () -> Any
    """Return the module that appends to the rank's records."""
    return _beside("rank_records")


def _beside(name):
    # type: (str) -> Any
    """Load the module NAME beside this one under a unique name."""
    from importlib import util

    unique_name = "_fleetrun_" + name
    if unique_name not in sys.modules:
        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), name + ".py")
        spec = util.spec_from_file_location(unique_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[unique_name] = module
    return sys.modules[unique_name]


def _show_stacks_on(signum):
    # type: (int) -> None
    """Write the stacks of all threads on SIGNUM to a memory file, which the launcher reads."""
    import faulthandler

    try:
        fd = os.memfd_create(_STACKS)
    except (AttributeError, OSError):
        # A Python built for an old C library.
        path = "/dev/shm/%s.%d" % (_STACKS, os.getpid())
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.unlink(path)
    faulthandler.register(signum, file=fd, all_threads=True, chain=False)


class _PaddleFinder:
    """Loads the package `inject` when Paddle is imported; finds no module itself."""

    def find_spec(self, name, path=None, target=None):
        # type: (str, Sequence[str] | None, ModuleType | None) -> ModuleSpec | None
        """Return the spec from `inject` if it has callbacks after Paddle's import, else None."""
        if name != "paddle":
            return None
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
        try:
            _change_paddle()
            # Python iterates over the old list, without the finder that `inject` has just added.
            for finder in sys.meta_path:
                if type(finder).__module__ == _INJECT + ".import_hooks":
                    return finder.find_spec(name, path, target)
        except Exception as error:
            failure = "the strategy cannot be applied"
            if not os.environ.get("FLEETRUN_STRATEGY_FILE"):
                failure = "updates and gloo groups of this rank stay as Paddle has them"
            failure = "%s: %r" % (failure, error)
            sys.stderr.write("fleetrun: %s\n" % failure)
            _record_unapplied(failure)
        return None


def _record_unapplied(failure):
    # type: (str) -> None
    """Tell the launcher: ranks that can apply the strategy would wait for this one."""
    path = os.environ.get("FLEETRUN_RECORDS")
    if not (path and os.environ.get("FLEETRUN_STRATEGY_FILE")):
        return
    records = _rank_records()
    try:
        records.append(path, records.STRATEGY, {"complete": False, "unapplied": [failure]})
    except OSError:  # training goes on without
        pass


def _change_paddle():
    # type: () -> None
    """Load the necessary parts of `inject`, the parent of this folder, under a unique name."""
    from importlib import import_module, util

    root = os.path.dirname(os.path.dirname(__file__))
    spec = util.spec_from_file_location(
        _INJECT, os.path.join(root, "__init__.py"), submodule_search_locations=[root]
    )
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[_INJECT] = module
    strategy = os.environ.get("FLEETRUN_STRATEGY_FILE", "")
    if _is_over_gloo() and not strategy:
        # The rest of the package takes a while to load.
        import_module(_INJECT + ".gloo_stores").arm(
            lambda text: sys.stderr.write("fleetrun: %s\n" % text)
        )
    if _is_one_of_several():
        import_module(_INJECT + ".store_wait").arm()
    is_armed = any(map(os.environ.get, _FOR_PADDLE))
    if is_armed:
        spec.loader.exec_module(module)
        module.arm(strategy)
    elif _is_one_of_several():
        # With any launch, failures name the coordinates of ranks.
        import_module(_INJECT + ".topology").arm()
    if _is_restarted():
        import_module(_INJECT + ".restarted").watch(_rank_records().append, is_armed=is_armed)


def _is_restarted():
    # type: () -> bool
    """Whether this is a rank of a later attempt than the first."""
    is_again = os.environ.get("PADDLE_RESTART_COUNT", "0") != "0"
    return is_again and bool(os.environ.get("FLEETRUN_RECORDS"))


def _is_one_of_several():
    # type: () -> bool
    """Whether this is one of several ranks."""
    ranks = os.environ.get("PADDLE_TRAINERS_NUM", "")
    return ranks.isdigit() and int(ranks) > 1


def _is_over_gloo():
    # type: () -> bool
    """Whether this is one of several ranks whose collectives are gloo's."""
    return _is_one_of_several() and os.environ.get("PADDLE_DISTRI_BACKEND") == "gloo"


class _CrashHandlerFinder:
    """Restores faulthandler once Paddle has replaced it by its own crash handlers.

    It finds no module, only observes imports, so tracebacks do not show it.
    """

    def find_spec(self, name, path=None, target=None):
        # type: (str, object, object) -> None
        """Find nothing."""
        if name[:7] != "paddle.":
            return
        # `fluid` before Paddle 2.5. It installs the handlers when its import ends.
        base = sys.modules.get("paddle.base") or sys.modules.get("paddle.fluid")
        if base is None or getattr(base.__spec__, "_initializing", False):
            return
        # A new list: Python is iterating over the old one.
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
        try:
            _restore_faulthandler()
        except Exception:  # training goes on without
            pass


def _restore_faulthandler():
    # type: () -> None
    """Put faulthandler before the handlers that replaced it, and chain them: both report."""
    import ctypes
    import faulthandler
    import signal

    # Larger than any `struct sigaction`; opaque to us.
    theirs = {
        signum: ctypes.create_string_buffer(512)
        for signum in (signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)
    }
    sigaction = ctypes.CDLL(None).sigaction
    for signum, handler in theirs.items():
        sigaction(signum, None, handler)
    faulthandler.disable()
    for signum, handler in theirs.items():
        sigaction(signum, handler, None)
    faulthandler.enable()


def _keep_interrupts():
    # type: () -> None
    """Send a KeyboardInterrupt again where Python can only ignore it.

    Python ignores what is raised in a destructor or callback, some of which its import system has,
    and while it checks whether the script is an archive.
    """
    hook = getattr(sys, "unraisablehook", None)
    if hook is None:
        return

    def resend():
        # type: () -> None
        import time

        # The callback must be over, or it would swallow this one, too.
        time.sleep(_CALLBACK_S)
        os.kill(os.getpid(), 2)  # SIGINT; `signal` is slow to import

    def unraisable(failed):
        # type: (Any) -> None
        if failed.exc_type is not KeyboardInterrupt:
            hook(failed)
            return
        try:
            import _thread

            _thread.start_new_thread(resend, ())
        except Exception:  # an interpreter that ends starts no thread
            hook(failed)

    sys.unraisablehook = unraisable
    words = list(getattr(sys, "orig_argv", ()))
    # As fleetrun starts scripts. Tell Python that this is no archive, so that it does not check.
    if words[1:2] == ["-u"] and words[2:3] and words[2].endswith(".py"):
        # Made absolute as the interpreter does, without normalising it.
        path = words[2] if words[2][0] == "/" else os.getcwd() + "/" + words[2]
        sys.path_importer_cache.setdefault(path, None)


def _replace_launchers():
    # type: () -> None
    """Make this Python run fleetrun where it would start Paddle's launcher."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    sys.path.insert(0, os.path.join(root, "entrance"))
    import _fleetrun_entrance  # type: ignore[import-not-found]

    _fleetrun_entrance.begin()


def _begin():
    # type: () -> None
    try:
        if os.environ.get("FLEETRUN_EXEC"):
            _replace_launchers()
    except Exception:  # the command goes on without
        pass
    try:
        _keep_interrupts()
    except Exception:  # training goes on without
        pass
    try:
        # Switched on by PYTHONFAULTHANDLER, if at all.
        if sys.modules["faulthandler"].is_enabled():
            sys.meta_path.insert(0, _CrashHandlerFinder())
    except (AttributeError, KeyError):
        pass
    try:
        path = os.environ.get("FLEETRUN_RECORDS")
        if path:
            _report_fatal_exceptions(path)
        signum = os.environ.get("FLEETRUN_STACK_SIGNAL")
        if signum:
            _show_stacks_on(int(signum))
        if _is_one_of_several() or _is_restarted() or any(map(os.environ.get, _FOR_PADDLE)):
            sys.meta_path.insert(0, _PaddleFinder())
    except Exception:  # training goes on without
        pass


def _wait_for_orders():
    # type: () -> None
    """Become the process from which ranks are forked; return in each of them."""
    _beside("fork_server").serve()


try:
    if os.environ.get("FLEETRUN_FORK_SERVER"):
        _wait_for_orders()
    _import_hidden()
finally:
    _begin()
