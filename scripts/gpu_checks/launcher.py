"""The checks that need no Paddle: the driver, masks, and ranks that spin, or are killed.

Each compares what fleetrun makes of this machine with what CUDA itself does here.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checks import Check, Result
from launches import ROOT, environment

from fleetrun.probe.health import cuda, gpus
from fleetrun.run.isolation import IsolatedCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from launches import Machine

    from fleetrun.doctor.facts import Gpus

SPIN = ROOT / "scripts" / "gpu_checks" / "spin.py"
# Where there is no GPU, the rank keeps a processor busy until then.
HANG_S = {"gpu": 5, "cpu": 2}
LIMIT_S = 120.0
# After the end of a process the driver takes its memory back; this much may be others'.
FREED_S, SLACK = 10.0, 256 << 20
MASK = "CUDA_VISIBLE_DEVICES"
ONE = {"gpu": "--gpus=0", "cpu": "--nproc_per_node=1"}
FLEETRUN = [sys.executable, "-m", "fleetrun"]


def launcher_checks() -> Iterator[Check]:
    """Yield every check."""
    yield Check("NVML", nvml)
    yield Check("CUDA starts", starts)
    yield Check("MIG", mig)
    for name, mask in MASKS.items():
        yield Check(f"mask: {name}", masked(mask))
    yield Check("a device that is not there", wrong_device)
    yield Check("doctor", doctor)
    yield Check("a rank that waits in a kernel hangs", waits)
    yield Check("a GPU that works under a still stack is alive", works)
    yield Check("memory after kill -9 of a rank", freed(kill_rank))
    yield Check("memory after kill -9 of the launcher", freed(kill_launcher))


def nvml(machine: Machine, _folder: Path) -> Result:
    """See what NVML tells."""
    health = gpus.read()
    if machine.device == "cpu":
        seen = health.trouble or ("no driver" if not health.has_driver else "no device files")
        return Result("GPUs", seen, is_right=None)
    names = ", ".join(f"{gpu.name} sm_{gpu.capability}" for gpu in health.gpus)
    seen = health.trouble or f"driver {health.driver}, CUDA {health.cuda}: {names}"
    return Result("GPUs", seen, bool(health.gpus) and not health.trouble, repr(health))


def starts(machine: Machine, _folder: Path) -> Result:
    """See whether CUDA starts, with as many GPUs as NVML has."""
    start = cuda.read()
    if machine.device == "cpu":
        return Result("it starts", start.trouble or f"code {start.code}", is_right=None)
    wanted = 1 if any(gpu.is_mig for gpu in gpus.read().gpus) else len(gpus.read().gpus)
    seen = start.trouble or f"code {start.code} {start.name}, {start.gpus} GPUs"
    return Result(f"code 0, {wanted} GPUs", seen, not start.code and start.gpus == wanted)


def mig(machine: Machine, folder: Path) -> Result:
    """See whether instances (MIG) are what a launch takes, and whole GPUs otherwise."""
    if machine.device == "cpu":
        return Result("a rank for each GPU or instance", "no GPU", is_right=None)
    probed: Gpus = gpus.read()
    wanted = sum(gpu.instances if gpu.is_mig else 1 for gpu in probed.gpus)
    planned = plan(folder, {})
    modes = ", ".join(f"{gpu.number}: {gpu.is_mig}, {gpu.instances}" for gpu in probed.gpus)
    return Result(f"{wanted} ranks", f"{planned} ranks ({modes})", planned == wanted)


# Each with what stands for the first GPU's UUID.
MASKS = {
    "none": None,
    "empty": "",
    "the first": "0",
    "by its UUID": "{uuid}",
    "the first, and one that is not there": "0,99",
    "one that is not there": "99",
}


def masked(mask: str | None) -> Callable[[Machine, Path], Result]:
    """Return a check that a launch under MASK uses as many GPUs as CUDA then shows."""

    def run(machine: Machine, folder: Path) -> Result:
        if machine.device == "cpu":
            return Result("as many as CUDA", "no GPU", is_right=None)
        uuid = gpus.read().gpus[0].uuid
        env = {} if mask is None else {MASK: mask.format(uuid=uuid)}
        shown = shown_by_cuda(env)
        planned = plan(folder, env)
        # A launch may refuse what CUDA drops without a word; it may not use more.
        is_right = planned == shown or (planned is None and shown < (mask or "").count(",") + 1)
        made = "refused" if planned is None else f"{planned} GPUs"
        return Result(f"{shown} GPUs, as CUDA", made, is_right)

    return run


def shown_by_cuda(env: Mapping[str, str]) -> int:
    """Return how many GPUs CUDA shows with ENV."""

    def ask() -> int:
        os.environ.pop(MASK, None)
        os.environ.update(env)
        lib = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int(0)
        lib.cuInit(0)
        lib.cuDeviceGetCount(ctypes.byref(count))
        return count.value

    answer = IsolatedCall(ask).wait(time.monotonic() + LIMIT_S)
    return int(str(answer.value)) if answer is not None and not answer.trouble else -1


def plan(folder: Path, env: Mapping[str, str]) -> int | None:
    """Return how many ranks have GPUs in a dry run with ENV; None where it is refused."""
    folder.mkdir(parents=True, exist_ok=True)
    inherited = {name: value for name, value in environment().items() if name != MASK}
    done = subprocess.run(
        [*FLEETRUN, "--dry-run=json", str(SPIN), "wait"],
        cwd=folder,
        env={**inherited, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return None
    (node,) = json.loads(done.stdout)["nodes"]
    devices = [device for process in node["processes"] for device in process["rank"]["devices"]]
    return sum(device["kind"] == "gpu" for device in devices)


def wrong_device(machine: Machine, folder: Path) -> Result:
    """See that a GPU that is not there is refused, and nothing is started."""
    code, output, _ = launched(machine, folder, "--gpus=99", how="wait", on="cpu")
    is_right = code in {2, 3} and not (folder / "log").exists()
    return Result(
        "exit code 2 or 3, nothing started", f"exit code {code}: {output[-200:]}", is_right
    )


def doctor(machine: Machine, folder: Path) -> Result:
    """See what the doctor says; it is right to find errors, and wrong to end otherwise."""
    folder.mkdir(parents=True)
    argv = [*FLEETRUN, "doctor", "--json"]
    env = environment()
    if machine.device == "cpu":
        env[MASK] = ""
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode not in {0, 3}:
        return Result("0 or 3", f"exit code {done.returncode}", is_right=False, detail=done.stderr)
    bad = [finding for finding in json.loads(done.stdout)["findings"] if finding["level"] != "ok"]
    seen = "; ".join(
        f"{finding['level']}: {finding['check']}: {finding['seen']}" for finding in bad
    )
    return Result("0 or 3", f"{done.returncode}: {seen or 'all ok'}", is_right=True)


def launched(
    machine: Machine, folder: Path, *options: str, how: str, on: str = ""
) -> tuple[int, str, list[dict[str, Any]]]:
    """Launch one rank that spins; return exit code, words and events."""
    launcher = start(machine, folder, *options, how=how, on=on)
    try:
        output = launcher.communicate(timeout=LIMIT_S)[0]
    except subprocess.TimeoutExpired:
        launcher.terminate()
        output = launcher.communicate()[0] + f"\nit had not ended after {LIMIT_S:g} s"
    return launcher.returncode, output, events(folder)


def start(
    machine: Machine, folder: Path, *options: str, how: str, on: str = ""
) -> subprocess.Popen[str]:
    folder.mkdir(parents=True, exist_ok=True)
    on = on or machine.device
    devices = [] if "--gpus=99" in options else [ONE[on]]
    env = {**environment(), "SPIN_ON": on}
    if machine.device == "cpu":
        env[MASK] = ""
    return subprocess.Popen(
        [*FLEETRUN, *devices, *options, f"--log_dir={folder / 'log'}", str(SPIN), how],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of the launch in FOLDER so far."""
    path = folder / "log" / "latest" / "events.jsonl"
    with contextlib.suppress(OSError):
        return [
            json.loads(line) for line in path.read_text("utf-8").splitlines() if line[-1:] == "}"
        ]
    return []


