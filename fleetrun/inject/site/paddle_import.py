"""Prepares the changes to Paddle when it is imported, and keeps Python's report of crashes.

`sitecustomize` loads this file by its path when a rank imports Paddle, so its syntax is plain.
"""

import gc
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

# The package above this folder, under a unique name.
_INJECT = "_fleetrun_inject"


def prepare(beside: "Callable[[str], Any]", requests: "Sequence[str]") -> None:
    """Add finders that change Paddle once it is imported.

    BESIDE loads a module of this folder. Each of the variables REQUESTS requests a change.
    """
    if _is_one_of_several() or any(map(os.environ.get, requests)):
        try:
            _change_paddle(requests)
        except Exception as error:
            failure = "the strategy cannot be applied"
            if not os.environ.get("FLEETRUN_STRATEGY_FILE"):
                failure = "updates and gloo groups of this rank stay as Paddle has them"
            failure = "%s: %r" % (failure, error)
            sys.stderr.write("fleetrun: %s\n" % failure)
            _record_unapplied(beside, failure)
    if "faulthandler" in sys.modules and sys.modules["faulthandler"].is_enabled():
        sys.meta_path.insert(0, _CrashHandlerFinder())


def _record_unapplied(beside: "Callable[[str], Any]", failure: str) -> None:
    """Tell the launcher: ranks that can apply the strategy would wait for this one."""
    path = os.environ.get("FLEETRUN_RECORDS")
    if path and os.environ.get("FLEETRUN_STRATEGY_FILE"):
        records = beside("rank_records")
        try:
            records.append(path, records.STRATEGY, {"complete": False, "unapplied": [failure]})
        except OSError:  # training goes on without
            pass


def _change_paddle(requests: "Sequence[str]") -> None:
    """Load the necessary parts of `inject`, the parent of this folder, under a unique name."""
    from importlib import import_module, util

    root = os.path.dirname(os.path.dirname(__file__))
    spec = util.spec_from_file_location(_INJECT, os.path.join(root, "__init__.py"))
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[_INJECT] = module
    after_import = import_module(_INJECT + ".import_hooks").after_import
    _import_faster(after_import)
    strategy = os.environ.get("FLEETRUN_STRATEGY_FILE", "")
    # The rest of the package takes a while to load.
    if _is_one_of_several():
        if os.environ.get("PADDLE_DISTRI_BACKEND") == "gloo" and not strategy:
            after_import("paddle", import_module(_INJECT + ".gloo_stores").watch)
        after_import("paddle", import_module(_INJECT + ".store_wait").watch)
    if any(map(os.environ.get, requests)):
        spec.loader.exec_module(module)
        module.arm(strategy)
    else:
        # With any launch, failures name the coordinates of ranks.
        after_import("paddle", import_module(_INJECT + ".topology").watch)


def _import_faster(after_import: "Callable[[str, Callable[[Any], object]], None]") -> None:
    """Let Paddle be imported in an eighth less time."""
    # The command of httpx, which Paddle imports: it would import rich, which the launcher brings.
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
    # There is little garbage. If the import fails, Python goes on collecting, but less often.
    often = gc.get_threshold()
    if often[0]:
        gc.set_threshold(100_000, *often[1:])
        after_import("paddle", lambda _: gc.set_threshold(*often))


def _is_one_of_several() -> bool:
    """Whether this is one of several ranks."""
    ranks = os.environ.get("PADDLE_TRAINERS_NUM", "")
    return ranks.isdigit() and int(ranks) > 1


class _CrashHandlerFinder:
    """Restores faulthandler once Paddle has replaced it by its own crash handlers.

    It finds no module, only observes imports, so tracebacks do not show it.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Find nothing."""
        # Paddle installs its handlers when the import of `base` ends.
        base = sys.modules.get("paddle.base")
        if name[:7] != "paddle." or base is None or getattr(base.__spec__, "_initializing", False):
            return
        # A new list: Python is iterating over the old one.
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
        try:
            _restore_faulthandler()
        except Exception:  # training goes on without
            pass


def _restore_faulthandler() -> None:
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
