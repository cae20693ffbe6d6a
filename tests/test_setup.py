"""scripts/setup and scripts/quickstart, by the commands they run: nothing here is really installed.

The fakes of `python`, `pip`, `nvidia-smi` and `apt-get` raise on whatever they do not know.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
INDEX = "https://www.paddlepaddle.org.cn/packages/stable"

# Every fake is this one program, under its name; what the machine is like stands in $FAKE_MACHINE.
# A test runs it dozens of times: pathlib, shutil and json would take longer than all else in it.
FAKE = r"""
import os, sys

me, name, here = sys.argv[0], os.path.basename(sys.argv[0]), os.path.dirname(sys.argv[0])
words = sys.argv[1:]
home = os.environ["FAKE_MACHINE"]
with open(f"{home}/machine") as file:
    machine = eval(file.read())


def log(*words):
    with open(f"{home}/commands.log", "a") as file:
        print(*words, file=file)


def save():
    with open(f"{home}/machine", "w") as file:
        file.write(repr(machine))


def unknown():
    sys.exit(f"the fake {me} does not know {words}")


def nvidia_smi():
    if not machine["gpus"]:
        sys.exit("no devices were found")
    rows = {
        "-L": [f"GPU {i}: NVIDIA Fake (UUID: GPU-{i})" for i in range(machine["gpus"])],
        "--query-gpu=driver_version --format=csv,noheader": [machine["driver"]] * machine["gpus"],
        "--query-gpu=compute_cap --format=csv,noheader": [machine["capability"]] * machine["gpus"],
    }
    print(*rows.get(" ".join(words)) or unknown(), sep="\n")


def apt_get():
    log("apt-get", *words)
    if "update" in words:
        return
    before, _, packages = " ".join(words).partition("--no-install-recommends ")
    if not packages or "install -y" not in before:
        unknown()
    machine["has"] += [package for package in packages.split() if package in machine["apt"]]
    save()


def python():
    *_, above, below = ["", *os.path.abspath(here).split("/")]
    venv = below == "bin" and above.startswith(".venv")
    match words:
        case ["--version"]:
            print("Python 3.11.2")
        case ["-c", code] if "sys.version_info" in code:
            sys.exit(not eval(code.partition("not ")[2][:-1], {"sys": FakeSys}))
        case ["-c", "import venv, ensurepip"]:
            sys.exit("python3-venv" not in machine["has"])
        case ["-c", code] if "libgomp.so.1" in code:
            sys.exit("libgomp1" not in machine["has"])
        case ["-m", "venv", "--clear", folder]:
            os.makedirs(f"{folder}/bin")
            os.link(me, f"{folder}/bin/python")
        case ["-c", code] if "m.version(" in code and venv:
            sys.exit(code.split("'")[1] not in machine["installed"])
        case ["-c", code] if "m.distributions()" in code and venv:
            print(*[f"{v} ({k})" for k, v in machine["installed"].items() if k[:3] == "pad"])
        case ["fleetrun/inject/compute_check.py", "--say", *gpus] if venv:
            if gpus != [["0"], ["0", "1"]][machine["gpus"] > 1]:
                unknown()
            lacking = [l for l, p in machine["lacks"].items() if p not in machine["packages"]]
            for library in lacking:
                print("lacks", library, machine["lacks"][library])
            if lacking or machine["packages"] and not machine["linked"]:
                sys.exit("failed convolution on gpu:0 ended with 1: RuntimeError: no library")
            if machine["installed"]["paddlepaddle-gpu"] not in machine["computes"]:
                sys.exit("failed product on gpu:0 ended with 1: no kernel image is available")
        case ["fleetrun/inject/compute_check.py", "--link"] if venv:
            log("link")
            machine["linked"] = True
            save()
        case ["-m", "compileall", "-q", "fleetrun"] if venv:
            log("compile")
        case ["-m", "pip", *asked] if venv:
            pip(*asked)
        case _:
            unknown()


class FakeSys:
    version_info = tuple(machine["version"])


