"""Signs of Paddle's plug-ins."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from plans import a_request, some_facts

from fleetrun.host import plugins
from fleetrun.model import Setting

if TYPE_CHECKING:
    from fleetrun.model import Facts


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


def test_a_kind_that_is_named_is_a_sign_unless_nobody_has_heard_of_it() -> None:
    assert worth(device_kind="mlu", devices="0")
    chosen = (Setting("device_kind", "foo", "$PADDLE_XCCL_BACKEND"),)
    assert worth(device_kind="foo", settings=chosen)
    # Like --foos=0, which may be a typo.
    assert not worth(device_kind="foo", devices="0")
