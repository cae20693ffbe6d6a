"""What a script's name means: a file, a program or a module."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fleetrun.errors import EnvironmentFault, MissingProgram, NotExecutable
from fleetrun.host import files
from fleetrun.model import Script
from fleetrun.plan import command
from fleetrun.text import closest

_OPTION_FILES = (".yaml", ".yml")
# Two letters changed places in `tarin.py`. Names that are less alike are other words.
_ALIKE = 0.7


def find(script: Script, cwd: str, environ: Mapping[str, str]) -> str | None:
    """Return the path to run; None for a module, which only Python can look up."""
    if script.form == "module" or script.target == command.CHECK:
        return None
    target = script.target
    path = os.path.join(cwd, target)
    _check_kind(target, path)
    interpreted = target.endswith(command.ENDINGS)
    if not interpreted and "/" not in target:
        program = which(target, cwd, environ)
        if program is not None:
            return program
    shut = None if os.access(path, os.R_OK) else _closed(path)
    if shut is not None:
        raise EnvironmentFault(
            f"{target} cannot be reached: this user (uid {os.geteuid()}) may not enter the folder "
            f"{shut}. Put it elsewhere, or let this user enter that folder."
        )
    if not os.path.exists(path):
        if os.path.islink(path):
            raise EnvironmentFault(f"{target} is a link to {os.readlink(path)}, which is missing.")
        meant = nearby(target, cwd)
        hint = f"; did you mean {meant}?" if meant else "."
        if interpreted:
            raise EnvironmentFault(f"There is no script {target} in {cwd}{hint}")
        where = cwd if "/" in target else f"$PATH, nor a file of that name in {cwd}"
        otherwise = "; a Python script ends in .py, a module needs -m."
        hint = otherwise if meant is None and "/" not in target else hint
        raise MissingProgram(f"There is no program {target} in {where}{hint}")
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
    return target if interpreted or "/" in target else f"./{target}"


def _check_kind(target: str, path: str) -> None:
    """Raise EnvironmentFault if TARGET is a folder, or a file that is known to be no program."""
    if os.path.isdir(path):
        meant = "name the script in it."
        if target.isidentifier() and os.path.exists(os.path.join(path, "__main__.py")):
            meant = f"-m {target} runs a package."
        raise EnvironmentFault(f"{target} is a folder, not a script; {meant}")
    if target.endswith(".ipynb") and os.path.isfile(path):
        script = f"{target.removesuffix('.ipynb')}.py"
        raise EnvironmentFault(
            f"{target} is a notebook, not a script: run `jupyter nbconvert --to script {target}`, "
            f"then `fleetrun {script}`."
        )
    is_file = os.path.isfile(path) and not os.access(path, os.X_OK)
    if target.endswith(_OPTION_FILES) and is_file:
        raise EnvironmentFault(
            f"{target} is a YAML file, not a script: --config={target} reads options from it, and "
            f"--strategy={target} a strategy."
        )


def which(name: str, cwd: str, environ: Mapping[str, str]) -> str | None:
    """Return the program called NAME, looked up as a shell would, if there is one."""
    folders = [""] if "/" in name else environ.get("PATH", os.defpath).split(os.pathsep)
    for folder in folders:
        candidate = os.path.join(cwd, folder, name)
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            return candidate
    return None


def nearby(target: str, cwd: str) -> str | None:
    """Return the file whose name is nearly that of TARGET, in the same folder, if there is one."""
    folder, slash, name = target.rpartition("/")
    here = os.path.join(cwd, folder + slash)
    stem, ending = os.path.splitext(name.lower())
    # Most often it is the ending that was left out; if there is one, all have it.
    known = {
        os.path.splitext(entry)[0]: entry
        for entry in files.names(here)
        if entry.lower().endswith(ending) and os.path.isfile(os.path.join(here, entry))
    }
    close = closest(stem, known, _ALIKE)
    return None if close is None else f"{folder}{slash}{known[close]}"


def _closed(path: str) -> str | None:
    """Return the folder on the way to PATH that this user may not enter, if any."""
    for route in (os.path.abspath(path), os.path.realpath(path)):
        parts = route.split(os.sep)[1:-1]
        for count in range(len(parts)):
            folder = "/" + "/".join(parts[: count + 1])
            if os.path.isdir(folder) and not os.access(folder, os.X_OK, effective_ids=True):
                return folder
    return None
