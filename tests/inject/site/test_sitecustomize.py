"""The code that runs in the user's Python before the user's own leaves no trace."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import fleetrun

SITE = str(Path(fleetrun.__file__).parent / "inject" / "site")


def printed(code: str, *paths: str, **env: str) -> str:
    """Return the output of CODE in a rank's Python that has PATHS on its PYTHONPATH."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


SEE = """
import sys
import zipfile
import __main__
ours = {"sitecustomize"}
print(sys.path, sys.argv, __main__.__dict__.keys(), sorted(sys.modules.keys() - ours))
print([p for p in sys.path_importer_cache if "inject" in p])
"""


def test_paths_arguments_and_modules_are_as_without_it(tmp_path: Path) -> None:
    # `faulthandler` and `atexit` are built into the interpreter.
    also = f"import faulthandler, atexit\n{SEE}print(len(sys.meta_path))\n"
    env = {"FLEETRUN_RECORDS": str(tmp_path / "error"), "FLEETRUN_STACK_SIGNAL": "60"}
    assert printed(also, SITE, str(tmp_path), **env) == printed(also, str(tmp_path))


def test_the_users_own_sitecustomize_runs_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine', __file__)\nflag = 1\n")
    code = "import sitecustomize; print(sitecustomize.flag)"
    assert printed(code, SITE, str(tmp_path)) == f"mine {tmp_path}/sitecustomize.py\n1\n"


