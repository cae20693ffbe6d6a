"""Programs on PATH and installed Paddles for a check-up, without importing one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from fleetrun.doctor import software

if TYPE_CHECKING:
    from pathlib import Path


def script(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / "fleetrun"
    made.write_text(text)
    made.chmod(0o755)
    return made


def test_every_fleetrun_of_path_is_told_apart(tmp_path: Path) -> None:
    ours = script(tmp_path / "a" / "bin", "from fleetrun.__main__ import run\n")
    paddles = script(tmp_path / "b" / "bin", "from paddle.distributed.launch.main import launch\n")
    other = script(tmp_path / "c", "echo\n")
    (tmp_path / "link").symlink_to(tmp_path / "a" / "bin")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "fleetrun").write_text("not executable")
    folders = ("b/bin", "a/bin", "link", "d", "nowhere", "c")
    installed = software.read({"PATH": ":".join(str(tmp_path / name) for name in folders)})
    assert [(command.path, command.kind) for command in installed.commands] == [
        (str(paddles), "paddle's"),
        (str(ours), "ours"),
        (str(other), "other"),
    ]
    assert installed.commands[1].prefix == str(tmp_path / "a")


def test_a_paddle_is_read_by_its_files(tmp_path: Path) -> None:
    version = tmp_path / "paddle" / "version"
    version.mkdir(parents=True)
    (version / "__init__.py").write_text(
        "full_version     = '9.9.9'\ncuda_version     = '12.6'\ncudnn_version = 'False'\n"
        "nccl_version = '0'\n"
    )
    for name in ("paddlepaddle_gpu-9.9.9.dist-info", "paddlepaddle-3.3.1.dist-info"):
        (tmp_path / name).mkdir()
    installed = software.read({}, path=[str(tmp_path / "nowhere"), str(tmp_path)])
    assert installed.build is not None
    assert (installed.build.version, installed.build.cuda) == ("9.9.9", "12.6")
    assert (installed.build.cudnn, installed.build.nccl, installed.build.parts) == ("", "", {})
    assert set(installed.packages) == {"paddlepaddle 3.3.1", "paddlepaddle-gpu 9.9.9"}
    assert software.read({}, path=[str(tmp_path / "nowhere")]).build is None


def test_the_paddle_that_is_here_has_gloo_and_is_not_imported() -> None:
    installed = software.read({})
    assert installed.build is not None
    assert installed.build.parts["gloo"]
    assert installed.python == sys.executable
    assert "paddle" not in sys.modules
