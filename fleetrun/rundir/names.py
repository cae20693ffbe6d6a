"""The names of a launch's processes and of the files in its log folder."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from fleetrun.model import LaunchPlan, ProcessSpec, RankSpec
from fleetrun.text import format_ranges

# In the log folder: run directories, one for each launch, and links into the latest one.
RUNS = "runs"
LATEST = "latest"
# In each run directory.
LOCK = "lock"
PLAN = "plan.json"
EVENTS = "events.jsonl"
MANIFEST = "manifest.json"
REPORT = "report.json"
LAUNCH = "launch.txt"
CONSOLE = "console.log"
ENDPOINTS = "endpoints.log"
OUTPUT_TIMES = "output.times"
METRICS = "metrics.jsonl"
PAGE = "report.html"
STRATEGY = "strategy.json"
# The names of each role's logs, as in Paddle (except coordinators', where Paddle documents one name
# and uses another); a number follows.
LOGS = {
    "PSERVER": "serverlog",
    "TRAINER": "workerlog",
    "HETER_TRAINER": "heterlog",
    "COORDINATOR": "coordinatorlog",
}
# The files of a rank, by `rank_name`.
rank_records = "rank.{}.jsonl".format
trace = "trace.{}.json".format
heartbeat = "heartbeat.{}".format
collectives = "collectives.{}".format
stacks = "stacks.{}.txt".format
# The file in the log folder that shows other hosts that they share it, by the launcher.
marker = ".host-{}".format


def node_folder(node_rank: int, generation: int = 0) -> str:
    """Name the folder of a later host, which came in GENERATION, in a shared run directory."""
    return f"node{node_rank}.{generation}" if generation else f"node{node_rank}"


def is_node_folder(name: str) -> bool:
    """Whether NAME is one of `node_folder`."""
    return re.fullmatch(r"node\d{1,7}(\.\d{1,7})?", name) is not None


def run_name(run_dir: str) -> str:
    """Name a run by its directory: one of several hosts in a shared log folder by both folders."""
    above, name = os.path.split(run_dir)
    return f"{os.path.split(above)[1]}/{name}" if is_node_folder(name) else name


def job_name(run: str) -> str:
    """Return the job name of the RUN: its --job_id, or its script."""
    # Start time, job name, launcher, and the node rank if there are several.
    match = re.fullmatch(r"[^-]+-(.*?)-\d+(-node\d+|/.*)?", run)
    return run if match is None else match[1]


def shared_log(spec: RankSpec) -> str:
    """Name the log of a rank in a folder with the logs of all hosts."""
    return f"{LOGS[spec.role]}.{spec.rank}"


def error_log(log: str) -> str:
    """Name the file for standard error where LOG is that for standard output."""
    return log.replace("log.", "err.")


def rank_name(spec: RankSpec) -> str:
    """Name a rank in file names: trainers by their number alone."""
    role = "" if spec.is_trainer else spec.role.lower().removeprefix("p").removesuffix("_trainer")
    return f"{role}.{spec.rank}".lstrip(".")


def spec_label(spec: RankSpec) -> str:
    """Name a rank of any host as users think of it: `rank 3`, `server 0`."""
    return f"rank {spec.rank}" if spec.is_trainer else rank_name(spec).replace(".", " ")


def label_of(name: str) -> str:
    """Name a process by its NAME in plans and events as users think of it."""
    return name.replace("trainer.", "rank ").replace(".", " ", 1)


def listed(labels: Sequence[str]) -> str:
    """List processes briefly, ranks as ranges.

    >>> listed(["rank 0", "rank 2", "rank 3", "rank 4", "server 1", "server 0"])
    'ranks 0, 2-4, server 0 and server 1'
    """
    numbers = [int(label[5:]) for label in labels if label.startswith("rank ")]
    words = [f"rank{'s' * (len(numbers) > 1)} {format_ranges(numbers)}"] if numbers else []
    # Sorted naturally: `server 2` comes before `server 10`.
    others = [label for label in labels if not label.startswith("rank ")]
    words += sorted(others, key=lambda label: (label.split(" ")[0], len(label), label))
    return " and ".join((", ".join(words[:-1]), words[-1])) if len(words) > 1 else "".join(words)


def run_path(plan: LaunchPlan, name: str) -> str:
    """Return the path of the file NAME in PLAN's run directory."""
    return os.path.join(plan.cwd, plan.run_dir, name)


def log_name(log: str, attempt: int) -> str:
    """Name the file for the output of an attempt of the process whose log is LOG."""
    return f"{log}.attempt{attempt}" if attempt else log


def log_paths(plan: LaunchPlan, spec: ProcessSpec, attempt: int) -> tuple[str, ...]:
    """Return the paths of an attempt's output: one file, or one for each stream."""
    logs = filter(None, (spec.log, spec.error_log))
    return tuple([run_path(plan, log_name(log, attempt)) for log in logs])


def unwritable(folder: str, why: str | None) -> str:
    """Return the sentence that no log can be written to FOLDER."""
    return (
        f"The logs cannot be written to {folder} ({why}): make room or choose another folder with "
        "--log_dir."
    )
