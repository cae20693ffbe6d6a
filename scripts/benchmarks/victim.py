"""A rank that fails when it is let to, or says when it is asked to stop.

BENCH_FAILS is the rank that fails, if any; with BENCH_DEAF=1 the others go on when asked to stop.
"""

import fcntl
import os
import signal
import time

reports = os.open(os.environ["BENCH_SAID"], os.O_WRONLY)
is_deaf = os.environ["BENCH_DEAF"] == "1"

# Waited for rather than handled: a handler's signal can come just before a wait for the next one.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
os.write(reports, f"ready {time.monotonic()}\n".encode())
rank = os.environ.get("PADDLE_TRAINER_ID") or os.environ["RANK"]
if rank == os.environ["BENCH_FAILS"]:
    # The benchmark holds this lock until every rank is there.
    fcntl.flock(os.open(os.environ["BENCH_LOCK"], os.O_RDONLY), fcntl.LOCK_SH)
    os.write(reports, f"fails {time.monotonic()}\n".encode())
    os._exit(7)
while True:
    signal.sigwait({signal.SIGTERM})
    os.write(reports, f"term {time.monotonic()}\n".encode())
    if not is_deaf:
        os._exit(0)
