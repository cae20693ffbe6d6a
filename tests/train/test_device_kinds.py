"""Launches that train on the device under test, whatever it is called."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import devices
import pytest
from checkout import ROOT
from commandline import FLEETRUN
from training import PROGRAMS, PYTHONS, made_once, run

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

pytestmark = pytest.mark.train

# Prefixes of a plug-in's own variables, which another plug-in must not read.
_OWN, _OTHER = b"TESTDEVICE_", b"OTHERSUCH__"


def launch(
    folder: Path, program: str, *options: str, version: str = "3.3.1", **more: str
) -> subprocess.CompletedProcess[str]:
    """Run `fleetrun OPTIONS` with PROGRAM and the Paddle of VERSION; the kind is detected."""
    python = PYTHONS[version]
    told = {"PADDLE_DISTRI_BACKEND": "", "PADDLE_XCCL_BACKEND": "", "PYTHONPATH": str(ROOT)}
    words = [*FLEETRUN[1:], *options, str(PROGRAMS), program]
    return run(python, words, folder, **{**told, "OUTPUT": str(folder / "report"), **more})


def reports(folder: Path) -> list[dict[str, Any]]:
    """Return what the ranks of a launch in FOLDER have reported, in their order."""
    files = sorted(folder.glob("report.*"))
    return [json.loads(file.read_text()) for file in files]


def weights_on_the_cpu(folder: Path) -> list[float]:
    """Train on the CPU, although Paddle prefers its plug-in."""
    with devices.on("mlu", count=4):
        done = launch(folder, "training", "--nproc_per_node=1", "--device_kind=cpu")
    assert done.returncode == 0, done.stdout
    (report,) = reports(folder)
    assert report["place"] == "Place(cpu)"
    weights: list[float] = report["weights"]
    return weights


@pytest.fixture
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Train once on the CPU."""
    trained: list[float] = made_once(tmp_path_factory, "cpu", weights_on_the_cpu)
    return trained


@pytest.mark.parametrize(("kind", "version", "count"), [("foo", "3.3.1", 1), ("mlu", "2.6.2", 2)])
def test_a_script_trains_on_every_device_of_a_kind(
    tmp_path: Path, weights: list[float], kind: str, version: str, count: int
) -> None:
    with devices.on(kind, count=count, delay_us=2000):
        done = launch(tmp_path, "training", version=version)
    assert done.returncode == 0, done.stdout
    several = f"0-{count - 1}" if count > 1 else "0"
    assert f"devices {kind} {several}; backend xccl" in done.stdout
    reported = reports(tmp_path)
    assert [report["place"] for report in reported] == [f"Place({kind}:{n})" for n in range(count)]
    for report in reported:
        assert report["weights"] == pytest.approx(weights, abs=1e-5)


def test_one_of_two_kinds_is_chosen_and_a_mask_that_no_plugin_reads_holds_all_the_same(
    tmp_path: Path, weights: list[float]
) -> None:
    built = devices.library(PYTHONS["3.3.1"])
    folder = tmp_path / "plug-ins"
    folder.mkdir()
    (folder / "libone.so").symlink_to(built)
    (folder / "libother.so").write_bytes(built.read_bytes().replace(_OWN, _OTHER))
    more = {
        "CUSTOM_DEVICE_ROOT": str(folder),
        f"{_OTHER.decode()}KIND": "mlu",
        f"{_OTHER.decode()}COUNT": "4",
        "MLU_VISIBLE_DEVICES": "3,1",
    }
    # The other one is not even loaded.
    with devices.on("npu", count=2):
        done = launch(tmp_path, "training", "--device_kind=mlu", **more)
    assert done.returncode == 0, done.stdout
    reported = reports(tmp_path)
    assert [report["place"] for report in reported] == ["Place(mlu:3)", "Place(mlu:1)"]
    for report in reported:
        assert report["weights"] == pytest.approx(weights, abs=1e-5)


def test_the_report_of_a_collective_that_fails_names_the_device_and_its_plug_in(
    tmp_path: Path,
) -> None:
    with devices.on("mlu", count=4, fault="error@3:1", loss="hang"):
        done = launch(tmp_path, "sums", "--mlus=2,3")
    assert done.returncode == 1, done.stdout
    assert "It failed first" in done.stdout
    assert "(MLU 3), pid" in done.stdout
    assert "The plug-in of this device has failed" in done.stdout


def test_the_report_of_a_hang_names_the_device(tmp_path: Path) -> None:
    with devices.on("mlu", count=4, fault="hang@3:1", loss="hang"):
        words = ("--hang_timeout=6", "--devices=0,1")
        done = launch(tmp_path, "sums", *words)
    assert done.returncode == 124, done.stdout
    assert "Ranks 0-1 stand in" in done.stdout


@pytest.mark.parametrize(
    ("version", "count", "listed"),
    [("3.3.1", 4, "1,2"), pytest.param("2.6.2", 2, "1", marks=pytest.mark.long)],
)
def test_paddle_checks_the_devices_that_are_named(
    tmp_path: Path, version: str, count: int, listed: str
) -> None:
    words = [*FLEETRUN[1:], "--tee=all", f"--devices={listed}", "run_check"]
    with devices.on("mlu", count=count):
        done = run(PYTHONS[version], words, tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout
    ranks = "2 ranks" if "," in listed else "1 rank"
    assert done.stdout.count(f"PaddlePaddle works well on {ranks}.") == len(listed.split(","))