def test_what_fails_in_the_users_own_sitecustomize_fails_as_before(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import nowhere_at_all\n")
    assert printed("print(1)", SITE, str(tmp_path)) == printed("print(1)", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('mine')\n")
    with_island = printed("print(1)", SITE, str(tmp_path), FLEETRUN_RECORDS=str(tmp_path / "e"))
    assert with_island == printed("print(1)", str(tmp_path))
    # fleetrun's own hook still records the error.
    printed("raise OSError", SITE, str(tmp_path), FLEETRUN_RECORDS=str(tmp_path / "e"))
    assert (tmp_path / "e").exists()


def test_a_hook_that_was_there_before_is_called(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.excepthook = lambda *_: print('theirs')\n"
    )
    path = tmp_path / "error.json"
    assert printed("1 / 0", SITE, str(tmp_path), FLEETRUN_RECORDS=str(path)) == "theirs\n"
    assert "ZeroDivisionError" in path.read_text()


def test_a_folder_that_is_gone_is_no_trouble(tmp_path: Path) -> None:
    plain = printed("raise OSError('x')", str(tmp_path))
    gone = str(tmp_path / "gone" / "error.json")
    assert printed("raise OSError('x')", SITE, FLEETRUN_RECORDS=gone) == plain
    (tmp_path / "error.json").mkdir()
    there = str(tmp_path / "error.json")
    assert printed("raise OSError('x')", SITE, FLEETRUN_RECORDS=there) == plain
    assert [entry.name for entry in tmp_path.iterdir()] == ["error.json"]


def test_fleetrun_may_be_removed_while_ranks_run(tmp_path: Path) -> None:
    site = tmp_path / "site"
    shutil.copytree(SITE, site)
    (tmp_path / "paddle.py").write_text("print('imported')\n")
    env = {
        "FLEETRUN_RECORDS": str(tmp_path / "records"),
        "PADDLE_TRAINERS_NUM": "2",
        "PYTHONFAULTHANDLER": "1",
    }
    remove = f"import shutil; shutil.rmtree({str(site)!r}, ignore_errors=True)\n"
    text = printed(remove + "import paddle; raise OSError('x')", str(site), str(tmp_path), **env)
    *lines, last = printed(remove + "import paddle; raise OSError('x')", str(tmp_path)).splitlines()
    assert [line for line in text.splitlines() if "fleetrun" not in line] == [*lines, last]
    assert "fleetrun: nothing is changed in Paddle: FileNotFoundError" in text
    shutil.copytree(SITE, site)
    strategy = {"FLEETRUN_STRATEGY_FILE": str(tmp_path / "strategy.json")}
    text = printed(remove + "import paddle", str(site), str(tmp_path), **env, **strategy)
    # The other ranks would wait for one without the strategy.
    assert "imported" not in text
    assert "FileNotFoundError" in text


PADDLE = """
import ctypes, faulthandler, signal
libc = ctypes.CDLL(None)
def handler(signum):
    print("theirs", flush=True)
    libc._exit(9)
kept = ctypes.CFUNCTYPE(None, ctypes.c_int)(handler)
libc.signal(signal.SIGSEGV, kept)
"""


def test_s15_python_and_paddle_both_show_a_crash(tmp_path: Path) -> None:
    # Like Paddle, this fake replaces Python's handler by its own.
    base = tmp_path / "paddle" / "base"
    base.mkdir(parents=True)
    (tmp_path / "paddle" / "__init__.py").write_text("import paddle.base\nimport paddle.nn\n")
    (base / "__init__.py").write_text("import paddle.base.core\n")
    (base / "core.py").write_text(PADDLE)
    (tmp_path / "paddle" / "nn.py").write_text("")
    code = "import os, sys, paddle\nprint(len(sys.meta_path), flush=True)\nos.kill(os.getpid(), 11)"
    output = printed(code, SITE, str(tmp_path), PYTHONFAULTHANDLER="1")
    assert "Fatal Python error: Segmentation fault" in output
    assert "theirs" in output
    finders = printed("import sys; print(len(sys.meta_path))", str(tmp_path))
    assert output.startswith(finders)


def test_a_strategy_that_cannot_be_read_is_said_and_paddle_is_imported(tmp_path: Path) -> None:
    (tmp_path / "paddle.py").write_text("print('imported')\n")
    env = {"FLEETRUN_STRATEGY_FILE": str(tmp_path / "nowhere")}
    text = printed("import paddle", SITE, str(tmp_path), **env)
    assert text.startswith("imported\n")
    assert "fleetrun: the strategy cannot be applied: FileNotFoundError" in text
    # A record that cannot be written does not end the training either.
    text = printed("import paddle", SITE, str(tmp_path), **env, FLEETRUN_RECORDS=str(tmp_path))
    assert text.startswith("imported\n")
    assert "fleetrun: the strategy cannot be applied: FileNotFoundError" in text


def test_paddle_is_imported_with_few_collections_and_without_the_command_of_httpx(
    tmp_path: Path,
) -> None:
    (tmp_path / "paddle.py").write_text("import gc, httpx; print(gc.get_threshold())\n")
    package = tmp_path / "httpx"
    package.mkdir()
    (package / "__init__.py").write_text(
        "try: from ._main import main\nexcept ImportError: print('no command')\n"
    )
    (package / "_main.py").write_text("main = print('command')\n")
    see = "print(gc.get_threshold(), gc.isenabled())"
    code = f"import gc; gc.set_threshold(500, 6, 7); import paddle; {see}"
    faster = "no command\n(100000, 6, 7)\n(500, 6, 7) True\n"
    assert printed(code, SITE, str(tmp_path), PADDLE_TRAINERS_NUM="2") == faster
    # A script that wants no collections gets none.
    off = f"import gc; gc.set_threshold(0); import paddle; {see}"
    none = "no command\n(0, 10, 10)\n(0, 10, 10) True\n"
    assert printed(off, SITE, str(tmp_path), PADDLE_TRAINERS_NUM="2") == none
    # What is no rank is as without fleetrun.
    assert printed(code, SITE, str(tmp_path)).startswith("command\n(500, 6, 7)\n")


def test_what_waits_for_a_module_of_paddle_is_called_after_it(tmp_path: Path) -> None:
    base = tmp_path / "paddle" / "base"
    base.mkdir(parents=True)
    (tmp_path / "paddle" / "__init__.py").write_text("import paddle.base.core\n")
    (base / "__init__.py").write_text("")
    (base / "core.py").write_text("class eager:\n    def run_backward(tensors): ...\n")
    (tmp_path / "strategy.json").write_text('{"schema": 1}')
    code = """
import sys
import zipfile
import paddle
core = paddle.base.core
print(hasattr(core.eager.run_backward, "__wrapped__"))
print(type(core.__loader__).__name__, type(core.__spec__.loader).__name__)
"""
    env = {
        "FLEETRUN_STRATEGY_FILE": str(tmp_path / "strategy.json"),
        # Losses are recorded only with this.
        "FLEETRUN_STOP_AFTER": "9",
    }
    *lines, told = printed(code, SITE, str(tmp_path), **env).splitlines()
    assert lines == ["True", "SourceFileLoader SourceFileLoader"]
    assert told.startswith("fleetrun: Paddle of unknown version differs from the versions")


def test_what_cannot_be_put_into_a_paddle_is_said_and_the_import_goes_on(tmp_path: Path) -> None:
    # This fake has no function that runs a backward, so no losses can be recorded.
    (tmp_path / "paddle.py").write_text("")
    (tmp_path / "strategy.json").write_text('{"schema": 1}')
    env = {
        "FLEETRUN_STRATEGY_FILE": str(tmp_path / "strategy.json"),
        "FLEETRUN_RECORDS": str(tmp_path / "rank.0.jsonl"),
        "FLEETRUN_STOP_AFTER": "9",
    }
    text = printed("import paddle; print('on')", SITE, str(tmp_path), **env)
    assert text.startswith("on\nfleetrun: Paddle of unknown version differs from the versions")
    assert (
        "paddle.base.core.eager.run_backward is missing: the losses of steps are not recorded"
        in text
    )
    # The remark is a single line.
    assert text.count("\n") == 2
