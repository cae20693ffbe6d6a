"""Runs a script, or a module after -m, under pdb from its first line, and returns its exit code.

`python -m pdb` restarts the script when it has ended, and forgets its exit code.
"""

from __future__ import annotations

import importlib.util
import pdb  # noqa: T100 - this is for debugging
import sys
from pathlib import Path
from types import CodeType, ModuleType


def main(words: list[str]) -> None:
    """Run the script or module of WORDS, the command line after `python`."""
    module = ModuleType("__main__")
    # Python put this file's folder there; the script expects its own, a module the current one.
    if words[0] == "-m":
        sys.path[0] = str(Path.cwd())
        code = _module(words[1], module)
        sys.argv = [code.co_filename, *words[2:]]
    else:
        sys.path[0] = str(Path(words[0]).resolve().parent)
        code = compile(Path(words[0]).read_bytes(), words[0], "exec")
        vars(module).update(__file__=words[0], __spec__=None)
        sys.argv = words
    sys.modules["__main__"] = module
    debugger = pdb.Pdb()
    try:
        debugger.run(code, vars(module))
    except Exception as error:
        print(f"{type(error).__name__}: {error}\nThis ends the rank; pdb opens where it is raised.")
        pdb.post_mortem(error.__traceback__)
        raise
    if debugger.quitting:
        sys.exit("The debugger was quit before the script ended.")


def _module(name: str, module: ModuleType) -> CodeType:
    """Return the code of the module or package NAME, and describe it in MODULE."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = getattr(spec.loader, "get_code", lambda _: None)(spec.name) if spec else None
    if spec is None or code is None:
        sys.exit(f"There is no module {name} that can be run.")
    vars(module).update(__file__=spec.origin, __spec__=spec, __package__=spec.parent)
    return code  # type: ignore[no-any-return]


if __name__ == "__main__":
    main(sys.argv[1:])