def waits(machine: Machine, folder: Path) -> Result:
    """See a rank that spins in a kernel called hung."""
    code, output, seen = launched(
        machine, folder, f"--hang_timeout={HANG_S[machine.device]}", how="wait"
    )
    names = [event["event"] for event in seen]
    is_right = code == 124 and "hung" in names
    return Result("hung", f"exit code {code} after {', '.join(names)}", is_right, output[-2000:])


def works(machine: Machine, folder: Path) -> Result:
    """See a GPU that works called alive, although the stack of its rank does not move."""
    code, output, _ = launched(
        machine, folder, f"--hang_timeout={HANG_S[machine.device]}", how="work"
    )
    return Result("exit code 0", f"exit code {code}", code == 0, output[-2000:])


def used() -> int:
    """Return the bytes that are used of the first GPU."""
    return gpus.read().gpus[0].used or 0


def kill_rank(rank: int, _launcher: int) -> None:
    """Kill the rank."""
    os.kill(rank, signal.SIGKILL)


def kill_launcher(_rank: int, launcher: int) -> None:
    """Kill the launcher; its guard ends the rank."""
    os.kill(launcher, signal.SIGKILL)


def freed(kill: Callable[[int, int], None]) -> Callable[[Machine, Path], Result]:
    """Return a check that the rank, and the memory that it holds, are gone after KILL."""

    def run(machine: Machine, folder: Path) -> Result:
        has_gpu = machine.device == "gpu"
        before = used() if has_gpu else 0
        launcher = start(machine, folder, how="hold")
        try:
            rank = holder(folder)
            held = used() - before if has_gpu else 0
            began = time.monotonic()
            kill(rank, launcher.pid)
            launcher.communicate(timeout=LIMIT_S)
            while time.monotonic() < began + FREED_S:
                is_freed = not has_gpu or used() <= before + SLACK
                if is_freed and not Path(f"/proc/{rank}").exists():
                    break
                time.sleep(0.05)
            took = time.monotonic() - began
        finally:
            launcher.kill()
            launcher.wait()
        seen = f"{held >> 20} MiB were held; all gone after {took:.2f} s"
        return Result(f"gone within {FREED_S:g} s", seen, took < FREED_S)

    return run


def holder(folder: Path) -> int:
    """Return the process id of the rank in FOLDER once it waits."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        log = folder / "log" / "workerlog.0"
        if log.exists() and "waits" in log.read_text("utf-8", errors="replace"):
            return next(
                int(event["pid"]) for event in events(folder) if event["event"] == "started"
            )
        time.sleep(0.05)
    raise TimeoutError(folder)
