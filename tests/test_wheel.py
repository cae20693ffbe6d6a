"""What is released has all that a launch needs, and works without a checkout or Paddle."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from waiting import LONG_S

from fleetrun.strategy import load

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PIP = (sys.executable, "-m", "pip")
ADDRESS = "https://example.org/fleetrun"
# Nothing is fetched: the build backend comes with the tools for development.
OFFLINE = ("--quiet", "--no-deps", "--no-index", "--disable-pip-version-check")

# As if the requirements were installed, too.
REQUIREMENTS = sysconfig.get_path("purelib")


class Installed(NamedTuple):
    """A wheel, and the Python that it is installed in."""

    wheel: Path
    python: Path
    released: subprocess.CompletedProcess[str]

    def run(self, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run the installed command NAME with WORDS, somewhere else."""
        done = subprocess.run(
            [self.python.with_name(name), *words],
            cwd=self.python.parents[1],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": REQUIREMENTS},
            capture_output=True,
            text=True,
            timeout=LONG_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done

    def say(self, *words: str) -> str:
        """Return what the installed `fleetrun` prints when it is run with WORDS."""
        return self.run("fleetrun", *words).stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    released = subprocess.run(
        [ROOT / "scripts" / "release", f"--address={ADDRESS}", f"--output={folder}"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    (wheel,) = folder.glob("*.whl")
    python = folder / "clean" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "clean"], check=True)
    subprocess.run(
        [*PIP, "--python", python, "install", *OFFLINE, wheel], check=True, timeout=LONG_S
    )
    return Installed(wheel, python, released)


def test_a_release_is_checked_and_says_what_is_missing(installed: Installed) -> None:
    release = installed.released
    assert release.stdout.count("PASSED") == 2
    assert "Final rating: 10/10" in release.stdout + release.stderr
    assert release.returncode == 3, release.stderr
    assert "release: pyproject.toml has no mail address that anybody reads\n" in release.stderr
    assert "not fit to be published" in release.stderr


def test_the_readme_has_the_whole_address(installed: Installed) -> None:
    (archive,) = installed.wheel.parent.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        (name,) = [name for name in files.getnames() if name.endswith("/README.md")]
        readme = files.extractfile(name)
        assert readme is not None
        text = readme.read().decode()
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert links
    assert f"```sh\ngit clone {ADDRESS} " in text
    assert "ADDRESS" not in text
    assert all(link.startswith(ADDRESS) for link in links)


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
    shown = installed.say("strategy", "show", "recommended")
    assert shown == (ROOT / "configs" / "recommended.yaml").read_text()


def test_presets_are_read_where_there_is_no_checkout(installed: Installed) -> None:
    output = installed.say("strategy", "validate", *load.PRESETS)
    assert [line.partition(":")[0] for line in output.splitlines()] == list(load.PRESETS)


def test_a_name_that_paddle_has_taken_is_noticed_and_given_back(installed: Installed) -> None:
    command = installed.python.with_name("fleetrun")
    ours = command.read_text()
    command.write_text(f"#!{installed.python}\nfrom paddle.distributed.launch.main import launch\n")
    hint = f"cp {command}x {command}"
    doctor = [str(installed.python), "-m", "fleetrun", "doctor"]
    variables = {"PATH": str(command.parent), "PYTHONPATH": REQUIREMENTS}
    examined = subprocess.run(doctor, env=variables, capture_output=True, text=True, check=False)
    assert examined.stdout.count(hint) == 1
    subprocess.run(hint.split(), check=True)
    assert command.read_text() == ours
    # `pip uninstall paddlepaddle` deletes it.
    command.unlink()
    examined = subprocess.run(doctor, env=variables, capture_output=True, text=True, check=False)
    assert examined.stdout.count(hint) == 1
