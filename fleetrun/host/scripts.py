"""What a script's name means: a file, a program or a module."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping
from importlib.util import find_spec

from fleetrun.errors import EnvironmentFault, MissingProgram, NotExecutable
from fleetrun.host import files, nearby
from fleetrun.model import Script
from fleetrun.plan import command
from fleetrun.rundir.folder import closed

# The longest time in which a Python says whether it finds a module.
_ANSWER_S = 20.0
_NOTEBOOK = ".ipynb"
_OPTION_FILES = (".yaml", ".yml")


def find(script: Script, cwd: str, environ: Mapping[str, str]) -> str | None:
    """Return the path to run; None for a module, which only Python can look up."""
    if script.form == "module" or script.target == command.CHECK:
        return None
    target = script.target
    _check_kind(target, cwd)
    interpreted = target.endswith(command.ENDINGS)
    if not interpreted and "/" not in target:
        return _find_program(target, cwd, environ)
    path = os.path.join(cwd, target)
    _check_way(target, path)
    if not os.path.exists(path):
        if os.path.islink(path):
            raise EnvironmentFault(f"{target} is a link to {os.readlink(path)}, which is missing.")
        if not interpreted:
            raise MissingProgram(f"There is no program {target} in {cwd}{_meant(target, cwd, '.')}")
        raise EnvironmentFault(f"There is no script {target} in {cwd}{_meant(target, cwd, '.')}")
    if interpreted:
        if not os.access(path, os.R_OK):
            raise EnvironmentFault(
                f"This user may not read the script {target}: run `chmod u+r {target}`, or ask its "
                "owner."
            )
        return target
    if not os.access(path, os.X_OK):
        raise NotExecutable(
            f"{target} is not executable: run `chmod +x {target}`, or start it with the program "
            f"that reads it, as in `fleetrun bash {target}`."
        )
    return target


def _check_kind(target: str, cwd: str) -> None:
    """Raise EnvironmentFault if TARGET is a folder, or a file that is known to be no program."""
    path = os.path.join(cwd, target)
    if os.path.isdir(path):
        is_package = target.isidentifier() and os.path.isfile(f"{path}/__main__.py")
        scripts = [name for name in files.names(path) if name.endswith(".py")]
        if is_package:
            meant = f"-m {target} runs a package"
        elif len(scripts) == 1:
            meant = f"did you mean {os.path.normpath(os.path.join(target, scripts[0]))}?"
        else:
            meant = "name the script in it"
        end = "" if meant.endswith("?") else "."
        raise EnvironmentFault(
            f"{target} is a folder, not a script (looked in {cwd}); {meant}{end}"
        )
    if not os.path.isfile(path):
        return
    if target.endswith(_NOTEBOOK):
        script = f"{target.removesuffix(_NOTEBOOK)}.py"
        raise EnvironmentFault(
            f"{target} is a notebook, not a script: run `jupyter nbconvert --to script {target}`, "
            f"then `fleetrun {script}`."
        )
    if target.endswith(_OPTION_FILES) and not os.access(path, os.X_OK):
        raise EnvironmentFault(
            f"{target} is a YAML file, not a script: --config={target} reads options from it, and "
            f"--strategy={target} a strategy."
        )


def _check_way(target: str, path: str) -> None:
    """Raise EnvironmentFault when a folder on the way to PATH, which TARGET means, is closed."""
    if os.access(path, os.R_OK):
        return

    shut = closed(path)
    if shut is not None:
        raise EnvironmentFault(
            f"{target} cannot be reached: this user (uid {os.geteuid()}) may not enter the folder "
            f"{shut}. Put it elsewhere, or let this user enter that folder."
        )


def wrap_fault(wrap: str, cwd: str, environ: Mapping[str, str]) -> str | None:
    """Return why the command of WRAP, `RANKS: COMMAND`, cannot be run; None if it can."""
    name = shlex.split(wrap.partition(": ")[2])[0]
    if "/" not in name:
        try:
            program = _find_program(name, cwd, environ)
        except EnvironmentFault:
            program = ""
        # Ranks do not find programs in the current folder.
        if program.startswith("./") or not program:
            return f"there is no program {name} in $PATH; install it, or give its path."
        return None
    path = os.path.join(cwd, name)
    if not os.path.exists(path):
        return f"there is no program {name} in {cwd}."
    if os.path.isdir(path) or not os.access(path, os.X_OK):
        return f"{name} is not executable (`chmod +x {name}`)."
    return None


def check_module(
    name: str, cwd: str, python: str = "", environ: Mapping[str, str] | None = None
) -> None:
    """Raise EnvironmentFault if the module NAME is missing and a file here has nearly that name.

    Also if PYTHON, which is to run it with ENVIRON, says that it finds none.
    """
    if name == "__main__" or not all(part.isidentifier() for part in name.split(".")):
        return
    path = name.replace(".", "/")
    here = os.path.join(cwd, path)
    if os.path.isfile(f"{here}.py") or os.path.isdir(here):
        return
    folder, _, last = path.rpartition("/")
    # A file of another kind that Python can import.
    if any(entry.partition(".")[0] == last for entry in files.names(os.path.join(cwd, folder))):
        return

    first = path.partition("/")[0]
    is_here = os.path.isdir(os.path.join(cwd, first)) and first != path
    meant = nearby.find(f"{path}.py", cwd)
    if not is_here and find_spec(first) is not None:
        return
    if meant is not None:
        raise EnvironmentFault(
            f"There is no module {name} in {cwd}; "
            f"did you mean {meant.removesuffix('.py').replace('/', '.')}?"
        )
    if python and not is_here and _lacks(python, first, cwd, environ):
        raise EnvironmentFault(
            f"There is no module {first} in {cwd}, and {python} finds none elsewhere."
        )


def _lacks(python: str, module: str, cwd: str, environ: Mapping[str, str] | None) -> bool:
    """Whether PYTHON itself says that it finds no MODULE, as its start may add folders."""
    # A name without a dot: nothing is imported.
    code = f"import importlib.util as u; print('{module}', u.find_spec('{module}') is None)"
    try:
        done = subprocess.run(
            (python, "-c", code),
            cwd=cwd,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.stdout.split()[-2:] == [os.fsencode(module), b"True"]


def which(name: str, cwd: str, environ: Mapping[str, str]) -> str | None:
    """Return the program called NAME, looked up as a shell would, if there is one."""
    folders = [""] if "/" in name else environ.get("PATH", os.defpath).split(os.pathsep)
    for folder in folders:
        candidate = os.path.join(cwd, folder, name)
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            return candidate
    return None


def _find_program(name: str, cwd: str, environ: Mapping[str, str]) -> str:
    """Return the program called NAME, which is in $PATH or in the folder CWD."""
    program = which(name, cwd, environ)
    if program is not None:
        return program
    here = os.path.join(cwd, name)
    if os.path.isfile(here):
        if os.access(here, os.X_OK):
            return f"./{name}"
        raise NotExecutable(
            f"{name} is in this folder but not executable: run `chmod +x {name}`, or start it "
            f"with the program that reads it, as in `fleetrun bash {name}`."
        )
    hint = _meant(name, cwd, "; a Python script ends in .py, a module needs -m.")
    raise MissingProgram(
        f"There is no program {name} in $PATH, nor a file of that name in {cwd}{hint}"
    )


def _meant(target: str, cwd: str, otherwise: str) -> str:
    """End a sentence with the existing file whose name is nearly TARGET, or with OTHERWISE."""
    meant = nearby.find(target, cwd)
    return otherwise if meant is None else f"; did you mean {meant}?"
