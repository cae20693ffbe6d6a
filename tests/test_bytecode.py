"""A launch loads its modules from one file, and never others than Python itself would."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from waiting import LONG_S

from fleetrun.sinks import packing

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]
NAMES = [f"fleetrun.{name}" for name in (packing.EARLY + packing.LATE).split()]
# Enough of each part for what does not depend on how many modules there are: to compile all takes
# half a second each time.
FEW = (
    "conversion errors model plan plan.kinds plan.origin plan.hosts plan.masks run run.libc",
    "records.variables records.secrets records.arguments plan.shell",
)
# Folders without any of them.
UNUSED = ["commands", "doctor", "engines", "entrance", "modes", "postmortem", "probe"]
UNUSED += ["remote", "session", "sources"]
WRITE = "from fleetrun.sinks import packing; packing.write()"
WRITE_FEW = WRITE.replace(";", f"; packing.EARLY, packing.LATE = {FEW};")
LOAD = """
import json, sys
from fleetrun import bytecode
bytecode.load(bytecode.EARLY)
bytecode.load(bytecode.LATE)
"""
# As Python itself does it.
IMPORT = f"""
import json, sys
from importlib import import_module
for name in {NAMES!r}:
    import_module(name)
"""
# Everything about the modules that does not differ from one process to another.
SHOW = f"""
def look(name):
    module = sys.modules[name]
    spec = module.__spec__
    parent, _, child = name.rpartition(".")
    assert getattr(sys.modules[parent], child) is module
    values = {{key: value for key, value in vars(module).items() if key[:2] != "__"}}
    codes = [value.__code__ for value in values.values() if hasattr(value, "__code__")]
    return [
        sorted(values),
        sorted(vars(module)),
        [repr(getattr(module, key, None)) for key in ("__doc__", "__package__", "__path__",
            "__file__", "__cached__", "__name__")],
        [repr(getattr(spec, key)) for key in ("name", "origin", "cached", "has_location", "parent",
            "submodule_search_locations")],
        [type(module.__loader__).__name__, spec.loader is module.__loader__, vars(spec.loader)],
        [(code.co_filename, code.co_firstlineno, code.co_code.hex()) for code in codes],
    ]
print(json.dumps({{name: look(name) for name in {NAMES!r}}}))
"""
LOADED = """
print(json.dumps([sum(name in sys.modules for name in {names}), bytecode.is_outdated]))
"""


class Package:
    """A copy of the package in FOLDER, whose sources may be changed.

    Its file has all modules of a launch if it IS_WHOLE, or else FEW.
    """

    def __init__(self, folder: Path, *, is_whole: bool = False) -> None:
        self.folder = folder
        self.write = WRITE if is_whole else WRITE_FEW
        few = [f"fleetrun.{name}" for part in FEW for name in part.split()]
        self.names = NAMES if is_whole else few
        self.file = Path(cache_from_source(str(folder / "fleetrun" / "packed.py")))

    def start(self, *words: str, **env: str) -> subprocess.Popen[str]:
        """Start Python with WORDS."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=self.folder,
            env={**kept, "PYTHONPATH": str(self.folder), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, **env: str) -> str:
        """Return what Python prints with WORDS."""
        process = self.start(*words, **env)
        output, errors = process.communicate(timeout=LONG_S)
        assert process.returncode == 0, errors
        return output

    def loads(self, *words: str, **env: str) -> tuple[int, bool]:
        """Return how many modules are loaded from the file, and whether it is outdated."""
        count, is_outdated = json.loads(
            self.run(*words, "-c", LOAD + LOADED.format(names=self.names), **env)
        )
        return count, is_outdated


def written(folder: Path, *ignored: str, is_whole: bool) -> Path:
    ignored = ("__pycache__", "inject", "locale", "strategy", *ignored)
    ignore = shutil.ignore_patterns(*ignored)
    shutil.copytree(ROOT / "fleetrun", folder / "fleetrun", ignore=ignore)
    package = Package(folder, is_whole=is_whole)
    package.run("-c", package.write)
    return folder


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("few"), *UNUSED, is_whole=False)


@pytest.fixture(scope="module")
def whole_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("whole"), is_whole=True)


@pytest.fixture
def package(template: Path, tmp_path: Path) -> Package:
    """Return a package of which a test may change all, whose file has some modules."""
    shutil.copytree(template / "fleetrun", tmp_path / "fleetrun")
    return Package(tmp_path)


