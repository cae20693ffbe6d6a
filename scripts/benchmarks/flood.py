"""A rank that prints BENCH_LINES lines, and says how long that took."""

import os
import time

count = int(os.environ["BENCH_LINES"])
started = time.monotonic()
for number in range(count):
    print(f"line {number}: loss 0.123456, accuracy 0.9876, 1234.5 images a second")
took = time.monotonic() - started
with open(os.path.join(os.environ["BENCH_FOLDER"], "took"), "w") as file:  # noqa: PTH118, PTH123
    file.write(f"{took} {time.process_time()}")
