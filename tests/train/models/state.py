"""Reports all that a script can see of its process, before and after it imports Paddle."""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import logging
import logging.config
import os
import random
import resource
import signal
import sys
import threading
import traceback
import warnings
from pathlib import Path
from typing import Any

_PR_GET_PDEATHSIG = 2
# Two of the C library's own, which it catches once there was a thread, and SIGWINCH, ignored by
# default: on Python 3.13 what Paddle imports loads readline, in a forked rank a moment earlier.
_CAUGHT_BY_LIBRARIES = 3 << 31 | 1 << (signal.SIGWINCH - 1)


def state() -> dict[str, Any]:
    streams: tuple[Any, ...] = sys.stdin, sys.stdout, sys.stderr
    deadly = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(deadly), 0, 0, 0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    here, parent = os.getpid(), os.getppid()
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "cmdline": Path("/proc/self/cmdline").read_text(),
        "comm": Path("/proc/self/comm").read_text(),
        "environ": dict(os.environ),
        "proc environ": sorted(Path("/proc/self/environ").read_text().rstrip("\0").split("\0")),
        "main": {
            k: repr(v).partition(" at 0x")[0]
            for k, v in vars(sys.modules["__main__"]).items()
            if k[:2] == "__"
        },
        "path": [*sys.path],
        "flags": repr(sys.flags),
        "main thread": threading.main_thread().native_id == here,
        "places": (os.getsid(0) == here, os.getpgid(0) == here, parent),
        "cpus": sorted(os.sched_getaffinity(0)),
        "priority": (os.sched_getscheduler(0), os.nice(0), status["Cpus_allowed_list"]),
        "limits": {
            n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n[:7] == "RLIMIT_"
        },
        "signals": {
            name: f"{int(status[name], 16) & ~_CAUGHT_BY_LIBRARIES:x}"
            for name in ("SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd")
        },
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "handlers": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "deadly": deadly.value,
        "folder": os.getcwd(),
        "umask": status["Umask"],
        "open": sorted(
            (int(link.name), str(link.readlink()))
            for link in Path("/proc/self/fd").iterdir()
            if link.is_symlink()
        ),
        "streams": [
            (s.encoding, s.errors, s.line_buffering, s.write_through, s.mode, s.name, s.isatty())
            for s in streams
        ],
        "collector": (gc.isenabled(), gc.get_threshold(), gc.get_debug()),
        "warnings": [repr(rule) for rule in warnings.filters],
        # Except for the finder that holds the loaded modules.
        "finders": [
            str(finder).partition(" at ")[0]
            for finder in sys.meta_path
            if "fork_server" not in str(finder)
        ],
        "loggers": {
            name: (
                logger.level,
                logger.disabled,
                logger.propagate,
                [
                    (type(handler).__name__, getattr(handler.stream, "name", None))
                    for handler in logger.handlers
                    if isinstance(handler, logging.StreamHandler)
                ],
            )
            for name, logger in [
                ("root", logging.root),
                *logging.root.manager.loggerDict.items(),
            ]
            if isinstance(logger, logging.Logger)
        }
        if "paddle" in sys.modules
        else [repr(handler) for handler in logging.root.handlers],
        "stack": len(traceback.extract_stack()),
        "outermost": sys._getframe(1).f_code.co_name,
        "has Paddle": "paddle" in sys.modules or "numpy" in sys.modules,
    }


before = state()
stdin = sys.stdin.read()
# It disables all loggers that there are, and Paddle's come later.
logging.config.dictConfig(
    {
        "version": 1,
        "handlers": {"own": {"class": "logging.StreamHandler", "stream": "ext://sys.stdout"}},
        "loggers": {"paddle": {"level": "ERROR"}},
        "root": {"level": "DEBUG", "handlers": ["own"]},
    }
)
logging.getLogger("script").debug("before the import")
# Some imports warn, and add filters.
warnings.filterwarnings("ignore", module="paddle.utils")
# What Paddle imports draws numbers, too (rich).
random.seed(3)
import numpy as np
import paddle

seeded = random.random()
random.seed()
after = state()
registry = paddle.base.core.globals()
flags = {name: registry[name] for name in registry.keys()}  # noqa: SIM118 - it is no dict
drawn = [random.random(), float(np.random.rand()), float(paddle.rand([])), os.urandom(4).hex()]  # noqa: NPY002
paddle.seed(7)
model = paddle.nn.Sequential(paddle.nn.Linear(16, 64), paddle.nn.ReLU(), paddle.nn.Linear(64, 1))
optimizer = paddle.optimizer.Adam(parameters=model.parameters())
losses = []
for step in range(20):
    x = paddle.to_tensor(np.random.RandomState(step).rand(32, 16).astype("float32"))
    loss = (model(x) - x.sum(axis=1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    losses.append(float(loss).hex())
image = np.random.RandomState(1).rand(300, 300)
report = {
    "before": before,
    "stdin": stdin,
    "after": after,
    "flags": {name: repr(value) for name, value in flags.items()},
    "device": paddle.device.get_device(),
    "seeded": seeded,
    "losses": losses,
    "product": (image @ image).sum().hex(),
    "drawn": drawn,
}
atexit.register(lambda: print("at exit", flush=True))
Path(os.environ["STATE_FILE"]).write_text(json.dumps(report))
sys.exit(int(os.environ["PADDLE_TRAINER_ID"]) + 5)
