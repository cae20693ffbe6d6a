"""Devices of Paddle's plug-ins: signs that there are some, and their number by Paddle itself.

A plain launch has no signs, and asks nobody. Otherwise the ranks' own Paddle counts them in a
child process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

from fleetrun.errors import EnvironmentFault
from fleetrun.host import files
from fleetrun.model import Facts, Request
from fleetrun.plan import environment, kinds, origin
from fleetrun.plan.kinds import label
from fleetrun.run.isolation import IsolatedCall

_CHECKER = os.path.join(os.path.dirname(os.path.dirname(__file__)), "inject", "device_check.py")
# Paddle looks for plug-ins in this folder beside its own.
_FOLDER = "paddle_custom_device"
# The kind that stands for plug-ins without devices.
_NONE = "plug-in"


class Signs(NamedTuple):
    """The ranks' Python and variables, and the folder of its plug-ins ("" if there is none).

    `files` has the number of device files of each kind.
    """

    python: str
    environ: Mapping[str, str]
    root: str
    files: Mapping[str, int]


def find(request: Request, facts: Facts) -> Signs:
    """Look for signs on this host, of which FACTS have the device files."""
    shared = {**facts.environ, **dict(request.env)}
    environ = {name: text for name, text in shared.items() if not environment.is_identity(name)}
    folders = [os.path.join(folder, _FOLDER) for folder in _packages(facts.python)]
    if kinds.ROOT in environ:
        folders = [environ[kinds.ROOT]]
    libraries = ((folder, name) for folder in folders for name in files.names(folder))
    root = next((folder for folder, name in libraries if ".so" in name), "")
    return Signs(facts.python, environ, root, facts.device_counts)


def is_worth_asking(request: Request, signs: Signs) -> bool:
    """Whether Paddle may have devices that only it knows, and REQUEST may want them."""
    if "cpu" in {request.nproc_per_node, request.device_kind}:
        return False
    if request.backend == "gloo" and request.devices is None:
        return False
    has_files = any(kind not in kinds.BUILT_IN for kind in signs.files)
    return _is_named(request) or signs.root != "" or has_files


def _is_named(request: Request) -> bool:
    """Whether REQUEST names a kind that plug-ins provide, other than by an unknown option."""
    kind = request.device_kind
    if kind is None or kind in {"cpu", *kinds.BUILT_IN}:
        return False
    return kind in kinds.VENDORS or origin.is_given(request, "device_kind")


def _packages(python: str) -> list[str]:
    """Return the folders with PYTHON's packages."""
    if python == sys.executable:
        return sys.path
    lib = os.path.join(os.path.dirname(os.path.dirname(python)), "lib")
    versions = [name for name in files.names(lib) if name.startswith("python3")]
    return [
        os.path.join(lib, name, package)
        for name in versions
        for package in ("site-packages", "dist-packages")
    ]


def _ask(signs: Signs, log: Callable[[str], None], timeout_s: float) -> tuple[str, dict[str, int]]:
    """Return the version ("": none is installed) and the devices of the ranks' Paddle.

    LOG gets a line if it is slow; raises EnvironmentFault if it does not tell within TIMEOUT_S
    seconds.
    """
    python = signs.python

    def become() -> None:
        os.execve(python, (python, _CHECKER), signs.environ)  # noqa: S606 - no shell is wanted

    awaited = "Paddle's plug-ins to count their devices"
    answer = IsolatedCall(become).result(timeout_s, log=log, awaited=awaited)
    if answer.value is None:
        raise EnvironmentFault(
            f"The Paddle of {python} does not tell which devices it has: {answer.trouble}. "
            f"Look at what `{python} -c 'import paddle'` says; --device_kind=cpu trains on the CPU."
        )
    version, counts = cast("tuple[str, list[tuple[str, int]]]", answer.value)
    return version, dict(counts)


def with_devices(
    facts: Facts,
    request: Request,
    signs: Signs,
    *,
    log: Callable[[str], None],
    timeout_s: float,
) -> Facts:
    """Complete FACTS with the devices of plug-ins, or with why there are none."""
    version, counts = _ask(signs, log, timeout_s)
    kind = request.device_kind or ""
    if not version:
        # Then only device files can tell.
        why = f"{signs.python} has no Paddle that could tell"
        is_missing = _is_named(request) and kind not in facts.device_counts
        return facts._replace(absent={kind: why, **facts.absent}) if is_missing else facts
    absent = dict(facts.absent)
    paddle = f"Paddle {version} of {signs.python}"
    for name, count in counts.items():
        if not count:
            absent[name] = f"{paddle} has a plug-in for {label(name)}s, and sees none"
    wanted = [name for name in signs.files if name not in kinds.BUILT_IN]
    for name in (*wanted, *([kind] if _is_named(request) else [])):
        if name not in counts:
            package = kinds.VENDORS.get(name, kinds.Vendor()).package
            install = f" (pip install {package})" if package else ""
            absent[name] = f"{paddle} has no plug-in for {label(name)}s{install}"
    if not counts and signs.root:
        absent.setdefault(_NONE, f"{paddle} gets no device from the plug-ins in {signs.root}")
    built_in = {name: n for name, n in facts.device_counts.items() if name in kinds.BUILT_IN}
    return facts._replace(device_counts=built_in, paddle_counts=counts, absent=absent)
