"""Try on real GPUs what no test without them can show, and write down what is seen.

For the first person with such a machine, about ten minutes: training, each field of a strategy with
its own count, two levels, 16 bits, a hang, a benchmark. Without GPUs the same runs on CPUs over
gloo, where it shows nothing about GPUs. Send the JSON back: it has no names of hosts or users.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from checks import Check, Result, all_checks
from launcher import launcher_checks
from launches import Machine

# Two levels of two.
MOST_RANKS = 4

# In a process of its own: a CUDA context here would take memory from the ranks.
ASK = """
import json, paddle
gpus = paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0
names = [paddle.device.cuda.get_device_name(each) for each in range(gpus)]
print("FOUND " + json.dumps({
    "paddle": paddle.__version__, "cuda": str(paddle.version.cuda()),
    # Paddle 2.6 does not tell its version.
    "nccl": str(getattr(paddle.version, "nccl", lambda: "?")()), "gpus": names}))
"""


def main() -> int:
    """Run the checks that the command line names, and return 1 if one of them is wrong."""
    parser = argparse.ArgumentParser(prog="scripts/gpu-check", description=__doc__)
    parser.add_argument("--only", metavar="REGEX", default="", help="checks whose names have this")
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks (GPUs, at most 4; CPU: 2)")
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    parser.add_argument("--list", action="store_true", help="name the checks, and run none")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        default=Path("gpu-check.json"),
        help="where to write what is seen (gpu-check.json)",
    )
    parser.add_argument(
        "--launcher", action="store_true", help="what needs no Paddle: driver, masks, hangs, kills"
    )
    chosen = parser.parse_args()
    if chosen.ranks is not None and chosen.ranks < 1:
        parser.error("--ranks: give a number from 1")
    facts = without_paddle() if chosen.launcher else ask()
    gpus = 0 if chosen.cpu else len(facts["gpus"])
    machine = Machine("gpu" if gpus else "cpu", chosen.ranks or (min(gpus, MOST_RANKS) or 2))
    checks = launcher_checks() if chosen.launcher else all_checks(facts["paddle"], machine.device)
    wanted = [check for check in checks if re.search(chosen.only, check.name)]
    if chosen.list:
        print(*(check.name for check in wanted), sep="\n")
        return 0
    print(describe(machine, facts), flush=True)
    rows = list(run(wanted, machine))
    record = {
        "schema": 1,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "driver": driver(),
        **facts,
        "device": machine.device,
        "ranks": machine.ranks,
        "checks": rows,
    }
    chosen.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    wrong = [row["name"] for row in rows if row["is_right"] is False]
    left = sum(row["is_right"] is None for row in rows)
    print(f"{len(rows) - len(wrong) - left} as predicted, {len(wrong)} not, {left} left out.")
    print(f"All that was seen is in {chosen.json}: please send it back.")
    return 1 if wrong else 0


def ask() -> dict[str, Any]:
    """Ask Paddle what it is and sees."""
    argv = [sys.executable, "-W", "ignore", "-c", ASK]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    match = re.search(r"^FOUND (.*)$", done.stdout, re.MULTILINE)
    if match is None:
        sys.exit(f"scripts/gpu-check: Paddle cannot be asked: {done.stderr.strip()[-500:]}")
    answer: dict[str, Any] = json.loads(match[1])
    return answer


def without_paddle() -> dict[str, Any]:
    """Ask the driver alone."""
    from fleetrun.probe.health import gpus

    seen = gpus.read()
    cuda = ".".join(map(str, seen.cuda or ())) or "None"
    return {"paddle": "", "cuda": cuda, "nccl": "", "gpus": [gpu.name for gpu in seen.gpus]}


def driver() -> str:
    """Return the version of NVIDIA's driver, "" without one."""
    try:
        return Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def describe(machine: Machine, facts: dict[str, Any]) -> str:
    """Say in a line what is tried, and on what."""
    about = f"Paddle {facts['paddle']}, CUDA {facts['cuda']}, NCCL {facts['nccl']}"
    if not facts["paddle"]:
        about = f"no Paddle is used, CUDA {facts['cuda']}"
    if machine.device == "gpu":
        return f"{len(facts['gpus'])} GPUs ({facts['gpus'][0]}), {machine.ranks} ranks; {about}."
    return f"No GPU is here (or --cpu): {machine.ranks} ranks on the CPU over gloo; {about}."


def run(checks: list[Check], machine: Machine) -> Any:
    """Run CHECKS, and yield each as it is written down."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        for number, check in enumerate(checks):
            started = time.monotonic()
            if machine.ranks < check.needs:
                needs = f"needs {check.needs} ranks"
                result = Result("", needs, is_right=None)
            else:
                result = check.run(machine, Path(folder) / str(number))
            took = time.monotonic() - started
            mark = {True: "as predicted", False: "NOT SO", None: "left out"}[result.is_right]
            print(f"{mark:<13}{check.name:<46}{result.seen}  [{took:.0f} s]", flush=True)
            if result.is_right is False:
                print(f"{'':<13}predicted: {result.predicted}", flush=True)
            yield {"name": check.name, "seconds": round(took, 1), **result._asdict()}


if __name__ == "__main__":
    # As if it were interrupted: what was launched must not stay behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
