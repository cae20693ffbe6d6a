"""What the processes of a test wait for, when the test has waited for them in vain."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from fleetrun.plan.environment import STACK_SIGNAL
from fleetrun.postmortem.stackdumps import MEMORY
from fleetrun.run import proc

# Python answers at once, if it can be interrupted at all.
_ANSWER_S = 3.0
_LAST_LINES = 12
_LAST_BYTES = 4096


def living() -> str:
    """Describe each process of this test: what it is, waits for, and has written last."""
    lines, described = ["processes of this test that are alive:"], set[str]()
    for process in _processes():
        with suppress(OSError):  # it may just have ended
            lines += [_kind(process), *_stack(process), *_outputs(process.pid, described)]
    return "\n".join(lines)


def _processes() -> list[proc.Stat]:
    """Return the processes that descend from this one or work in its tests' folders."""
    everyone = proc.all_processes()
    family = proc.descendants(everyone, {os.getpid()})
    # Orphans have lost their parents. Workers of pytest-xdist have a folder each.
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    folder = f"/popen-{worker}/" if worker else "/pytest-of-"
    ours = []
    for process in everyone:
        with suppress(OSError):
            is_ours = process.pid in family or folder in os.readlink(f"/proc/{process.pid}/cwd")
            if is_ours and process.pid != os.getpid():
                ours.append(process)
    return ours


def _kind(process: proc.Stat) -> str:
    folder = f"/proc/{process.pid}/task"
    # "0" where a thread runs, or the kernel does not say it.
    threads = Counter(
        proc.content(f"{folder}/{thread}/wchan").decode().strip("0\n") or "?"
        for thread in os.listdir(folder)
    )
    waits = ", ".join(f"{count} in {where}" for where, count in threads.most_common())
    environ = proc.content(f"/proc/{process.pid}/environ").decode(errors="replace")
    rank = re.search(r"(?:^|\0)PADDLE_TRAINER_ID=(\d+)\0", environ)
    who = f"{process.pid}, of {process.parent}" + (f", rank {rank[1]}" if rank else "")
    return f"* {who}: {proc.command(process.pid)}\n  state {process.state}, threads: {waits}"


def _stack(process: proc.Stat) -> list[str]:
    """Return the stacks of a Python that shows them on a signal, as ranks do."""
    memory = proc.descriptor(process.pid, MEMORY)
    if memory is None or not proc.catches(process.pid, STACK_SIGNAL):
        return []
    with open(memory, "rb") as file:
        file.seek(0, os.SEEK_END)
        proc.send(process, STACK_SIGNAL)
        deadline, text = time.monotonic() + _ANSWER_S, b""
        # It is written a line at a time, the main thread's last.
        while time.monotonic() < deadline:
            time.sleep(0.05)
            more = file.read()
            if text and not more:
                break
            text += more
    return [f"  {line}" for line in text.decode(errors="replace").splitlines()]


def _outputs(pid: int, described: set[str]) -> list[str]:
    """Return the last lines of the files that PID writes its output to, unless DESCRIBED."""
    lines = []
    for descriptor in (1, 2):
        with suppress(OSError):
            path = Path(f"/proc/{pid}/fd/{descriptor}")
            target = str(path.readlink())
            if target in described or not path.is_file():
                continue
            described.add(target)
            with path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
                last = file.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
            lines += [f"  {target} ends:", *(f"    {line}" for line in last)]
    return lines
