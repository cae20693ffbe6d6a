"""Runs first in every Python of a rank: reports a fatal exception, and shows stacks on request.

Below `fleetrun exec` it also runs first in every Python, and replaces Paddle's launcher by
fleetrun there.

Python imports `sitecustomize` when it starts, and the launcher puts this folder first on the ranks'
PYTHONPATH. The script must see no difference. A script may start an older Python 3, so the syntax
stays plain, and nothing is imported before it is needed. Every Python pays for each line here, so
what only some need is in the modules beside this one.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType, TracebackType
    from typing import Any, NoReturn

# How the launcher recognises this descriptor; see fleetrun/postmortem/stackdumps.py.
_STACKS = "fleetrun-stacks"
# Each of these variables requests a change to Paddle.
_FOR_PADDLE = (
    "FLEETRUN_STRATEGY_FILE",
    "FLEETRUN_PROFILE",
    "FLEETRUN_REPORT_UPDATES",
    "FLEETRUN_FLIGHT_RECORDER",
    "FLEETRUN_VERIFY",
)


def _beside(name: str) -> "Any":
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


def _import_hidden() -> None:
    """Import the `sitecustomize` of the user or the system, which this one hides."""
    here = os.path.dirname(__file__)
    while here in sys.path:
        sys.path.remove(here)
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


def _report_exceptions(path: str) -> None:
    """Append the exception that ends this process to PATH; the printed output is unchanged."""
    import atexit

    pid = os.getpid()
    show = sys.excepthook

    def report(error: "BaseException | None", *, is_shown: bool) -> None:
        # Forked children are not the rank. A failure of ours must not hide the user's.
        try:
            is_quiet = isinstance(error, (KeyboardInterrupt, SystemExit, type(None)))
            if not is_quiet and os.getpid() == pid:
                append = _beside("rank_records").append
                _beside("rank_failures").report(append, path, error, is_shown=is_shown)
        except Exception:
            pass

    def excepthook(
        kind: "type[BaseException]", error: BaseException, trace: "TracebackType | None"
    ) -> None:
        report(error, is_shown=True)
        show(kind, error, trace)

    sys.excepthook = excepthook
    # Libraries may replace our hook; Python keeps the exception in sys.last_value.
    atexit.register(lambda: report(getattr(sys, "last_value", None), is_shown=False))


def _note_exits(path: str) -> None:
    """Record a failing exit in PATH at once: the end of the process may take long."""
    from _thread import get_ident

    pid, main = os.getpid(), get_ident()
    leave = sys.exit

    def exit(*status: object) -> "NoReturn":  # noqa: A001 - it replaces that one
        try:
            leave(*status)  # type: ignore[arg-type]
        except SystemExit as error:
            try:
                code = error.code
                code = 0 if code is None else code & 255 if isinstance(code, int) else 1
                if code and os.getpid() == pid and get_ident() == main:
                    append = _beside("rank_records").append
                    _beside("rank_failures").note_exit(append, path, error, code)
            except Exception:  # the exit goes on
                pass
            raise

    exit.__doc__ = leave.__doc__
    sys.exit = exit


def _show_stacks_on(signum: int) -> None:
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


def _await_paddle() -> None:
    """Load `paddle_import` when Paddle is imported."""

    def find_spec(
        name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if name != "paddle":
            return None
        # A new list, into which finders are inserted: Python is iterating over the old one.
        sys.meta_path = [other for other in sys.meta_path if other is not finder]
        try:
            _beside("paddle_import").prepare(_beside, _FOR_PADDLE)
        except Exception as error:  # fleetrun has been removed
            sys.stderr.write("fleetrun: nothing is changed in Paddle: %r\n" % error)
            if os.environ.get("FLEETRUN_STRATEGY_FILE"):
                # Ranks that can apply the strategy would wait for this one.
                raise
            return None
        for other in sys.meta_path:
            if type(other).__module__ == "_fleetrun_inject.import_hooks":
                spec: "ModuleSpec | None" = other.find_spec(name, path, target)
                return spec
        return None

    # A plain object: a class would take longer to create than the rest of this function.
    plain: "Any" = type(sys.implementation)
    finder = plain(find_spec=find_spec)
    sys.meta_path.insert(0, finder)


def _begin() -> None:
    variable = os.environ.get
    try:
        if variable("FLEETRUN_EXEC"):
            root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
            sys.path.insert(0, os.path.join(root, "entrance"))
            import _fleetrun_entrance  # type: ignore[import-not-found]

            # It runs fleetrun where this Python would start Paddle's launcher.
            _fleetrun_entrance.begin()
    except Exception:  # the command goes on without
        pass
    try:
        path = variable("FLEETRUN_RECORDS")
        if path:
            _report_exceptions(path)
            _note_exits(path)
        signum = variable("FLEETRUN_STACK_SIGNAL")
        if signum:
            _show_stacks_on(int(signum))
    except Exception:  # training goes on without
        pass
    ranks = variable("PADDLE_TRAINERS_NUM") not in {None, "", "1"}
    if ranks or variable("PYTHONFAULTHANDLER") or any(map(variable, _FOR_PADDLE)):
        _await_paddle()


try:
    _import_hidden()
finally:
    _begin()
