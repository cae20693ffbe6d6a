"""The table of the variables that a launch sets for its ranks, other than FLEETRUN_*.

docs/reference.md is generated from it; a test compares it with the plans of all modes.
"""

# No `from __future__ import annotations` here, for the reason given in model.py.
import re
from typing import NamedTuple

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
_TEXT = """
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
CUSTOM_DEVICE_ROOT [all] The folder of the plug-ins that Paddle loads: none, or those for the
    devices in use. (when: with plug-ins whose devices the ranks do not use)
CUDA_DEVICE_ORDER? [all] PCI_BUS_ID: numbers match nvidia-smi. (when: with NVIDIA GPUs)
FLAGS_allocator_strategy? [all] naive_best_fit, which allocates memory at the start;
    the default, auto_growth, does not. (when: --gpu_memory_fraction)
FLAGS_fraction_of_gpu_memory_to_use? [all] The share of each GPU's memory that Paddle allocates at
    the start. (when: --gpu_memory_fraction)
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
PADDLE_BACKUP_ENV_PATH [all] A JSON file with the variables that are too long for the system.
    (when: thousands of ranks)
PADDLE_PG_TIMEOUT? [all] The timeout of collectives, in milliseconds: a week. (when: --debug)
FLAGS_stop_check_timeout? [all] The timeout of rpc, in seconds: a week. (when: --debug)
PYTHONFAULTHANDLER? [all] 1: a crash also prints the Python stack.
PYTHONPATH [all] Yours, after a folder of fleetrun whose start-up file each rank's Python runs.
"""
_ROW = re.compile(r"(\w+)(\??) \[([\w ]+)\] (.+?)(?: \(when: (.+)\))?")
TABLE = tuple(
    RankVariable(
        row[1],
        row[4],
        ALL if row[3] == "all" else tuple(row[3].split()),
        row[5] or "",
        row[2] == "?",
    )
    for line in _TEXT.replace("\n    ", " ").split("\n")
    if (row := _ROW.fullmatch(line))
)
