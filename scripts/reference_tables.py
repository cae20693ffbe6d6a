"""What docs/reference.md says of variables and files, for scripts/docs.py and tests.

A test compares each table with the code: the variables FLEETRUN_* with those that are named in it,
the others with the plans of all modes, and the files with what a launch leaves.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from fleetrun.rundir import names


class File(NamedTuple):
    """A file of the run directory; SCHEMA is that of a JSON document, or of each of its lines."""

    # With {rank} as `rank_name` has it, {log} as the plan names a log, {attempt} and {part} from 1.
    name: str
    # The programs that write and read it.
    writer: str
    reader: str
    schema: int | None
    meaning: str


FILES = (
    File(names.LOCK, "launcher", "launches, logs, top, ps", None, "Locked while the launch runs."),
    File(names.PLAN, "launcher", "fleetrun logs, top, ps", 1, "The plan: what was started."),
    File(names.EVENTS, "launcher", "tune, logs, top, ps", 2, "The events, one per line."),
    File(names.MANIFEST, "launcher", "", 2, "Versions, settings, and the line that repeats it."),
    File(names.REPORT, "launcher", "fleetrun tune", 1, "Why the job failed."),
    File(names.PAGE, "fleetrun report", "people", None, "The run as a page with charts."),
    File(names.LAUNCH, "launcher", "people", None, "Tables of settings and environment."),
    File(names.CONSOLE, "launcher", "fleetrun attach", None, "The console of a --detach job."),
    File(names.ENDPOINTS, "launcher", "Paddle's users", None, "The trainers' endpoints."),
    File(
        names.OUTPUT_TIMES, "launcher", "fleetrun logs", None, "The lengths of the logs over time."
    ),
    File(names.METRICS, "launcher", "report, top, ui", 1, "Use of host, GPUs, ranks, every 5 s."),
    File(names.STRATEGY, "launcher", "ranks", 1, "The requested strategy."),
    File("rank.{rank}.jsonl", "rank", "launcher", 1, "Its exception; the strategy's outcome."),
    File("trace.{rank}.json", "rank", "Perfetto", None, "Paddle's profile of some steps."),
    File("heartbeat.{rank}", "rank", "launcher", None, "The number of the last step."),
    File("collectives.{rank}", "rank", "launcher, logs", None, "Its last collectives, in a ring."),
    File("stacks.{rank}.txt", "launcher", "people", None, "The stacks of all threads."),
    File("{log}", "rank", "launcher", None, "The output of the first attempt."),
    File("{log}.attempt{attempt}", "rank", "launcher", None, "The output of a later attempt."),
    File("{log}.{part}", "launcher", "people", None, "An older part of a log; 1 is the newest."),
)


class Variable(NamedTuple):
    """One variable: `is_public` if users may rely on it."""

    name: str
    set_by: str
    read_by: str
    meaning: str
    is_public: bool = False


# `NAME [WHO SETS IT > WHO READS IT] MEANING`; `NAME!` is public. What begins with blanks goes on.
_OWN = """
FLEETRUN_ASSUME_DEVICES! [the user > the launcher] Plan as if this host had these devices
    (`gpu:8`, `mlu:4`, `cpu`); only for --dry-run.
FLEETRUN_STRATEGY! [the user > the launcher] Presets and strategy files, as `a:b`, used if
    --strategy is not given.
FLEETRUN_TOKEN! [the user > the launcher] A secret that all launchers of a job on several hosts
    share; ranks do not get it.
FLEETRUN_EXEC! [`fleetrun exec` > Pythons below it] The Python with the fleetrun that launches
    instead of Paddle's launcher; `off` leaves Paddle's launcher alone.
FLEETRUN_EXEC_OPTIONS [`fleetrun exec` > the launcher] The options of `fleetrun exec`, as JSON:
    the defaults of launches; ranks do not get it.
FLEETRUN_PYTHON [Pythons below `fleetrun exec` > the launcher] The Python of the ranks, where it
    is not the launcher's; ranks do not get it.
FLEETRUN_RUN_DIR! [the launcher > scripts] The run directory of this launch; scripts may put their
    own files there.
FLEETRUN_HEARTBEAT! [the launcher > scripts; ranks that report updates] The file for the number
    of the last step, for --hang_timeout.
FLEETRUN_RECORDS [the launcher > Python ranks] The file to which a rank appends its exception
    and what became of the strategy.
