"""Findings about programs and Paddle: each one, and no others."""

from __future__ import annotations

from typing import Any

import pytest
from findings import bad

from fleetrun.doctor import software
from fleetrun.doctor.findings import ERROR, OK, WARNING, Finding
from fleetrun.doctor.nvidia import Gpu, Gpus
from fleetrun.doctor.software import Build, Command, Software

BUILD = Build("3.3.1", "/env/paddle", parts={"gloo": True, "parameter servers": True})
FOR_GPUS = BUILD._replace(cuda="12.6", cudnn="9.5.1", nccl="2.22.3")
OURS = Command("/env/bin/fleetrun", "ours", "/env")
WELL = Software(
    python="/env/bin/python",
    python_version="3.11.7",
    prefix="/env",
    fleetrun="0.1.0",
    activated="/env",
    commands=(OURS,),
    build=BUILD,
    packages=("paddlepaddle 3.3.1",),
)
NO_GPUS = Gpus(has_driver=False)
GPUS = Gpus(
    has_driver=True,
    gpus=(Gpu(0, "H100", "GPU-0", capability=(9, 0)),),
    driver="570.1",
    cuda=(12, 8),
)


def judged(installed: Software, gpus: Gpus = NO_GPUS, feature: str | None = None) -> list[Finding]:
    return list(software.judge(installed, gpus, feature=feature))


def test_software_that_is_well_has_nothing_to_mend() -> None:
    assert bad(judged(WELL)) == []
    assert bad(judged(WELL._replace(build=FOR_GPUS), GPUS)) == []
    assert bad(judged(WELL._replace(activated="/env/"))) == []
    assert bad(judged(WELL._replace(protobuf="7.36.2"))) == []
    old = WELL._replace(build=BUILD._replace(version="2.6.2"))
    assert all(bad(judged(old._replace(protobuf=it))) == [] for it in ("", "4.25.8", "6.33.0"))


@pytest.mark.parametrize(
    ("changed", "check", "level"),
    [
        ({"commands": ()}, "fleetrun on PATH", WARNING),
        ({"commands": (OURS._replace(kind="paddle's"),)}, "fleetrun on PATH", ERROR),
        ({"commands": (OURS, OURS._replace(path="/b/fleetrun"))}, "fleetrun on PATH", WARNING),
        ({"commands": (OURS._replace(prefix="/other"),)}, "fleetrun on PATH", WARNING),
        ({"activated": "/other"}, "Python", WARNING),
        ({"build": None}, "Paddle", WARNING),
        ({"has_setuptools": False}, "setuptools", ERROR),
        (
            {"build": BUILD._replace(version="2.6.2"), "protobuf": "7.36.2"},
            "protobuf",
            ERROR,
        ),
        ({"build": BUILD._replace(parts={"gloo": False})}, "gloo", ERROR),
        (
            {"packages": ("paddlepaddle 3.3.1", "paddlepaddle-gpu 3.3.1")},
            "Paddle packages",
            ERROR,
        ),
    ],
)
def test_what_is_not_well_is_the_one_finding(
    changed: dict[str, Any], check: str, level: str
) -> None:
    assert bad(judged(WELL._replace(**changed))) == [(check, level)]


@pytest.mark.parametrize(
    ("changed", "fix"),
    [
        (
            {"is_command_lost": True, "has_command": False},
            "cp /env/bin/fleetrunx /env/bin/fleetrun",
        ),
        ({}, 'export PATH="/env/bin:$PATH"  # or `/env/bin/python -m fleetrun`'),
        (
            {"has_command": False},
            "/env/bin/python -m fleetrun  # or `/env/bin/python -m pip install FOLDER` of fleetrun",
        ),
    ],
)
def test_what_gives_the_command_depends_on_what_is_there(changed: dict[str, Any], fix: str) -> None:
    (missing,) = (
        finding for finding in judged(WELL._replace(commands=(), **changed)) if finding.level != OK
    )
    assert missing.fix == fix


def test_the_paddle_to_install_is_one_for_the_gpus_of_the_host() -> None:
    fixes = [
        finding.fix
        for gpus in (NO_GPUS, GPUS)
        for finding in judged(WELL._replace(build=None, packages=()), gpus)
        if finding.check == "Paddle"
    ]
    assert fixes == [
        "/env/bin/python -m pip install paddlepaddle",
        "scripts/setup  # or pip install paddlepaddle-gpu of a fitting CUDA",
    ]


def test_a_part_that_the_job_needs_and_paddle_lacks_is_an_error() -> None:
    build = BUILD._replace(parts={"gloo": True, "parameter servers": False})
    lacking = WELL._replace(build=build)
    assert bad(judged(lacking)) == []
    assert bad(judged(lacking, feature="parameter servers")) == [("Paddle", ERROR)]


def test_a_build_for_cpus_leaves_gpus_idle() -> None:
    assert bad(judged(WELL, GPUS)) == [("Paddle", ERROR)]


@pytest.mark.parametrize(
    ("built", "driver", "level"),
    [("12.6", (12, 8), OK), ("12.9", (12, 8), WARNING), ("13.0", (12, 8), ERROR)],
)
def test_paddles_cuda_is_held_against_the_driver(
    built: str, driver: tuple[int, int], level: str
) -> None:
    wanted = WELL._replace(build=FOR_GPUS._replace(cuda=built))
    findings = judged(wanted, GPUS._replace(cuda=driver))
    assert [finding.level for finding in findings if finding.check == "driver for Paddle"] == [
        level
    ]


@pytest.mark.parametrize(
    ("built", "capability", "level"),
    [
        ("11.8", (9, 0), OK),
        ("11.6", (9, 0), ERROR),
        ("12.6", (10, 0), ERROR),
        ("12.9", (12, 0), OK),
        ("13.0", (7, 0), ERROR),
        ("12.6", (3, 7), ERROR),
        ("12.6", (6, 1), OK),
    ],
)
def test_paddles_cuda_is_held_against_the_gpu(
    built: str, capability: tuple[int, int], level: str
) -> None:
    wanted = WELL._replace(build=FOR_GPUS._replace(cuda=built))
    gpus = GPUS._replace(gpus=(Gpu(0, "X", "GPU-0", capability=capability),), cuda=None)
    (finding,) = [
        finding for finding in judged(wanted, gpus) if finding.check == "Paddle for this GPU"
    ]
    assert finding.level == level
    # A Paddle that ran there is not doubted.
    assert bad(list(software.judge(wanted, gpus, is_proven=True))) == []
