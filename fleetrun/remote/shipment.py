"""The shipment of --ship to each host: fleetrun, and the job's folder without ignored files."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import tempfile
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fleetrun.conversion import size
from fleetrun.errors import UsageError
from fleetrun.plan import command
from fleetrun.remote import bootstrap, protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fleetrun.model import Script

_MOST_BYTES = 50 << 20
# How many parts of the folder are named.
_NAMED = 3
# Pure Python that a launch may import: for config files and strategies, and for GPUs.
_LIBRARIES = ("yaml", "pynvml")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Runs no program of the repository's configuration; allows another user's folder.
_GIT = ("git", "-c", "core.fsmonitor=false", "-c", "safe.directory=*")
_LIST = ("ls-files", "-z", "--others", "--exclude-standard")
# These would make git read another repository.
_MISLEADING = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR")


def pack(folder: str, script: Script, log_dir: str) -> bytes:
    """Return the shipment for SCRIPT in FOLDER without LOG_DIR: text, a line, an archive.

    Raises UsageError if the script is not in it, or it is too large.
    """
    left_out = os.path.normpath(os.path.join(folder, log_dir))
    names = [name for name in listed(folder) if not f"{folder}/{name}/".startswith(f"{left_out}/")]
    _check_script(folder, script, names)
    _check_size(folder, names)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=4) as archive:
        for name in names:
            _add(archive, os.path.join(folder, name), f"{bootstrap.JOB}/{name}")
        for path, name in _own():
            _add(archive, path, f"{bootstrap.LIB}/{name}")
    data = buffer.getvalue()
    return text() + b"\0%d\n" % len(data) + data


def text() -> bytes:
    """Return the Python text that the other end runs."""
    with open(bootstrap.__file__, "rb") as file:
        text = file.read()
    words = (protocol.line(protocol.Answer()).decode(), protocol.MARK.decode(), protocol.SILENCE_S)
    return text + b"\nrun(%s)\n" % ", ".join(map(repr, words)).encode()


def listed(folder: str) -> list[str]:
    """Return the files of FOLDER that git does not ignore, as relative paths."""
    paths = []
    for name in _by_git(folder):
        path = os.path.join(folder, name)
        if os.path.isdir(path) and not os.path.islink(path):
            # A repository within this one.
            paths += [os.path.join(name, inner) for inner in listed(path)]
        elif os.path.islink(path) or os.path.isfile(path):
            paths.append(name)
    return sorted(paths)


def _by_git(folder: str) -> list[str]:
    """Return the files that git lists in FOLDER, which need not be in a repository."""
    try:
        done = _git("-C", folder, *_LIST, "--cached")
        if done.returncode:
            with tempfile.TemporaryDirectory(prefix="fleetrun-git-") as empty:
                _git("init", "--quiet", "--bare", empty)
                options = (f"--git-dir={empty}", f"--work-tree={folder}")
                done = _git("-C", folder, *options, *_LIST)
    except FileNotFoundError:
        return _without_git(folder)
    if done.returncode:
        complaint = os.fsdecode(done.stderr).strip().rpartition("\n")[2]
        raise UsageError(f"--ship: git cannot list {folder} ({complaint}).")
    return [os.fsdecode(name).rstrip("/") for name in done.stdout.split(b"\0") if name]


def _git(*words: str) -> subprocess.CompletedProcess[bytes]:
    env = {name: value for name, value in os.environ.items() if name not in _MISLEADING}
    return subprocess.run([*_GIT, *words], env=env, capture_output=True, check=False)


def _without_git(folder: str) -> list[str]:
    paths = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != ".git"]
        if ".gitignore" in files:
            raise UsageError(
                f"--ship: there is no git here that reads {parent}/.gitignore: install git, or "
                "remove that file."
            )
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        paths += [os.path.relpath(os.path.join(parent, name), folder) for name in (*files, *links)]
    return paths


def _check_script(folder: str, script: Script, names: Sequence[str]) -> None:
    """Raise UsageError if SCRIPT is a file here that is not among NAMES in FOLDER."""
    target = script.target
    is_program = "/" not in target and not target.endswith(command.ENDINGS)
    path = os.path.normpath(os.path.join(folder, target))
    if script.form != "file" or is_program or not os.path.exists(path):
        return
    is_inside = path.startswith(f"{folder}/")
    if os.path.isabs(target):
        if is_inside:
            raise UsageError(
                f"--ship sends the folder {folder} to another place: name the script by its path "
                f"there, {os.path.relpath(path, folder)}."
            )
        # A program that every host has.
        return
    if not is_inside:
        raise UsageError(
            f"--ship sends the folder {folder}, and {target} is not in it: start from a folder "
            "that has all that the script needs."
        )
    if os.path.relpath(path, folder) not in names:
        raise UsageError(f"--ship sends what git does not ignore, and {target} is ignored.")


def _check_size(folder: str, names: Sequence[str]) -> None:
    sizes: dict[str, int] = {}
    for name in names:
        part, slash, _ = name.partition("/")
        sizes[part + slash] = sizes.get(part + slash, 0) + _size(os.path.join(folder, name))
    whole = sum(sizes.values())
    if whole <= _MOST_BYTES:
        return
    largest = sorted(sizes.items(), key=lambda part_size: -part_size[1])[:_NAMED]
    shown = ", ".join(f"{part} {size(count)}" for part, count in largest)
    raise UsageError(
        f"--ship sends at most {size(_MOST_BYTES)}, and {folder} has {size(whole)} ({shown}): name "
        "in .gitignore what the job does not need, or copy it to the hosts in another way."
    )


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def _own() -> Iterator[tuple[str, str]]:
    """Yield the files of fleetrun and its libraries, with their paths in the archive."""
    yield from _python(_PACKAGE, "fleetrun")
    # In the wheel, or in a checkout beside the package.
    for folder in (_PACKAGE, os.path.dirname(_PACKAGE)):
        configs = os.path.join(folder, "configs")
        for name in sorted(os.listdir(configs)) if os.path.isdir(configs) else ():
            if name.endswith(".yaml"):
                yield os.path.join(configs, name), f"configs/{name}"
    for library in _LIBRARIES:
        spec = find_spec(library)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            yield from _python(folder, library)
        if spec is not None and not spec.submodule_search_locations and spec.origin is not None:
            yield spec.origin, f"{library}.py"


def _python(folder: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield the modules in FOLDER, of the package NAME."""
    for parent, folders, files in os.walk(folder):
        folders.sort()
        for file in sorted(files):
            if file.endswith(".py"):
                path = os.path.join(parent, file)
                yield path, os.path.join(name, os.path.relpath(path, folder))


def _add(archive: tarfile.TarFile, path: str, name: str) -> None:
    """Add the file or link PATH as NAME, without its owner."""
    entry, data = tarfile.TarInfo(name), b""
    try:
        if os.path.islink(path):
            entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(path)
        else:
            with open(path, "rb") as file:
                data = file.read()
                status = os.fstat(file.fileno())
            entry.size, entry.mode, entry.mtime = len(data), status.st_mode & 0o777, status.st_mtime
    except OSError as error:
        raise UsageError(f"--ship: {path} cannot be read ({error.strerror}).") from None
    archive.addfile(entry, io.BytesIO(data))