@pytest.fixture
def unchanged(template: Path) -> Package:
    """Return the same package, for tests that change nothing in it."""
    return Package(template)


@pytest.fixture
def whole(whole_template: Path, tmp_path: Path) -> Package:
    """Return a package whose file has all modules of a launch."""
    shutil.copytree(whole_template / "fleetrun", tmp_path / "fleetrun")
    return Package(tmp_path, is_whole=True)


def modules(package: Package, code: str, *words: str) -> dict[str, Any]:
    seen: dict[str, Any] = json.loads(package.run(*words, "-c", code + SHOW))
    assert list(seen) == NAMES
    return seen


@pytest.mark.parametrize("words", [(), ("-O",)], ids=["plain", "optimized"])
def test_modules_are_as_python_would_import_them(whole: Package, words: tuple[str, ...]) -> None:
    if words:
        whole.run(*words, "-c", whole.write)
    assert whole.loads(*words) == (len(NAMES), False)
    assert modules(whole, LOAD, *words) == modules(whole, IMPORT, *words)


def test_a_folder_that_was_moved_has_its_new_paths(whole: Package, tmp_path: Path) -> None:
    moved = Package(tmp_path / "elsewhere", is_whole=True)
    moved.folder.mkdir()
    (tmp_path / "fleetrun").rename(moved.folder / "fleetrun")
    assert moved.loads() == (len(NAMES), False)
    assert modules(moved, LOAD) == modules(moved, IMPORT)


def test_a_changed_source_is_what_counts(package: Package) -> None:
    source = package.folder / "fleetrun" / "plan" / "masks.py"
    source.write_text(source.read_text() + "\nNEW = 1\n")
    code = f"{LOAD}\nfrom fleetrun.plan import masks\nprint(masks.NEW, bytecode.is_outdated)"
    assert package.run("-c", code) == "1 True\n"
    package.run("-c", package.write)
    assert package.run("-c", code) == "1 False\n"


