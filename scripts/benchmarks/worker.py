"""A rank that says when its first line ran, waits until it may end, and says when it does."""

import time

FIRST = time.monotonic()

import fcntl  # the line above is the user's first
import os

reports = os.open(os.environ["BENCH_SAID"], os.O_WRONLY)
os.write(reports, f"first {FIRST}\n".encode())
# The benchmark holds this lock until every rank is there and has been looked at.
fcntl.flock(os.open(os.environ["BENCH_LOCK"], os.O_RDONLY), fcntl.LOCK_SH)
os.write(reports, f"end {time.monotonic()}\n".encode())
os._exit(0)
