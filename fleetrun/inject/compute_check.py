"""Checks that Paddle computes on GPUs: `python compute_check.py [GPU...]` prints JSON.

A process for each GPU (two at most), which may crash or hang, loads the NVIDIA libraries that this
Paddle needs, by Paddle's own loader, and computes a product, a convolution and a sum over the
ranks. `--cpu RANKS` checks CPUs, and a leading `--say` prints lines of text and sets exit code 1 if
something is wrong. It needs only Paddle: scripts/setup runs it before fleetrun is installed.

`--link` links the libraries of the nvidia-* packages into Paddle's folder, where Paddle finds them:
a wheel that needs `libcudnn.so` does not find `libcudnn.so.8`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Importing Paddle for the first time reads gigabytes.
TIMEOUT_S = 180.0
_MARK = "fleetrun-proof: "
_MOST_WORDS = 2000
# The package of each library, without the major version of CUDA; CUDA 13 has another name.
_PACKAGES = {
    "libcublas": "nvidia-cublas",
    "libcublasLt": "nvidia-cublas",
    "libcudart": "nvidia-cuda-runtime",
    "libcudnn": "nvidia-cudnn",
    "libcufft": "nvidia-cufft",
    "libcurand": "nvidia-curand",
    "libcusolver": "nvidia-cusolver",
    "libcusparse": "nvidia-cusparse",
    "libnccl": "nvidia-nccl",
    "libnvrtc": "nvidia-cuda-nvrtc",
}
_VERSION = re.compile(r"^(cuda|cudnn)_version\s*=\s*'(\d+)", re.MULTILINE)
_LIBRARY = re.compile(r"third-party dynamic library \((?:[^)]*/)?(lib[\w.+-]+)\)")


def step(name: str) -> None:
    """Record that NAME begins."""
    print(_MARK + name, flush=True)


def compute(device: str) -> None:
    """Compute on DEVICE, and with the other ranks."""
    step("import")
    import paddle as module

    paddle: Any = module
    ranks = int(os.environ["PADDLE_TRAINERS_NUM"])
    if device.startswith("gpu"):
        step("libraries")
        core: Any = sys.modules["paddle.base.core"]
        for version in ("cudnn_version", "nccl_version"):
            # A missing library is an exception, or a warning on stderr.
            try:
                getattr(core, version, int)()
            except Exception as error:  # noqa: PERF203 - each is asked
                print(error, flush=True)
    step("device")
    paddle.set_device(device)
    step("product")
    ones = paddle.ones([64, 64])
    assert float(ones.matmul(ones).sum()) == 64.0**3
    step("convolution")
    images = paddle.ones([2, 3, 16, 16])
    images.stop_gradient = False
    sums = paddle.nn.functional.conv2d(images, paddle.ones([4, 3, 3, 3]))
    sums.sum().backward()
    # Three channels of three by three; back in four filters.
    assert float(sums[0, 0, 0, 0]) == 27.0
    assert float(images.grad.max()) == 36.0
    if ranks > 1:
        step("sum of the ranks")
        paddle.distributed.init_parallel_env()
        summed = paddle.full([1024], float(paddle.distributed.get_rank() + 1))
        paddle.distributed.all_reduce(summed)
        assert float(summed.max()) == float(summed.min()) == ranks * (ranks + 1) / 2
    step("done")


class _Child:
    """A child process that runs one check."""

    def __init__(self, words: list[str], env: dict[str, str]) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - `report` closes it
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, *words],
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def report(self, *, was_killed: bool) -> dict[str, Any]:
        """Return the last step, how the process ended, its output, and missing libraries."""
        with self._output:
            self._output.seek(0)
            output = self._output.read().decode(errors="replace")
        lines = output.splitlines()
        steps = [line[len(_MARK) :] for line in lines if line.startswith(_MARK)]
        words = [line for line in lines if line.strip() and not line.startswith(_MARK)]
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        if was_killed:
            how = f"did not answer within {TIMEOUT_S:g} s"
        return {
            "step": steps[-1] if steps else "start",
            "how": how,
            "words": "\n".join(words)[-_MOST_WORDS:],
            "libraries": _LIBRARY.findall(output),
        }


def _wait(children: list[_Child]) -> list[dict[str, Any]]:
    """Wait for CHILDREN; return the report of each. If one fails, the others are killed."""
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while None in [child.process.poll() for child in children] and time.monotonic() < deadline:
            if any(child.process.poll() for child in children):
                break
            time.sleep(0.05)
    finally:
        late = [child for child in children if child.process.poll() is None]
        for child in late:
            os.killpg(child.process.pid, signal.SIGKILL)
            child.process.wait()
    is_late = time.monotonic() >= deadline
    return [child.report(was_killed=is_late and child in late) for child in children]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


def prove(devices: list[str]) -> dict[str, Any]:
    """Return the faults: missing `libraries`, and the first report that `failed`, if any."""
    master, *ends = (f"127.0.0.1:{port}" for port in _free_ports(1 + len(devices)))
    is_gpu = devices[0].startswith("gpu")
    ranks = [
        _Child(
            ["compute", device],
            {
                "PADDLE_MASTER": master,
                "PADDLE_TRAINER_ID": str(rank),
                "PADDLE_TRAINERS_NUM": str(len(devices)),
                "PADDLE_TRAINER_ENDPOINTS": ",".join(ends),
                "PADDLE_CURRENT_ENDPOINT": ends[rank],
                "PADDLE_DISTRI_BACKEND": "nccl" if is_gpu else "gloo",
                **({"FLAGS_selected_gpus": device[4:]} if is_gpu else {}),
            },
        )
        for rank, device in enumerate(devices)
    ]
    reports = _wait(ranks)
    libraries = {name for report in reports for name in report.pop("libraries")}
    failed = [
        {"device": device, **report}
        for device, report in zip(devices, reports)
        if report["step"] != "done"
    ]
    # A rank that ended by itself is the cause.
    failed.sort(key=lambda report: "SIGKILL" in report["how"])
    return {
        "devices": devices,
        # Each with the package that contains it, if known.
        "libraries": [(name, package(name)) for name in sorted(libraries)],
        "failed": failed[0] if failed else None,
    }


def package(library: str) -> str:
    """Return the package with LIBRARY for the installed Paddle, as a requirement of pip."""
    name = _PACKAGES.get(library.partition(".so")[0])
    file = _home() / "version" / "__init__.py"
    majors = dict(_VERSION.findall(file.read_text("utf-8"))) if file.exists() else {}
    if name is None or "cuda" not in majors:
        return ""
    # Libraries of another major version are not compatible.
    bound = "<9" if name == "nvidia-cudnn" and majors.get("cudnn") == "8" else ""
    return f"{name}-cu{majors['cuda']}{bound}"


def _home() -> Path:
    """Return the folder of the Paddle that would be imported."""
    from importlib.util import find_spec

    spec = find_spec("paddle")
    if spec is None or spec.origin is None:
        sys.exit("there is no Paddle")
    return Path(spec.origin).parent


def link() -> int:
    """Link NVIDIA's libraries into Paddle's library folder; return the number of links."""
    libs = _home() / "libs"
    count = 0
    for library in sorted(libs.parents[1].glob("nvidia/*/lib/lib*.so*")):
        plain = library.name.partition(".so")[0] + ".so"
        for name in {library.name, plain}:
            if not os.path.lexists(libs / name):
                (libs / name).symlink_to(os.path.relpath(library, libs))
                count += 1
    return count


def main(words: list[str]) -> None:
    """Run the check that the command line WORDS requests."""
    if words[:1] == ["compute"]:
        compute(words[1])
    elif words == ["--link"]:
        print(f"{link()} links")
    else:
        is_in_lines = words[:1] == ["--say"]
        words = words[is_in_lines:]
        devices = [f"gpu:{index}" for index in words or ["0"]][:2]
        if words[:1] == ["--cpu"]:
            devices = ["cpu"] * int(words[1])
        result = prove(devices)
        if not is_in_lines:
            print(json.dumps(result))
            return
        for name, provider in result["libraries"]:
            print(f"lacks {name} {provider}")
        if result["failed"]:
            last = result["failed"]["words"].strip().splitlines()[-1:] or ["no output"]
            print(
                "failed {step} on {device} {how}: {last}".format(last=last[0], **result["failed"])
            )
        sys.exit(1 if result["failed"] or result["libraries"] else 0)


if __name__ == "__main__":
    # Python puts the folder of a script first on the path; our modules must not hide others there.
    sys.path[:] = [entry for entry in sys.path if entry != str(Path(__file__).parent)]
    main(sys.argv[1:])
