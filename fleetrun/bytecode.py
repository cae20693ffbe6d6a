"""Loads the modules of a launch at once, from the bytecode file of `packed`.

Python's import system takes 0.3 million instructions for each module, besides its code. So
`sinks.packing` writes the `.pyc` of `packed` again, with the code of others in it: Python takes it
if it is of this Python, and pip removes it with the others. What it does not have, or of which a
source has changed, is imported as ever.
"""

import marshal
import sys
from _frozen_importlib import ModuleSpec
from _frozen_importlib_external import SourceFileLoader
from _imp import _fix_co_filename  # type: ignore[attr-defined] # typeshed lacks it
from posix import stat

from fleetrun.typehints import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import CodeType, ModuleType
    from typing import TypeAlias

    # A module's name, its file below this folder, the size and time of that, and the code. Without
    # code: a package, whose own modules come first because it imports them.
    Row: TypeAlias = tuple[str, str, int, float, CodeType | None]

# Of PARTS: this number, the rows of what a launch needs until its first rank is started, and what
# it needs after that, each row marshalled.
FORMAT = 2
EARLY, LATE = 1, 2
_FOLDER = __file__.removesuffix("bytecode.py")
# `.cpython-311.pyc`, or that of -O.
_ENDING = (__spec__.cached or "").rpartition("bytecode")[2]

# Whether the file should be written again.
is_outdated = False


def load(part: int) -> None:
    """Load the modules of PART, EARLY or LATE, as far as they are not loaded yet."""
    for _ in loading(part):
        pass


def loading(part: int) -> "Iterator[None]":
    """Load the modules of PART as `load` does, and yield between them."""
    # Who looks at imports sees all of them; with a prefix, bytecode has other names.
    xoptions = sys._xoptions  # noqa: SLF001 - its documented name
    if "importtime" in xoptions or sys.flags.verbose or sys.pycache_prefix is not None:
        return iter(())
    return _execute(_current_rows(part))


def _current_rows(part: int) -> "Iterator[Row]":
    """Yield the rows of PART, up to the first whose source is another one by now."""
    global is_outdated  # noqa: PLW0603 - one file is loaded by one process
    is_current = False
    try:
        from fleetrun import packed

        if packed.PARTS is not ... and packed.PARTS[0] == FORMAT:
            rows = packed.PARTS[part]
            if part == LATE:
                rows, packed.PARTS = map(marshal.loads, rows), ...
            for row in rows:
                is_current = _is_current(row)
                if not is_current:
                    break
                yield row
    except (EOFError, ImportError, TypeError, ValueError):
        # Half of a file, as after a loss of power.
        is_current = False
    if not is_current:
        is_outdated = not sys.dont_write_bytecode


def _is_current(row: "Row") -> bool:
    """Whether the source of ROW is the one that was compiled."""
    _, file, size, mtime, code = row
    if code is None:
        return True
    try:
        status = stat(_FOLDER + file)
    except OSError:
        return False
    return status.st_size == size and status.st_mtime == mtime


def _execute(rows: "Iterable[Row]") -> "Iterator[None]":
    """Make the modules of ROWS, as `import` does, and yield where no package is half made."""
    modules = sys.modules
    begun: dict[str, ModuleType] = {}
    try:
        for name, file, _, _, code in rows:
            if name not in modules:
                begun[name] = modules[name] = _module(name, _FOLDER + file)
            if code is None or name not in begun:
                continue
            _fix_co_filename(code, _FOLDER + file)
            exec(code, begun[name].__dict__)  # noqa: S102 - as an import does
            parent, _, child = name.rpartition(".")
            setattr(modules[parent], child, begun.pop(name))
            if not begun:
                yield
    except ImportError:
        # Where the module is wanted, it is imported again, and fails there.
        pass
    finally:
        for name in begun:
            del modules[name]


def _module(name: str, file: str) -> "ModuleType":
    """Return a module NAME of the source FILE that is not executed yet.

    `importlib.util.module_from_spec` takes three times as long.
    """
    folder, _, stem = file[: -len(".py")].rpartition("/")
    module = type(sys)(name)
    loader = SourceFileLoader(name, file)
    spec = module.__spec__ = ModuleSpec(name, loader, origin=file)
    spec.has_location = True
    module.__loader__, module.__file__ = loader, file
    spec.cached = vars(module)["__cached__"] = f"{folder}/__pycache__/{stem}{_ENDING}"
    if stem == "__init__":
        spec.submodule_search_locations = module.__path__ = [folder]
        module.__package__ = name
    else:
        module.__package__ = name.rpartition(".")[0]
    return module
