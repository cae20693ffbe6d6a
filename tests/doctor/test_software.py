"""Findings about programs, Paddle, its computing on GPUs: each one, no others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from findings import bad
from plans import a_request

from fleetrun.doctor import gpu_check, software
from fleetrun.doctor.checked_job import CheckedJob
from fleetrun.doctor.findings import ERROR, OK, WARNING
from fleetrun.host.nvml import Survey
from fleetrun.host.paddles import InstalledPaddle
from fleetrun.model import Gpu

if TYPE_CHECKING:
    from pathlib import Path

BUILD = InstalledPaddle("3.3.1", "/env/paddle")
FOR_GPUS = BUILD._replace(cuda="12.6")
GPUS = Survey(gpus=(Gpu("GPU-0"),), driver="570.1", cuda=(12, 8))
OURS, PADDLES = "from fleetrun.__main__ import run", "import paddle.distributed.launch"


def a_job(**fields: Any) -> CheckedJob:
    return CheckedJob(a_request(), {}, paddle=BUILD)._replace(**fields)


def script(folder: Path, text: str) -> Path:
    (folder / "bin").mkdir(parents=True)
    made = folder / "bin" / "fleetrun"
    made.write_text(text)
    made.chmod(0o755)
    return made


@pytest.mark.parametrize(
    ("first", "second", "level", "seen"),
    [
        (OURS, "", OK, "a/bin/fleetrun, version "),
        (PADDLES, OURS, ERROR, "the first is Paddle's own: "),
        ("", OURS, WARNING, "b/bin/fleetrun is of another environment than this one"),
        ("", "", WARNING, "there is none"),
    ],
)
def test_the_fleetrun_that_a_shell_starts_is_judged(
    tmp_path: Path, first: str, second: str, level: str, seen: str
) -> None:
    for name, text in (("a", first), ("b", second)):
        if text:
            script(tmp_path / name, text)
    # Another way to the same, one that cannot be executed, and a folder that is missing.
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "fleetrun").write_text("text")
    path = ":".join(f"{tmp_path}/{name}" for name in ("d", "a/bin", "link/bin", "b/bin", "nowhere"))
    (finding,) = software.command(a_job(environ={"PATH": path}), str(tmp_path / "a"))
    assert finding.level == level
    assert seen in finding.seen


@pytest.mark.parametrize(
    ("fields", "installed", "findings"),
    [
        ({}, ("protobuf-7.36.2",), []),
        ({"paddle": FOR_GPUS, "driver": GPUS}, (), []),
        ({"paddle": None}, (), [("Paddle", WARNING)]),
        # A build for CPUs leaves GPUs idle.
        ({"driver": GPUS}, (), [("Paddle", ERROR)]),
        ({}, ("paddlepaddle-3.3.1", "paddlepaddle_gpu-3.3.1"), [("Paddle packages", ERROR)]),
        ({"paddle": BUILD._replace(version="2.6.2")}, ("protobuf-4.25.8",), []),
        (
            {"paddle": BUILD._replace(version="2.6.2")},
            ("protobuf-7.36.2",),
            [("protobuf", ERROR)],
        ),
    ],
)
def test_what_is_wrong_with_paddle_is_the_one_finding(
    tmp_path: Path,
    fields: dict[str, Any],
    installed: tuple[str, ...],
    findings: list[tuple[str, str]],
) -> None:
    (tmp_path / "setuptools").mkdir()
    (tmp_path / "setuptools/__init__.py").touch()
    for name in installed:
        (tmp_path / f"{name}.dist-info").mkdir()
    assert bad(software.paddle(a_job(**fields), [str(tmp_path)])) == findings


@pytest.mark.parametrize(
    ("built", "driver", "levels"),
    [("12.6", (12, 8), []), ("12.9", (12, 8), []), ("13.0", (12, 8), [ERROR])],
)
def test_paddles_cuda_is_held_against_the_driver(
    built: str, driver: tuple[int, int], levels: list[str]
) -> None:
    job = a_job(paddle=FOR_GPUS._replace(cuda=built), driver=GPUS._replace(cuda=driver))
    findings = list(software.paddle(job))
    own = [finding.level for finding in findings if finding.check == "driver for Paddle"]
    assert own == levels


# -- Paddle on the GPUs ---------------------------------------------------------------------------

REPORT: dict[str, Any] = {"devices": ["gpu:0", "gpu:1"], "libraries": [], "failed": None}
FAILED = {"device": "gpu:1", "step": "convolution", "how": "ended with 255", "words": "a\nthe last"}


@pytest.mark.parametrize(
    ("change", "seen", "fix"),
    [
        ({}, "convolution on gpu:1 ended with 255: the last", "# shows its output"),
        ({"words": ""}, "convolution on gpu:1 ended with 255: no output", "# shows its output"),
        ({"step": "sum of the ranks"}, "sum of the ranks on gpu:1", "--env NCCL_P2P_DISABLE=1"),
    ],
)
def test_a_step_that_fails_is_an_error(change: dict[str, str], seen: str, fix: str) -> None:
    (finding,) = gpu_check.judge({**REPORT, "failed": {**FAILED, **change}}, "python")
    assert (finding.check, finding.level) == ("Paddle on the GPUs", ERROR)
    assert finding.seen.startswith(seen)
    assert fix in finding.fix
