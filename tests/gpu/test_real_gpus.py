"""What only a real GPU can show: `scripts/test --gpu` runs this."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from training import ROOT
from waiting import TRAINING_S

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.gpu, pytest.mark.train]

# Prints the PCI address of each rank's device, from CUDA.
WHERE = """
import ctypes, os, paddle
paddle.zeros([1])
text = ctypes.create_string_buffer(32)
cuda = ctypes.CDLL("libcuda.so.1")
device = ctypes.c_int()
assert cuda.cuCtxGetDevice(ctypes.byref(device)) == 0
assert cuda.cuDeviceGetPCIBusId(text, 32, device) == 0
print("BUS", os.environ["PADDLE_TRAINER_ID"], text.value.decode(), flush=True)
"""

# A table whose gradient is sparse, beside one that is not.
SPARSE = """
import json, os, paddle
paddle.distributed.init_parallel_env()
net = paddle.nn.Sequential(paddle.nn.Embedding(50, 4, sparse=True), paddle.nn.Linear(4, 1))
model = paddle.DataParallel(net)
optimizer = paddle.optimizer.SGD(0.1, parameters=net.parameters())
for step in range(3):
    model(paddle.to_tensor([[step, step + 1]])).mean().backward()
    gradient = net[0].weight.grad
    held = paddle.base.core.eager.Tensor(gradient.get_selected_rows().get_tensor())
    print("SPARSE", gradient.is_selected_rows(), held.place, flush=True)
    optimizer.step()
    optimizer.clear_grad()
"""


def launch(folder: Path, script: str, *options: str) -> str:
    (folder / "job.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "fleetrun", "--tee=all", *options, "job.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TRAINING_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def numbered_by_the_driver() -> list[str]:
    """Return the PCI address of each GPU, by NVML's number."""
    import pynvml  # only where GPUs are

    lib: Any = pynvml
    lib.nvmlInit()
    handles = [lib.nvmlDeviceGetHandleByIndex(at) for at in range(lib.nvmlDeviceGetCount())]
    return [str(lib.nvmlDeviceGetPciInfo(handle).busId) for handle in handles]


def test_a_rank_has_the_gpu_of_the_drivers_number(tmp_path: Path) -> None:
    output = launch(tmp_path, WHERE)
    words = [line.partition("BUS ")[2].split() for line in output.splitlines() if "BUS " in line]
    # NVML writes the domain with eight digits, CUDA with four.
    buses = {int(rank): bus[-10:].lower() for rank, bus in words}
    known = [bus[-10:].lower() for bus in numbered_by_the_driver()]
    assert buses == dict(enumerate(known))


def test_sparse_gradients_stay_on_the_gpu(tmp_path: Path) -> None:
    if len(numbered_by_the_driver()) < 2:
        pytest.skip("averaging needs two GPUs")
    output = launch(tmp_path, SPARSE, "--gpus=0,1", "--set=fuse_grad_size_in_num=2")
    places = [line for line in output.splitlines() if "SPARSE" in line]
    assert len(places) == 6
    assert all("True" in line and "gpu" in line.lower() for line in places), places


def test_a_launch_leaves_no_context_on_a_gpu(tmp_path: Path) -> None:
    # The launcher's own process must not be among the compute processes.
    script = (
        "import json, os, pynvml, paddle\npaddle.zeros([1])\npynvml.nvmlInit()\n"
        "handle = pynvml.nvmlDeviceGetHandleByIndex(0)\n"
        "held = [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]\n"
        "print('HELD', json.dumps([os.getppid(), held]), flush=True)\n"
    )
    output = launch(tmp_path, script, "--gpus=0")
    text = next(line for line in output.splitlines() if "HELD" in line).partition("HELD ")[2]
    launcher, held = json.loads(text)
    assert launcher not in held