def pip(verb, *asked):
    log("pip", verb, *asked)
    asked = list(asked)
    site = f"{os.path.dirname(here)}/lib/python3.11/site-packages"
    where = "default"
    for option in ("--index-url", "--extra-index-url"):
        if option in asked:
            where = asked[asked.index(option) + 1]
    offered = machine["indexes"].get(where, [])
    if verb == "index":
        if not offered:
            sys.exit("ERROR: No matching distribution found for paddlepaddle-gpu")
        print(f"paddlepaddle-gpu ({offered[0]})\nAvailable versions: {', '.join(offered)}")
    elif verb == "uninstall":
        machine["installed"].pop(asked[-1])
        for record in os.listdir(site):
            if record.startswith(asked[-1].replace("-", "_") + "-"):
                os.rmdir(f"{site}/{record}")
    elif verb == "install" and "-e" in asked:
        with open(f"{here}/fleetrun", "w") as file:
            file.write('#!/bin/sh\n[ "$1" = --version ] && echo fleetrun 0.1.0 && exit\n'
                'mkdir -p log/latest; echo "test accuracy 0.9, 50 images/s" >log/workerlog.0\n'
                'echo "strategy_report: 155 gradients in 6 allreduces, 5 of 6 allreduces went out '
                'before the last gradient" >log/latest/events.jsonl\n'
                'echo "images: ran with $* mask ${CUDA_VISIBLE_DEVICES-none}"\nexit\n')
        os.chmod(f"{here}/fleetrun", 0o755)
    elif verb == "install" and set(asked[1:]) <= set(machine["lacks"].values()):
        machine["packages"] += asked[1:]
    elif verb == "install" and any(word.startswith("paddlepaddle") for word in asked):
        wanted = next(word for word in asked if word.startswith("paddlepaddle"))
        package, _, version = wanted.partition("==")
        if not machine["online"] or package == "paddlepaddle-gpu" and version not in offered:
            sys.exit(f"ERROR: No matching distribution found for {wanted}")
        machine["installed"][package] = version
        os.makedirs(f"{site}/{package.replace('-', '_')}-{version}.dist-info")
    else:
        unknown()
    save()


def other():
    match name, words:
        case "apt-cache", ["pkgnames", start]:
            # Debian 11 has such a package, and no such Python.
            for package in ("postgresql-plpython3-13", "python3.13-doc", *machine["apt"]):
                print(*([package] if package.startswith(start) else []))
        case "id", ["-u"]:
            print(machine["uid"])
        case "ldconfig", ["-p"]:
            print("libgomp.so.1 (libc6,x86-64)" if "libgomp1" in machine["has"] else "")
        case _:
            unknown()