def test_a_source_of_the_same_size_and_another_time_is_read(package: Package) -> None:
    source = package.folder / "fleetrun" / "plan" / "masks.py"
    seen = source.stat()
    source.write_text(source.read_text().replace("would see", "could see"))
    # In the same second, which is all that Python itself looks at.
    os.utime(source, ns=(seen.st_atime_ns, seen.st_mtime_ns // 10**9 * 10**9 + 1))
    assert package.loads()[1]


def test_a_module_that_is_gone_is_not_loaded(package: Package) -> None:
    (package.folder / "fleetrun" / "plan" / "masks.py").unlink()
    assert package.loads()[1]
    missing = "try: import fleetrun.plan.masks\nexcept ImportError as error: print(error.name)"
    assert package.run("-c", LOAD + missing) == "fleetrun.plan.masks\n"


def _half(data: bytes) -> bytes:
    return data[: len(data) // 2]


@pytest.mark.parametrize(
    "spoil",
    [
        _half,
        lambda data: data[:20],
        lambda _: b"",
        lambda data: bytes(len(data)),
        lambda data: b"\0\0\0\0" + data[4:],
        lambda data: data[:16] + b"\xff" * 99,
    ],
    ids=["half", "head", "empty", "zeros", "another Python", "no marshal"],
)
def test_a_spoiled_file_is_not_used_and_written_again(
    package: Package, spoil: Callable[[bytes], bytes]
) -> None:
    package.file.write_bytes(spoil(package.file.read_bytes()))
    assert package.loads()[1]
    package.run("-c", package.write)
    assert package.loads() == (len(package.names), False)


def test_a_file_of_another_format_is_not_used(package: Package) -> None:
    source = package.folder / "fleetrun" / "bytecode.py"
    source.write_text(source.read_text().replace("FORMAT = ", "FORMAT = 1000 + "))
    assert package.loads()[1]


def test_a_module_that_fails_fails_where_it_is_wanted(package: Package) -> None:
    source = package.folder / "fleetrun" / "run" / "libc.py"
    source.write_text(source.read_text() + "\nimport of_no_package\n")
    package.run("-c", package.write)
    wanted = "try: import fleetrun.run.libc\nexcept ImportError as error: print(error.name)"
    begun = (
        "ours = [module for name, module in sys.modules.items() if name[:9] == 'fleetrun.']\n"
        "print([module for module in ours if '__builtins__' not in vars(module)])"
    )
    output = package.run("-c", f"{LOAD}\n{wanted}\n{begun}")
    assert output == "of_no_package\n[]\n"


def test_tools_see_sources(unchanged: Package) -> None:
    code = """
import importlib, importlib.resources, inspect, pickle, pkgutil, traceback
from fleetrun.plan import hosts
from fleetrun import model
assert inspect.getsource(hosts.bounds).startswith("def bounds("), inspect.getsource(hosts.bounds)
try:
    hosts.bounds(None)
except Exception:
    assert "in bounds\\n    " in traceback.format_exc(), traceback.format_exc()
assert importlib.resources.files("fleetrun.plan").joinpath("hosts.py").is_file()
assert pkgutil.get_data("fleetrun.plan", "hosts.py").startswith(b'"')
folder = sys.modules["fleetrun.plan"].__path__
assert "hosts" in [module.name for module in pkgutil.iter_modules(folder)]
assert pickle.loads(pickle.dumps(hosts.bounds)) is hosts.bounds
old = hosts.bounds
assert importlib.reload(hosts).bounds is not old
assert importlib.util.find_spec("fleetrun.plan.hosts").origin == hosts.__file__
"""
    unchanged.run("-c", LOAD + code)


def test_code_has_neither_docstrings_nor_columns(unchanged: Package) -> None:
    code = """
from fleetrun.plan import hosts
from fleetrun.model import Script
code = hosts.bounds.__code__
columns = {place[2:] for place in getattr(code, "co_positions", tuple)()}
# Python itself gives the beginning of a function one.
print(hosts.bounds.__doc__, Script.__doc__, columns <= {(None, None), (0, 0)})
"""
    assert unchanged.run("-c", LOAD + code) == "See the source. See the source. True\n"
    assert "See the source" not in unchanged.run("-c", code)


def test_a_launch_does_not_import_future(whole: Package) -> None:
    code = """
import sys
from fleetrun import __main__, cli, bytecode
bytecode.load(bytecode.EARLY)
from fleetrun import job
print("__future__" in sys.modules, job.launch.__annotations__["request"])
"""
    assert whole.run("-c", code) == "False Request\n"


def test_who_looks_at_imports_sees_them_one_by_one(unchanged: Package) -> None:
    assert unchanged.loads("-X", "importtime") == (0, False)


def test_bytecode_elsewhere_is_left_to_python(unchanged: Package, tmp_path: Path) -> None:
    assert unchanged.loads(PYTHONPYCACHEPREFIX=str(tmp_path / "cache")) == (0, False)


def test_a_launch_writes_the_file_only_where_python_would(whole: Package) -> None:
    whole.file.unlink()
    assert whole.loads("-B") == (0, False)
    assert whole.loads() == (0, True)
    # It ends when the file is there, which is written anew by renaming.
    script = whole.folder / "wait.py"
    script.write_text(
        "import os, time\n"
        f"while not os.path.exists({str(whole.file)!r}) or "
        f"os.path.getsize({str(whole.file)!r}) < 100_000: time.sleep(0.01)\n"
    )
    whole.run("-m", "fleetrun", "--nproc_per_node=1", "wait.py")
    assert whole.loads() == (len(whole.names), False)
    assert (
        whole.file.stat().st_mode & 0o777
        == ((whole.folder / "fleetrun" / "packed.py").stat().st_mode & 0o666 | 0o200) & ~_umask()
    )


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def test_hashed_bytecode_is_left_as_it_is(package: Package) -> None:
    package.run("-m", "compileall", "-qf", "--invalidation-mode=checked-hash", "fleetrun/packed.py")
    before = package.file.read_bytes()
    package.run("-c", package.write)
    assert package.file.read_bytes() == before
    assert package.loads() == (0, True)


def test_several_launches_may_write_at_once(package: Package) -> None:
    package.file.unlink()
    writers = [package.start("-c", package.write) for _ in range(3)]
    for writer in writers:
        assert writer.communicate(timeout=LONG_S)[1] == ""
        assert package.loads() == (len(package.names), False)
    assert [path.name for path in package.file.parent.glob("packed.*")] == [package.file.name]
