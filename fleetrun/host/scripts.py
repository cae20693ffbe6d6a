"""What a script's name means: a file, a program or a module."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping

from fleetrun.errors import EnvironmentFault, MissingProgram, NotExecutable
from fleetrun.host import files
from fleetrun.model import Script
from fleetrun.plan import command
from fleetrun.rundir.folder import closed
from fleetrun.text import closest

_OPTION_FILES = (".yaml", ".yml")
# A folder of a million samples is not compared with a misspelt name.
_MOST = 10_000
# Two letters changed places in `tarin.py`. Names that are less alike are other words.
_ALIKE = 0.7


def find(script: Script, cwd: str, environ: Mapping[str, str]) -> str | None:
    """Return the path to run; None for a module, which only Python can look up."""
    if script.form == "module" or script.target == command.CHECK:
        return None
    target = script.target
    path = os.path.join(cwd, target)
    _check_kind(target, path, cwd)
    interpreted = target.endswith(command.ENDINGS)
    if not interpreted and "/" not in target:
        return _find_program(target, cwd, environ)
    shut = None if os.access(path, os.R_OK) else closed(path)
    if shut is not None:
        raise EnvironmentFault(
            f"{target} cannot be reached: this user (uid {os.geteuid()}) may not enter the folder "
            f"{shut}. Put it elsewhere, or let this user enter that folder."
        )
    if not os.path.exists(path):
        if os.path.islink(path):
            raise EnvironmentFault(f"{target} is a link to {os.readlink(path)}, which is missing.")
        fault, kind = (EnvironmentFault, "script") if interpreted else (MissingProgram, "program")
        raise fault(f"There is no {kind} {target} in {cwd}{_meant(target, cwd, '.')}")
    if interpreted and not os.access(path, os.R_OK):
        raise EnvironmentFault(
            f"This user may not read the script {target}: run `chmod u+r {target}`, or ask its "
            "owner."
        )
    if not interpreted and not os.access(path, os.X_OK):
        raise NotExecutable(
            f"{target} is not executable: run `chmod +x {target}`, or start it with the program "
            f"that reads it, as in `fleetrun bash {target}`."
        )
    return target


def _check_kind(target: str, path: str, cwd: str) -> None:
    """Raise EnvironmentFault if TARGET is a folder, or a file that is known to be no program."""
    if os.path.isdir(path):
        scripts = [name for name in files.names(path) if name.endswith(".py")]
        meant = "name the script in it."
        if target.isidentifier() and "__main__.py" in scripts:
            meant = f"-m {target} runs a package."
        elif len(scripts) == 1:
            meant = f"did you mean {os.path.normpath(os.path.join(target, scripts[0]))}?"
        raise EnvironmentFault(f"{target} is a folder, not a script (looked in {cwd}); {meant}")
    if not os.path.isfile(path):
        return
    if target.endswith(".ipynb"):
        script = f"{target.removesuffix('.ipynb')}.py"
        raise EnvironmentFault(
            f"{target} is a notebook, not a script: run `jupyter nbconvert --to script {target}`, "
            f"then `fleetrun {script}`."
        )
    if target.endswith(_OPTION_FILES) and not os.access(path, os.X_OK):
        raise EnvironmentFault(
            f"{target} is a YAML file, not a script: --config={target} reads options from it, and "
            f"--strategy={target} a strategy."
        )


def wrap_fault(wrap: str, cwd: str, environ: Mapping[str, str]) -> str | None:
    """Return why the command of WRAP, `RANKS: COMMAND`, cannot be run; None if it can."""
    name = shlex.split(wrap.partition(": ")[2])[0]
    if which(name, cwd, environ) is not None:
        return None
    if "/" not in name:
        return f"there is no program {name} in $PATH; install it, or give its path."
    if not os.path.exists(os.path.join(cwd, name)):
        return f"there is no program {name} in {cwd}."
    return f"{name} is not executable (`chmod +x {name}`)."


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
    meant = nearby(target, cwd)
    return otherwise if meant is None else f"; did you mean {meant}?"


def nearby(target: str, cwd: str) -> str | None:
    """Return the file whose name is nearly that of TARGET, in the same folder, if there is one."""
    folder, slash, name = target.rpartition("/")
    here = os.path.join(cwd, folder + slash)
    stem, ending = os.path.splitext(name.lower())
    # Most often it is the ending that was left out; if there is one, all have it.
    known = {
        os.path.splitext(entry)[0]: entry
        for entry in files.names(here)[:_MOST]
        if entry.lower().endswith(ending) and os.path.isfile(os.path.join(here, entry))
    }
    close = closest(stem, known, _ALIKE)
    return None if close is None else f"{folder}{slash}{known[close]}"