fakes = {"nvidia-smi": nvidia_smi, "apt-get": apt_get, "python": python, "python3": python}
fakes.get(name, other)()
"""

BARE: dict[str, Any] = {
    "uid": 0,
    "online": True,
    "version": [3, 11],
    "has": ["python3-venv", "libgomp1"],
    "apt": ["python3-venv", "libgomp1"],
    "gpus": 0,
    "driver": "",
    "capability": "8.0",
    "indexes": {"default": ["2.6.2", "2.6.1"]},
    "computes": ["3.3.1", "2.6.2"],
    # Libraries that Paddle wants, with the packages that bring them; what is installed and linked.
    "lacks": {},
    "packages": [],
    "linked": False,
    "installed": {},
}
ALL_BUILDS: dict[str, list[str]] = {
    f"{INDEX}/{build}/": ["3.3.1"] for build in ("cu130", "cu129", "cu126", "cu118")
}
GPUS = {"gpus": 2, "driver": "580.95.05", "indexes": {**BARE["indexes"], **ALL_BUILDS}}


class Ended(NamedTuple):
    """How a script ended."""

    code: int
    output: str
    ran: list[str]

    def installed(self) -> list[str]:
        """Return what pip was told to install, fleetrun itself apart."""
        return [line for line in self.ran if line.startswith("pip install") and " -e " not in line]


class Machine:
    """A machine with a checkout's scripts, and with nothing that is not a fake or a plain tool."""

    def __init__(self, folder: Path, **like: object) -> None:
        self.folder = folder
        (folder / "scripts").mkdir()
        shutil.copy(ROOT / "pyproject.toml", folder)
        shutil.copy(ROOT / "scripts" / "quickstart", folder / "scripts")
        text = (ROOT / "scripts" / "setup").read_text()
        # The real ones are not to be found.
        real = " /usr/bin/python3 python3.{13,12,11,10}"
        assert text.count(real) == 1
        (folder / "scripts" / "setup").write_text(text.replace(real, ""))
        (folder / "scripts" / "setup").chmod(0o755)
        (folder / "machine").write_text(repr({**BARE, **like}))
        (folder / "bin").mkdir()
        for name in ("python3", "nvidia-smi", "apt-get", "apt-cache", "id", "ldconfig"):
            program = folder / "bin" / name
            program.write_text(f"#!{sys.executable} -IS\n{FAKE}")
            program.chmod(0o755)
        for name in _TOOLS.split():
            tool = shutil.which(name)
            assert tool, name
            (folder / "bin" / name).symlink_to(tool)

    def run(self, script: str, *words: str, **env: str) -> Ended:
        """Run a script of the checkout."""
        done = subprocess.run(
            [self.folder / "scripts" / script, *words],
            env={"PATH": str(self.folder / "bin"), "FAKE_MACHINE": str(self.folder), **env},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        log = self.folder / "commands.log"
        ran = log.read_text().splitlines() if log.exists() else []
        return Ended(done.returncode, done.stderr + done.stdout, ran)


Make: TypeAlias = "Callable[..., Machine]"
_TOOLS = "bash sh env cat dirname grep sed sort head tail sha256sum mkdir"


@pytest.fixture
def machine(tmp_path: Path) -> Make:
    return partial(Machine, tmp_path)


def test_all_that_an_ordinary_user_lacks_is_said_at_once_with_the_line_to_type(
    machine: Make,
) -> None:
    ended = machine(uid=1000, has=[]).run("setup")
    assert ended.code == 3
    assert (
        "lacks: the venv module of Python 3.11.2; GCC's OpenMP library, libgomp.so.1."
        in ended.output
    )
    (line,) = re.findall(r"(?m)^    (.*)$", ended.output)
    assert line == (
        "su - -c 'apt-get update && apt-get install -y --no-install-recommends"
        " python3-venv libgomp1'"
    )
    assert ended.ran == []


def test_root_needs_to_type_nothing(machine: Make) -> None:
    ended = machine(has=[]).run("setup")
    assert ended.code == 0, ended.output
    assert ended.ran[0].startswith("apt-get update")
    assert ended.ran[1].endswith("python3-venv libgomp1")
    assert ended.ran[-1] == "compile"
    assert "has fleetrun 0.1.0 and Paddle 3.3.1 (paddlepaddle)" in ended.output


@pytest.mark.parametrize("uid", [0, 1000])
def test_a_python_that_is_too_old_is_said_at_once(machine: Make, uid: int) -> None:
    ended = machine(uid=uid, version=[3, 9], has=[]).run("setup")
    assert ended.code == 3
    assert "Paddle 3.3.1 needs Python 3.10 to 3.13; python3 here is Python 3.11.2" in ended.output
    assert "PYTHON=/path/to/python scripts/setup" in ended.output
    assert ended.ran == []


@pytest.mark.parametrize(
    ("python", "what"),
    [("/nonexistent", "no program"), ("cat", "not a Python"), ("python3", "Python 3.11.2")],
)
def test_an_unfit_python_is_refused_in_one_sentence(machine: Make, python: str, what: str) -> None:
    ended = machine(version=[3, 9]).run("setup", PYTHON=python)
    assert (ended.code, ended.ran) == (3, [])
    assert ended.output == (
        f"setup: PYTHON={python} is {what}; Paddle 3.3.1 needs Python 3.10 to 3.13.\n"
    )


def test_a_machine_without_a_network_is_told_what_to_do(machine: Make) -> None:
    ended = machine(online=False).run("setup")
    assert ended.code == 3
    assert "pip could not install paddlepaddle==3.3.1, or what it needs. Without a" in ended.output
    assert "PIP_INDEX_URL to a mirror" in ended.output


@pytest.mark.parametrize(
    ("driver", "capability", "build"),
    [
        ("580.65.06", "9.0", "cu130"),
        ("580.95.05", "7.0", "cu129"),  # CUDA 13 is not made for Volta
        ("580.95.05", "[N/A]", "cu130"),
        ("575.57.08", "9.0", "cu129"),
        ("570.133.20", "8.0", "cu126"),
        ("535.183.01", "8.0", "cu118"),
    ],
)
def test_the_build_for_the_driver_comes_from_paddles_own_index(
    machine: Make, driver: str, capability: str, build: str
) -> None:
    ended = machine(**{**GPUS, "driver": driver, "capability": capability}).run("setup")
    assert ended.code == 0, ended.output
    assert ended.installed() == [
        f"pip install -q paddlepaddle-gpu==3.3.1 setuptools>=80 --extra-index-url {INDEX}/{build}/"
    ]
    assert f"the build for CUDA {build[2:4]}.{build[4:]} (driver {driver})" in ended.output
    assert "Paddle 3.3.1 (paddlepaddle-gpu)" in ended.output


def test_without_paddles_index_the_older_gpu_build_of_the_default_one_is_taken(
    machine: Make,
) -> None:
    ended = machine(**{**GPUS, "indexes": BARE["indexes"]}).run("setup")
    assert ended.code == 0, ended.output
    assert ended.installed() == [
        "pip install -q paddlepaddle-gpu==2.6.2 numpy<2 protobuf>=4.21,<5 setuptools>=80,<81"
    ]
    assert f"{INDEX} cannot be reached" in ended.output
    assert "Paddle 2.6.2 (paddlepaddle-gpu)" in ended.output
    # What comes with fleetrun must not bring back a NumPy that crashes Paddle 2.6.
    assert "numpy<2" in next(line for line in ended.ran if " -e " in line)


def test_the_cpu_build_is_the_last_resort_and_is_said_last(machine: Make) -> None:
    ended = machine(**{**GPUS, "indexes": BARE["indexes"], "computes": []}).run("setup")
    assert ended.code == 0, ended.output
    assert (
        "does not compute on this GPU: failed product on gpu:0 ended with 1: no ke" in ended.output
    )
    assert ended.installed()[-1] == "pip install -q setuptools>=80 paddlepaddle==3.3.1"
    assert "THIS IS THE CPU BUILD" in ended.output.splitlines()[-1]


LACKS = {"libcudnn.so": "nvidia-cudnn-cu11<9", "libnccl.so": "nvidia-nccl-cu11"}


def test_libraries_that_the_build_does_not_bring_are_installed_and_linked(machine: Make) -> None:
    ended = machine(**{**GPUS, "indexes": BARE["indexes"], "lacks": LACKS}).run("setup")
    assert ended.code == 0, ended.output
    assert "it wants libcudnn.so libnccl.so, which it does not bring: installing" in ended.output
    assert "pip install -q nvidia-cudnn-cu11<9 nvidia-nccl-cu11" in ended.ran
    assert "link" in ended.ran
    assert "Paddle 2.6.2 (paddlepaddle-gpu)" in ended.output


def test_cpu_asks_no_index_for_a_gpu_build(machine: Make) -> None:
    ended = machine(**GPUS).run("setup", "--cpu")
    assert ended.installed() == ["pip install -q setuptools>=80 paddlepaddle==3.3.1"]
    assert "CPU BUILD" not in ended.output


@pytest.mark.parametrize(
    ("gpus", "mask", "ran"),
    [
        (0, None, "--nproc_per_node=2 {} mask "),
        (1, None, "--gpus=0 {} mask none"),
        (8, None, "--gpus=0,1 {} mask none"),
        (8, "4,5,6", "{} mask 4,5"),
        (8, "", "--nproc_per_node=2 {} mask "),
    ],
)
def test_quickstart_trains_on_the_gpus_that_are_to_be_seen(
    machine: Make, gpus: int, mask: str | None, ran: str
) -> None:
    env = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    here = machine(**{**GPUS, "gpus": gpus})
    assert here.run("setup").code == 0
    ended = here.run("quickstart", **env)
    assert ended.code == 0, ended.output
    is_alone = gpus == 1
    strategy = "" if is_alone else "--strategy=recommended "
    words = f"{strategy}scripts/train_resnet.py --depth=8 --epochs=2"
    assert f"images: ran with {ran.format(words)}\n" in ended.output
    *_, trained, sent, hint = ended.output.splitlines()[-4:]
    assert "test accuracy 0.9. Logs" in (sent if is_alone else trained)
    if not is_alone:
        assert sent == (
            "The strategy sent 155 gradients in 6 allreduces; 5 of 6 allreduces went out before "
            "the last gradient was ready."
        )
    assert hint.startswith("Next: . .venv/bin/activate")
