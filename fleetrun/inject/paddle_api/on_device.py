"""Runs the self-tests on this rank's device in a separate Python, which may crash.

A plug-in for a device may lack a kernel. Then Paddle may run the CPU's on device memory, which ends
the process. A forked child serves only the CPU: device runtimes do not work in one.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import TextIO

# The limit for the child in seconds: it imports Paddle, on hosts where all ranks do.
_TIMEOUT_S = 300.0
_POLL_S = 0.05


@functools.cache
def failures(device: str, capabilities: Sequence[str]) -> dict[str, str]:
    """Return, by capability, the fault of each of CAPABILITIES on DEVICE, `npu:0`; empty if none.

    One rank of a host runs it for all that train with the same Paddle on the same kind of device.
    """
    kind = device.partition(":")[0]
    records = os.environ.get("FLEETRUN_RECORDS", "")
    if not records:
        return _tried(kind, capabilities)
    paddle: Any = sys.modules["paddle"]
    flags = sorted(item for item in os.environ.items() if item[0].startswith("FLAGS_"))
    identity = (
        *(os.uname()[1], sys.executable, paddle.__file__, paddle.__version__, kind, capabilities),
        *(item for item in flags if not item[0].startswith("FLAGS_selected_")),
    )
    name = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    path = os.path.join(os.path.dirname(records), f".self-tests.{kind}.{name}.json")
    try:
        with _held(path) as file:
            with contextlib.suppress(ValueError):
                known_failures: dict[str, str] = json.load(file)
                return known_failures
            found_failures = _tried(kind, capabilities)
            file.seek(0)
            json.dump(found_failures, file)
            file.truncate()
    except OSError:
        # No shared file: this rank runs the tests for itself.
        return _tried(kind, capabilities)
    return found_failures


@contextlib.contextmanager
def _held(path: str) -> Iterator[TextIO]:
    """Yield the file PATH, locked against other processes where the file system can lock."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "r+", encoding="utf-8") as file:
        deadline = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_POLL_S)
            except OSError:
                # A file system without locks: each rank tests for itself.
                break
        yield file


def _tried(kind: str, capabilities: Sequence[str]) -> dict[str, str]:
    """Return the failures that a new Python finds on this rank's device, or how it ended."""
    environ = {name: value for name, value in os.environ.items() if name[:8] != "FLEETRUN"}
    end = ""
    try:
        done = subprocess.run(
            [sys.executable, os.path.abspath(__file__), *capabilities],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_S,
            check=False,
        )
        output = done.stdout
        if done.returncode:
            end = f"the self-test crashes on {kind}"
    except subprocess.TimeoutExpired as error:
        output, end = error.stdout or b"", f"the self-test does not end on {kind}"
    except OSError as error:
        output, end = b"", f"the self-test cannot be started ({error})"
    failures = {}
    for line in output.decode(errors="replace").splitlines():
        # Paddle and plug-ins print, too.
        with contextlib.suppress(ValueError):
            capability, failure = json.loads(line)
            failures[capability] = f"{failure} on {kind}" if failure else ""
    silent = end or "the self-test prints no result"
    return {capability: failures.get(capability, silent) for capability in capabilities}


def main(capabilities: Sequence[str]) -> None:
    """Print the fault of each of CAPABILITIES on the default device, as lines of JSON."""
    import importlib.util as importing
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import paddle

    root = os.path.dirname(os.path.abspath(__file__))
    spec = importing.spec_from_file_location(
        "_fleetrun_paddle_api", os.path.join(root, "__init__.py"), submodule_search_locations=[root]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importing.module_from_spec(spec)
    sys.modules["_fleetrun_paddle_api"] = package
    spec.loader.exec_module(package)
    place = paddle.to_tensor([0.0]).place
    for capability in capabilities:
        print(json.dumps([capability, package.failure_at(capability, place)]), flush=True)


if __name__ == "__main__":
    # Python puts the folder of a script first on the path; our modules must not hide others there.
    sys.path[:] = [entry for entry in sys.path if entry != os.path.dirname(__file__)]
    main(sys.argv[1:])
