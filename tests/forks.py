"""Ranks that a guard starts or forks, in tests; and a fake Paddle, which imports at once."""

from __future__ import annotations

import os
import select
from typing import TYPE_CHECKING

from waiting import TRAINING_S, until

from fleetrun.plan.environment import with_island
from fleetrun.run.children import Ended, Launched, Order
from fleetrun.run.signals import defaults_for_children

if TYPE_CHECKING:
    from pathlib import Path

    from fleetrun.run.guard import Guard

_FAKE = {
    "numpy/__init__.py": "",
    "numpy/random.py": "",
    # What ranks have mapped that hold Paddle.
    "paddle/libpaddle.so": "x",
    "paddle/__init__.py": """
import mmap, os
import numpy
import paddle.base
with open(os.path.join(os.path.dirname(__file__), "libpaddle.so"), "rb") as file:
    library = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
read = os.environ.get("READ_AT_IMPORT")
class static:
    class Executor:
        def run(self): pass
print("Paddle says hello")
""",
    "paddle/base/__init__.py": """
import os
from . import core
os.environ.setdefault("OMP_NUM_THREADS", "1")
core.init_gflags("--tryfromenv=x")
core.init_devices()
""",
    "paddle/base/core.py": """
import os
started = []
def init_gflags(words): started.append(os.environ.get("FLAGS_x"))
def init_devices(): started.append("devices")
def disable_signal_handler():
    import signal
    started.append("no handlers")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
class ProcessGroup:
    def barrier(self): pass
""",
    "starts_a_thread.py": "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n",
    "opens_a_device.py": "file = open('/dev/full', 'wb')\n",
    "fails.py": "import no_such_module\n",
    "exits.py": "raise SystemExit(3)\n",
    "changes_folder.py": "import os\nos.chdir('/')\n",
    "changes_umask.py": "import os\nos.umask(0o77)\n",
    "changes_limits.py": "import resource as r\nr.setrlimit(r.RLIMIT_CORE, (0, 0))\n"
    "r.setrlimit(r.RLIMIT_NOFILE, (99, 99))\n",
    "buffers.py": "import sys\nsys.stdout.reconfigure(line_buffering=True, errors='replace')\n",
    # As PaddleFormers does.
    "disables.py": "import paddle\npaddle.base.core.disable_signal_handler()\n",
    # As PaddleFormers is.
    "lazy.py": "import sys, types, warnings\nwarnings.warn('old')\n"
    "class Lazy(types.ModuleType):\n"
    "    def __getattr__(self, name):\n"
    "        import fails\n"
    "sys.modules[__name__] = Lazy(__name__)\n",
    "handles_a_signal.py": "import signal\nsignal.signal(signal.SIGTERM, print)\n",
    # It ends with the one that has imported the module.
    "starts_a_process.py": "import os, subprocess\nwatched = f'--pid={os.getpid()}'\n"
    "child = subprocess.Popen(['tail', watched, '-f', '/dev/null'])\n",
    "listens.py": "import socket\nserver = socket.create_server(('127.0.0.1', 0))\n",
    "writes.py": "file = open(__file__ + '.log', 'w')\n",
    "reads.py": "file = open(__file__)\n",
}


def fake_paddle(folder: Path) -> str:
    """Make the fake in FOLDER, and return the folder in which Python finds it."""
    root = folder / "fake"
    for name, text in _FAKE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


def order(folder: Path, modules: str, *words: str, rank: int = 0, **more: str) -> Order:
    """Return how RANK is started with the command WORDS, and with MODULES on its PYTHONPATH."""
    env = {
        **os.environ,
        "PYTHONPATH": with_island(modules),
        "PADDLE_TRAINER_ID": str(rank),
        "PYTHONFAULTHANDLER": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "FLEETRUN_STACK_SIGNAL": "60",
        "FLEETRUN_RECORDS": str(folder / f"rank.{rank}.jsonl"),
        **more,
    }
    log = os.open(folder / f"log.{rank}", os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC)
    return Order(
        argv=words,
        env={os.fsencode(name): os.fsencode(value) for name, value in env.items()},
        output=log,
        errors=log,
        takes_our_stdin=False,
        default_signals=tuple(map(int, defaults_for_children())),
        cpus=(),
    )


def stand_by(parent: Guard, like: Order, *modules: str, count: int = 2) -> tuple[str, int, str]:
    """Start a fork server for COUNT ranks, and return it."""
    parent.stand_by(like, modules, count)
    until(lambda: parent.standing_by()[0] != "loading", TRAINING_S)
    return parent.standing_by()


def run(parent: Guard, order: Order) -> tuple[Launched, Ended]:
    """Start ORDER, forked if possible; return how it started and how it ended."""
    started = parent.start(order._replace(may_fork=True))
    pidfd = os.pidfd_open(started.pid)
    assert select.select([pidfd], [], [], TRAINING_S)[0]
    os.close(pidfd)
    os.close(order.output)
    return started, parent.end([started.pid])[0]
