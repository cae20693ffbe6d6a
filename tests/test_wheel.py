"""The wheel has all that a launch needs, and works where there is no checkout and no Paddle."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from waiting import LONG_S

from fleetrun.strategy import load

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PIP = (sys.executable, "-m", "pip")
# Nothing is fetched: the build backend comes with the tools for development.
OFFLINE = ("--quiet", "--no-deps", "--no-index", "--disable-pip-version-check")

# As if the requirements were installed, too.
REQUIREMENTS = sysconfig.get_path("purelib")


class Installed(NamedTuple):
    """A wheel, and the Python that it is installed in."""

    wheel: Path
    python: Path

    def say(self, *words: str, **variables: str) -> str:
        """Return what the installed command prints when it is run with WORDS, somewhere else."""
        done = subprocess.run(
            [self.python.with_name("fleetrun"), *words],
            cwd=self.python.parent,
            env={"PATH": os.environ["PATH"], **variables},
            capture_output=True,
            text=True,
            timeout=LONG_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    if importlib.util.find_spec("hatchling") is None:
        reason = "there is no hatchling: scripts/setup --dev brings it"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("wheel")
    build = (*PIP, "wheel", *OFFLINE, "--no-build-isolation", "--wheel-dir", folder, ROOT)
    subprocess.run(build, check=True, timeout=LONG_S)
    (wheel,) = folder.glob("*.whl")
    python = folder / "clean" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "clean"], check=True)
    subprocess.run(
        [*PIP, "--python", python, "install", *OFFLINE, wheel], check=True, timeout=LONG_S
    )
    return Installed(wheel, python)


def test_the_wheel_has_every_file_of_the_package_and_every_preset(installed: Installed) -> None:
    package = ROOT / "fleetrun"
    files = {
        f"fleetrun/{path.relative_to(package).as_posix()}"
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    presets = {f"fleetrun/configs/{path.name}" for path in (ROOT / "configs").iterdir()}
    with zipfile.ZipFile(installed.wheel) as wheel:
        assert files | presets <= set(wheel.namelist())


def test_presets_are_shown_where_there_is_no_checkout(installed: Installed) -> None:
    shown = installed.say("strategy", "show", "recommended", PYTHONPATH=REQUIREMENTS)
    assert shown == (ROOT / "configs" / "recommended.yaml").read_text()


def test_presets_are_read_where_there_is_no_checkout(installed: Installed) -> None:
    said = installed.say("strategy", "validate", *load.PRESETS, PYTHONPATH=REQUIREMENTS)
    assert [line.partition(":")[0] for line in said.splitlines()] == list(load.PRESETS)
