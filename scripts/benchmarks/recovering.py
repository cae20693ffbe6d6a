"""A rank that fails once Paddle is imported and it is let to; its second run ends well."""

import os
import time
from pathlib import Path

began = time.monotonic()
folder = Path(os.environ["BENCH_FOLDER"])
reports = os.open(folder / "said", os.O_WRONLY | os.O_APPEND)
has_failed = (folder / "failed").exists()


def say(word: str, at: float) -> None:
    os.write(reports, f"{word} {at}\n".encode())


if has_failed:
    say("line", began)
import paddle

if has_failed:
    say("imported", time.monotonic())
else:
    rank = os.environ.get("PADDLE_TRAINER_ID") or os.environ["RANK"]
    # Paddle would print a stack for each TERM.
    paddle.disable_signal_handler()
    say("ready", time.monotonic())
    while not (folder / "fail").exists() or int(rank) != int(os.environ["BENCH_RANKS"]) - 1:
        time.sleep(0.01)
    (folder / "failed").touch()
    say("fails", time.monotonic())
    os._exit(7)
