"""Signs of Paddle's plug-ins, and which Python's Paddle it is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from planning import a_request, some_facts

from fleetrun.host import plugins, probe
from fleetrun.model import Script, Setting

if TYPE_CHECKING:
    from fleetrun.model import Facts, Request


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder of the test's own, as a Python without plug-ins."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site-packages")])


def facts_with(environ: dict[str, str] | None = None, **fields: Any) -> Facts:
    """Make the facts of a host with ENVIRON, as our Python sees it."""
    facts = some_facts(environ=environ or {}, python=sys.executable, cwd=str(Path.cwd()))
    return facts._replace(**fields)


def worth(environ: dict[str, str] | None = None, **fields: Any) -> bool:
    """Whether Paddle is asked on a host with ENVIRON for a request with FIELDS."""
    request = a_request(**fields)
    return plugins.is_worth_asking(request, plugins.find(request, facts_with(environ)))


def library(folder: Path) -> str:
    """Put a plug-in into FOLDER."""
    folder.mkdir(parents=True)
    (folder / "libmlu.so").touch()
    return str(folder)


def test_a_plain_host_has_no_signs() -> None:
    assert not worth()
    assert not worth(device_kind="gpu", devices="0")
    assert not worth({"CUSTOM_DEVICE_ROOT": ""})
    assert not worth({"CUSTOM_DEVICE_ROOT": "/nonexistent"})


def test_a_folder_of_plugins_is_a_sign_unless_nobody_wants_devices(tmp_path: Path) -> None:
    environ = {"CUSTOM_DEVICE_ROOT": library(tmp_path / "root")}
    assert worth(environ)
    assert worth(env=tuple(environ.items()))
    assert not worth(environ, nproc_per_node="cpu")
    assert not worth(environ, device_kind="cpu")
    assert not worth(environ, backend="gloo")
    assert worth(environ, backend="gloo", devices="0")


def test_a_plugin_beside_paddle_is_a_sign_unless_the_variable_names_another_folder(
    tmp_path: Path,
) -> None:
    library(tmp_path / "site-packages/paddle_custom_device")
    assert worth()
    assert not worth({"CUSTOM_DEVICE_ROOT": ""})


def test_a_kind_that_is_named_is_a_sign_unless_nobody_has_heard_of_it() -> None:
    assert worth(device_kind="mlu", devices="0")
    chosen = (Setting("device_kind", "foo", "$PADDLE_XCCL_BACKEND"),)
    assert worth(device_kind="foo", settings=chosen)
    # Like --foos=0, which may be a typo.
    assert not worth(device_kind="foo", devices="0")


def python_of(request: Request, environ: dict[str, str] | None = None, **fields: Any) -> str:
    """Return the Python that would run the ranks of REQUEST."""
    return plugins.find(request, facts_with(environ, **fields)).python


def program(path: Path, text: str = "") -> str:
    """Make an executable file at PATH."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def of_script(target: str) -> Request:
    return a_request(script=Script("file", target, ()))


def test_the_ranks_python_is_the_one_that_the_command_names(tmp_path: Path) -> None:
    python = program(tmp_path / "venv/bin/python3")
    assert python_of(of_script(python), program=python) == python
    run = program(tmp_path / "run", f"#!{python} -u\n")
    assert python_of(of_script("./run"), program="./run") == python
    environ = {"PATH": f"{tmp_path}/venv/bin"}
    run = program(tmp_path / "other", "#!/usr/bin/env -S A=1 python3\n")
    assert python_of(of_script(run), environ, program=run) == python


def test_a_shell_script_most_likely_calls_python(tmp_path: Path) -> None:
    run = program(tmp_path / "run.sh", "#!/bin/sh\npython train.py\n")
    assert python_of(of_script(run), {"PATH": "/nonexistent"}, program=run) == sys.executable
    python = program(tmp_path / "venv/bin/python")
    environ = {"PATH": f"{tmp_path}/venv/bin"}
    assert python_of(of_script(run), environ, program=run) == python
    # The plug-ins are those of that Python.
    place = library(tmp_path / "venv/lib/python3.10/site-packages/paddle_custom_device")
    chosen = plugins.find(of_script(run), facts_with(environ, program=run))
    assert chosen.root == place


@pytest.mark.parametrize(
    ("version", "counts"),
    [
        ("xpu_xre_version = 'False'", {}),
        ("xpu_version      = 'False'", {}),
        ("xpu_xre_version = '5.0.21'", {"xpu": 1}),
        ("", {"xpu": 1}),
    ],
)
def test_xpus_are_used_unless_paddle_says_that_it_is_not_built_for_them(
    tmp_path: Path, version: str, counts: dict[str, int]
) -> None:
    root = tmp_path / "root"
    for folder in ("dev", "proc/self/fd"):
        (root / folder).mkdir(parents=True)
    (root / "dev/xpu0").touch()
    (tmp_path / "train.py").touch()
    package = tmp_path / "site-packages/paddle/version"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"full_version = '3.3.1'\n{version}\n")
    facts = probe.read(a_request(), {}, root=str(root))
    assert facts.device_counts == counts
    assert set(facts.absent) == ({"xpu"} if not counts else set())
