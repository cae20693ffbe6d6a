"""Puts this fleetrun in the place of Paddle's launcher in other programs.

Every Python below `fleetrun exec` loads this when it starts (`inject/site` does). It may be older
than fleetrun's: the syntax stays plain, and nothing is imported before it is needed.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    # For the type comments.
    from collections.abc import Sequence  # noqa: F401
    from importlib.machinery import ModuleSpec  # noqa: F401
    from types import CodeType, ModuleType  # noqa: F401
    from typing import Any, NoReturn  # noqa: F401

# The Python that has fleetrun; `off` leaves Paddle's launcher alone.
_SWITCH = "FLEETRUN_EXEC"
_OFF = "off"
# The Python of the ranks, if it is another one.
_RANKS = "FLEETRUN_PYTHON"
_NEW = "paddle.distributed.launch"
_OLD = "paddle.distributed.fleet.launch"
# The modules that `python -m` or runpy runs, or that have a function `launch`.
_MODULES = (_NEW, _NEW + ".__main__", _NEW + ".main", _OLD)
# Each launch makes this module's `Context` first, also where the launcher's code runs in a
# namespace of its own, as with runpy.run_path.
_CONTEXT = _NEW + ".context"
# The options of Python that take a value, as one letter.
_WITH_VALUE = "WXQ"


def begin():
    # type: () -> None
    """Replace this process if it is Paddle's launcher; else wait for an import of the launcher."""
    # Only this module is in its folder.
    here = os.path.dirname(__file__)
    sys.path[:] = [entry for entry in sys.path if entry != here]
    if os.environ.get(_SWITCH) == _OFF:
        return
    words = list(getattr(sys, "orig_argv", ())) or _command_line()
    args = launcher_arguments(words)
    if args is not None and sys.executable:
        command = _command(args)
        os.execve(command[0], command, _environment())  # noqa: S606 - what the command line asks for
    sys.meta_path.insert(0, _LauncherFinder())


def launcher_arguments(words):
    # type: (Sequence[str]) -> list[str] | None
    """Return the arguments of Paddle's launcher if WORDS, Python's command line, start it."""
    at = 1
    while at < len(words):
        word = words[at]
        at += 1
        if word == "--check-hash-based-pycs":
            at += 1
        elif word[:2] == "--":
            continue
        elif word[:1] != "-" or word == "-":
            return list(words[at:]) if _is_paddles_script(word) else None
        else:
            for place, letter in enumerate(word[1:], 2):
                if letter == "c":
                    return None
                if letter == "m":
                    name = word[place:]
                    if not name:
                        name, at = words[at] if at < len(words) else "", at + 1
                    return list(words[at:]) if name in _MODULES else None
                if letter in _WITH_VALUE:
                    at += not word[place:]
                    break
    return None


def _is_paddles_script(path):
    # type: (str) -> bool
    """Whether the file at PATH is Paddle's `fleetrun` script or its launcher."""
    if path.endswith(("paddle/distributed/launch/main.py", "paddle/distributed/fleet/launch.py")):
        return True
    if os.path.basename(path) != "fleetrun":
        return False
    try:
        with open(path, "rb") as file:
            return b"paddle.distributed" in file.read(4096)
    except OSError:
        return False


def _command_line():
    # type: () -> list[str]
    """Return the command line of this process, which a Python before 3.10 does not provide."""
    try:
        with open("/proc/self/cmdline", "rb") as file:
            return [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
    except OSError:
        return []


def _command(args):
    # type: (Sequence[str]) -> list[str]
    """Return the command of a launch by this fleetrun."""
    return [os.environ.get(_SWITCH) or sys.executable, "-m", "fleetrun", *args]


def _environment():
    # type: () -> dict[str, str]
    """Return the environment of a launch, whose ranks run in this Python."""
    environ = dict(os.environ)
    if environ.get(_SWITCH, sys.executable) != sys.executable:
        environ[_RANKS] = sys.executable
    return environ


def launch():
    # type: () -> NoReturn
    """Launch what sys.argv says, and exit as the launch does, like Paddle's function."""
    import ctypes
    import signal
    import subprocess

    libc = ctypes.CDLL(None)

    def end_with_parent():
        # type: () -> None
        libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG

    child = subprocess.Popen(
        _command(sys.argv[1:]),
        env=_environment(),
        preexec_fn=end_with_parent,  # noqa: PLW1509 - it calls the C library alone
    )

    def forward(signum, _frame):
        # type: (int, object) -> None
        child.send_signal(signum)

    kinds = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2")
    previous = {}
    try:
        for kind in kinds:
            signum = getattr(signal, kind)
            previous[signum] = signal.signal(signum, forward)
    except ValueError:
        pass  # only the main thread may
    code = child.wait()
    for signum, handler in previous.items():
        signal.signal(signum, handler)
    sys.exit(code if code >= 0 else 128 - code)


class _LauncherFinder:
    """Lets our loader load Paddle's launcher; finds nothing else."""

    def find_spec(self, name, path=None, target=None):
        # type: (str, Sequence[str] | None, ModuleType | None) -> ModuleSpec | None
        """Return the module's own spec with our loader, for Paddle's launcher alone."""
        if name != _CONTEXT and (name not in _MODULES or name == _NEW):
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _LauncherLoader(spec.loader)  # type: ignore[assignment]
                return spec
        return None


class _LauncherLoader:
    """Loads a module of Paddle's launcher with our `launch` in it."""

    def __init__(self, loader):
        # type: (Any) -> None
        self._loader = loader

    def __getattr__(self, name):
        # type: (str) -> Any
        """Return an attribute of the module's own loader."""
        return getattr(self._loader, name)

    def create_module(self, spec):
        # type: (ModuleSpec) -> ModuleType | None
        """Create the module by its own loader."""
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module):
        # type: (Any) -> None
        """Execute the module, and replace what launches."""
        self._loader.exec_module(module)
        entry = "Context" if module.__name__ == _CONTEXT else "launch"
        if hasattr(module, entry):
            setattr(module, entry, launch)

    def get_code(self, name):
        # type: (str) -> CodeType
        """Return the code that runpy runs in place of the module: our launch."""
        source = "import sys\nsys.modules[%r].launch()\n" % (__name__,)
        return compile(source, "<%s>" % (name,), "exec")
