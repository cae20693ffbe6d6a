"""Starts the launcher of a host by ssh: a fork of the agent, which has loaded its modules."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NoReturn

from fleetrun.remote import protocol
from fleetrun.run import libc

# Variables that Python or the loader reads only at its start.
_READ_AT_START = ("PYTHONPATH", "LD_LIBRARY_PATH")


def load(environ: Mapping[str, str], *, has_others: bool) -> None:
    """Import the modules of a launcher with ENVIRON while the agent is waiting."""
    if _needs_new_python(environ):
        return
    # Imports leave no garbage, and looking for it takes a tenth of their time.
    gc.disable()
    import_module(protocol.LAUNCHER)
    for name in ("cli", "job"):
        import_module(f"fleetrun.{name}")
    if has_others:
        for name in ("session.joining", "sources.session", "sources.session_end"):
            import_module(f"fleetrun.{name}")


def _needs_new_python(environ: Mapping[str, str]) -> bool:
    return any(environ.get(name) != os.environ.get(name) for name in _READ_AT_START)


def start(words: Sequence[str], cwd: str, environ: Mapping[str, str]) -> int:
    """Start fleetrun with WORDS in CWD with exactly ENVIRON; return its pid."""
    agent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _be_launcher(agent, words, cwd, environ)
    return pid


def _be_launcher(
    agent: int, words: Sequence[str], cwd: str, environ: Mapping[str, str]
) -> NoReturn:
    """Become the launcher; the process ends with it."""
    code = 1
    try:
        os.setsid()
        # If the agent is killed, nothing else would end the launcher.
        libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGTERM)
        libc.prctl(libc.PR_SET_NAME, b"fleetrun")
        if os.getppid() != agent:
            os._exit(code)
        nowhere = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nowhere, 0)
        os.close(nowhere)
        os.chdir(cwd)
        if _needs_new_python(environ):
            text = protocol.start("launcher")
            os.execve(sys.executable, [sys.executable, "-c", text, *words], environ)  # noqa: S606 - this Python
        gc.enable()
        libc.set_command(b"\0".join(map(os.fsencode, ("fleetrun", *words))))
        sys.argv[1:] = words
        os.environ.clear()
        os.environ.update(environ)
        import_module(protocol.LAUNCHER).run()
    except SystemExit as end:
        # A profiler or a debugger watches it.
        code = end.code if isinstance(end.code, int) else 1
    except BaseException as error:  # noqa: BLE001 - the agent's part of the stack must not run
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(code)