FLEETRUN_JOB [the launcher > the launcher and its guard] The name of the launch, which identifies
    its processes in /proc.
FLEETRUN_STACK_SIGNAL [the launcher > Python ranks] The number of the signal that makes a rank dump
    the stacks of its threads.
FLEETRUN_STRATEGY_FILE [the launcher > Python ranks] The file with the requested strategy; unset
    without one.
FLEETRUN_PROFILE [the launcher > Python ranks] Which steps a rank profiles, and the file for its
    trace; only with --profile.
FLEETRUN_REPORT_UPDATES [the launcher > Python ranks] Report each update to the heartbeat file
    even without a strategy; with --hang_timeout.
FLEETRUN_FLIGHT_RECORDER [the launcher > Python ranks] The file in which a rank records its
    collectives; only with --hang_timeout or --flight_recorder.
FLEETRUN_STOP_AFTER [`fleetrun tune`, `fleetrun verify` > Python ranks] The number of updates after
    which a rank ends; it records the time and loss of each.
FLEETRUN_VERIFY [`fleetrun verify` > Python ranks] The snapshots of parameters that a rank takes,
    as JSON.
_FLEETRUN_COMPLETE [the shell's completion > the launcher] Requests completions instead of a
    launch.
"""
OWN = tuple(
    Variable(name, set_by, read_by, meaning, mark == "!")
    for name, mark, set_by, read_by, meaning in re.findall(
        r"(?m)^(\w+)(!?) \[(.+?) > (.+?)\] (.+)$", _OWN.replace("\n    ", " ")
    )
)
# The modes of jobs.
ALL = ("collective", "ps", "rpc")


class RankVariable(NamedTuple):
    """One variable: the modes that set it, the condition, and whose value wins.

    `yields` is true if a value that the user has exported takes precedence.
    """

    name: str
    meaning: str
    modes: tuple[str, ...] = ALL
    when: str = ""
    yields: bool = False


# `NAME [MODES] MEANING (when: CONDITION)`; `NAME?` yields. Lines that begin with blanks go on.
_OF_RANKS = """
# Who a rank is.
PADDLE_TRAINER_ID [all] The rank, from 0; with servers, only trainers are counted.
PADDLE_TRAINERS_NUM [all] The world size; with servers, the number of trainers.
PADDLE_TRAINER_ENDPOINTS [collective ps] The address of every trainer.
PADDLE_CURRENT_ENDPOINT [collective] The address of this rank.
PADDLE_GLOBAL_RANK [collective] The rank (Paddle's newer name).
PADDLE_GLOBAL_SIZE [collective] The world size (Paddle's newer name).
PADDLE_LOCAL_RANK [collective] The local rank: the index among this host's ranks, from 0.
PADDLE_LOCAL_SIZE [collective] The number of ranks on this host.
PADDLE_RANK_IN_NODE [collective] The same as PADDLE_LOCAL_RANK.
PADDLE_NNODES [collective ps] The number of hosts.
PADDLE_MASTER [collective] The address of the ranks' store, HOST:PORT.
PADDLE_DISTRI_BACKEND [collective] nccl, gloo or xccl.
PADDLE_XCCL_BACKEND [all] The kind of device. (when: xccl)
PADDLE_MASTER_ENDPOINT [rpc] The address at which workers rendezvous.
PADDLE_WORKER_ENDPOINT [rpc] The address of this worker.
# Devices.
FLAGS_selected_gpus [collective ps] This rank's GPUs, as indexes into CUDA_VISIBLE_DEVICES. (when:
    with GPUs, or servers)
FLAGS_selected_xpus [collective ps] The same for XPUs. (when: with XPUs, or servers)
FLAGS_selected_npus [collective ps] The same for NPUs; another kind has a variable of its own,
    such as FLAGS_selected_mlus. (when: with NPUs)
FLAGS_selected_accelerators [collective] The same, for devices of any kind. (when: with devices)
PADDLE_LOCAL_DEVICE_IDS [collective] This rank's devices, as indexes.
PADDLE_WORLD_DEVICE_IDS [collective] Every rank's devices, as indexes.
CUDA_VISIBLE_DEVICES [all] The GPUs that this process may see. (when: with servers, or
    partitioned GPUs (MIG))
XPU_VISIBLE_DEVICES [ps] The same for XPUs.
XPULINK_VISIBLE_DEVICES [ps] The same for XPUs. (when: with XPUs)
ASCEND_RT_VISIBLE_DEVICES [ps] The same for NPUs; every kind has its own. (when: with NPUs)
NPU_VISIBLE_DEVICES [ps] The same for NPUs. (when: with NPUs)
CUSTOM_DEVICE_ROOT [all] The folder of the plug-ins that Paddle loads: none.
    (when: with plug-ins whose devices the ranks do not use)
CUDA_DEVICE_ORDER? [all] PCI_BUS_ID: numbers match nvidia-smi. (when: with NVIDIA GPUs)
OMP_NUM_THREADS? [all] The number of cores of the rank. (when: --bind)
# Communication.
GLOO_SOCKET_IFNAME? [all] The interface that leads to the other hosts; lo on one host.
NCCL_DEBUG? [all] WARN. (when: with GPUs)
NCCL_SOCKET_IFNAME? [all] The interfaces for NCCL, if its own choice would fail, or as --network or
    --host say. (when: several hosts with GPUs)
NCCL_IB_DISABLE? [all] 1. (when: with GPUs and without InfiniBand)
NCCL_IB_HCA? [all] The InfiniBand ports with a link. (when: several hosts with GPUs and
    InfiniBand)
no_proxy [all] Yours, plus the hosts of the job. (when: if a proxy is set)
NO_PROXY [all] The same. (when: if a proxy is set)
# Parameter servers.
TRAINING_ROLE [ps] TRAINER, PSERVER, HETER_TRAINER or COORDINATOR.
PADDLE_ROLE [ps] The same under another name.
POD_IP [ps] The host of this process's address.
PADDLE_PORT [ps] The port of this process's address.
PADDLE_PSERVERS_IP_PORT_LIST [ps] The address of every server.
PADDLE_HETER_TRAINER_IP_PORT_LIST [ps] The address of every heterogeneous trainer.
PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST [ps] The same under another name. (when: with heterogeneous
    trainers)
PADDLE_PREVIOUS_HETER_TRAINER_IP_PORT_LIST [ps] The addresses of the previous stage. (when: with
    heterogeneous trainers)
PADDLE_NEXT_HETER_TRAINER_IP_PORT_LIST [ps] The addresses of the next stage. (when: with
    heterogeneous trainers)
STAGE_ID [ps] The stage of this process, from 1. (when: with heterogeneous trainers)
STAGE_NUM [ps] The number of stages. (when: with heterogeneous trainers)
PADDLE_STAGE_TRAINERS_NUM [ps] The number of trainers of each stage. (when: with heterogeneous
    trainers)
HETER_DEVICE_TYPE [ps] The device of this stage. (when: with heterogeneous trainers)
PADDLE_COORDINATOR_ENDPOINTS [ps] The address of every coordinator.
PADDLE_COORDINATOR_NUM [ps] The number of coordinators. (when: for coordinators)
PADDLE_WITH_GLOO? [all] Whether trainers wait for each other: 0, 1 or 2, see --with_gloo.
PADDLE_GLOO_HTTP_ENDPOINT [ps] The address at which trainers wait for each other.
PADDLE_GLOO_RENDEZVOUS [ps] 3: by HTTP.
PADDLE_GLOO_RENDEZVOUS? [collective rpc] 3: by HTTP.
PADDLE_GLOO_FS_PATH? [all] A folder for gloo's files.
# The launch.
PADDLE_JOB_ID [all] The name of the job, see --job_id.
PADDLE_LOG_DIR [all] The log folder.
PADDLE_RESTART_COUNT [all] The number of the attempt, from 0.
POD_NAME? [all] The job name and the node rank.
PADDLE_AUTO_CLUSTER? [all] 0.
PYTHONFAULTHANDLER? [all] 1: a crash also prints the Python stack.
PYTHONHASHSEED? [all] 0: all ranks iterate over a set of names in the same order.
PYTHONPATH [all] Yours, after a folder of fleetrun whose start-up file each rank's Python runs.
"""
_ROW = re.compile(r"(\w+)(\??) \[([\w ]+)\] (.+?)(?: \(when: (.+)\))?")
OF_RANKS = tuple(
    RankVariable(
        row[1],
        row[4],
        ALL if row[3] == "all" else tuple(row[3].split()),
        row[5] or "",
        row[2] == "?",
    )
    for line in _OF_RANKS.replace("\n    ", " ").split("\n")
    if (row := _ROW.fullmatch(line))
)
