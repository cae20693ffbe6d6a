"""The table of what a launch sets for its ranks beside its own variables FLEETRUN_*.

The page of reference is made from it, and a test holds it to what plans of all modes set.
"""

# No `from __future__ import annotations` here, for the reason given in model.py.
from typing import NamedTuple

ALL = ("collective", "ps", "rpc")
_TRAINING = ("collective",)
_SERVERS = ("ps",)
_CALLS = ("rpc",)
_HETER = "with heterogeneous trainers"


class RankVariable(NamedTuple):
    """One variable: the modes that set it, on which condition, and whose value counts.

    `yields` is true where a value that the user has exported stays.
    """

    name: str
    meaning: str
    modes: tuple[str, ...] = ALL
    when: str = ""
    yields: bool = False


TABLE = (
    # Who a rank is.
    RankVariable("PADDLE_TRAINER_ID", "The rank, from 0; with servers, that of trainers only."),
    RankVariable("PADDLE_TRAINERS_NUM", "How many ranks; with servers, how many trainers."),
    RankVariable("PADDLE_TRAINER_ENDPOINTS", "The address of every trainer.", ("collective", "ps")),
    RankVariable("PADDLE_CURRENT_ENDPOINT", "The address of this rank.", _TRAINING),
    RankVariable("PADDLE_GLOBAL_RANK", "The rank, by Paddle's newer name.", _TRAINING),
    RankVariable("PADDLE_GLOBAL_SIZE", "How many ranks, by Paddle's newer name.", _TRAINING),
    RankVariable("PADDLE_LOCAL_RANK", "The place among this host's ranks, from 0.", _TRAINING),
    RankVariable("PADDLE_LOCAL_SIZE", "How many ranks this host has.", _TRAINING),
    RankVariable("PADDLE_RANK_IN_NODE", "The same as PADDLE_LOCAL_RANK.", _TRAINING),
    RankVariable("PADDLE_NNODES", "How many hosts.", ("collective", "ps")),
    RankVariable("PADDLE_MASTER", "Where the ranks' store is: HOST:PORT.", _TRAINING),
    RankVariable("PADDLE_DISTRI_BACKEND", "nccl, gloo or xccl.", _TRAINING),
    RankVariable("PADDLE_XCCL_BACKEND", "The kind of device.", when="xccl"),
    RankVariable("PADDLE_MASTER_ENDPOINT", "Where workers meet.", _CALLS),
    RankVariable("PADDLE_WORKER_ENDPOINT", "The address of this worker.", _CALLS),
    # Devices.
    RankVariable(
        "FLAGS_selected_gpus",
        "This rank's GPUs, as indexes into CUDA_VISIBLE_DEVICES.",
        ("collective", "ps"),
        when="with GPUs, or servers",
    ),
    RankVariable(
        "FLAGS_selected_xpus",
        "The same for XPUs.",
        ("collective", "ps"),
        when="with XPUs, or servers",
    ),
    RankVariable(
        "FLAGS_selected_npus",
        "The same for NPUs; another kind has a variable of its own, such as FLAGS_selected_mlus.",
        ("collective", "ps"),
        "with NPUs",
    ),
    RankVariable(
        "FLAGS_selected_accelerators",
        "The same, whatever kind they are of.",
        _TRAINING,
        "with devices",
    ),
    RankVariable("PADDLE_LOCAL_DEVICE_IDS", "This rank's devices, as indexes.", _TRAINING),
    RankVariable("PADDLE_WORLD_DEVICE_IDS", "Every rank's devices, as indexes.", _TRAINING),
    RankVariable(
        "CUDA_VISIBLE_DEVICES",
        "The GPUs that this process may see.",
        when="with servers, or divided GPUs (MIG)",
    ),
    RankVariable("XPU_VISIBLE_DEVICES", "The same for XPUs.", _SERVERS),
    RankVariable("XPULINK_VISIBLE_DEVICES", "The same for XPUs.", _SERVERS, "with XPUs"),
    RankVariable(
        "ASCEND_RT_VISIBLE_DEVICES",
        "The same for NPUs; every kind has its own.",
        _SERVERS,
        "with NPUs",
    ),
    RankVariable("NPU_VISIBLE_DEVICES", "The same for NPUs.", _SERVERS, "with NPUs"),
    RankVariable(
        "CUSTOM_DEVICE_ROOT",
        "The folder of plug-ins that Paddle loads: none, or those of the kind that is used.",
        when="where ranks do not use what Paddle's plug-ins would give them",
    ),
    RankVariable(
        "CUDA_DEVICE_ORDER",
        "PCI_BUS_ID: numbers are those of nvidia-smi.",
        when="with NVIDIA's GPUs",
        yields=True,
    ),
    RankVariable(
        "FLAGS_allocator_strategy",
        "naive_best_fit, which takes that share: auto_growth, the default, does not read it.",
        when="--gpu_memory_fraction",
        yields=True,
    ),
    RankVariable(
        "FLAGS_fraction_of_gpu_memory_to_use",
        "Share of each GPU's memory that Paddle takes at its start.",
        when="--gpu_memory_fraction",
        yields=True,
    ),
    RankVariable("OMP_NUM_THREADS", "As many as the rank has cores.", when="--bind", yields=True),
    # Communication.
    RankVariable(
        "GLOO_SOCKET_IFNAME",
        "The interface that leads to the other hosts; lo on one host.",
        yields=True,
    ),
    RankVariable("NCCL_DEBUG", "WARN.", when="with GPUs", yields=True),
    RankVariable(
        "NCCL_SOCKET_IFNAME",
        "The interfaces for NCCL, where its own choice would fail or --network or --host say so.",
        when="several hosts with GPUs",
        yields=True,
    ),
    RankVariable("NCCL_IB_DISABLE", "1.", when="with GPUs and without InfiniBand", yields=True),
    RankVariable(
        "NCCL_IB_HCA",
        "The InfiniBand ports with a link.",
        when="several hosts with GPUs and InfiniBand",
        yields=True,
    ),
    RankVariable(
        "no_proxy",
        "Yours, and the hosts of the job.",
        when="where a proxy is set",
    ),
    RankVariable("NO_PROXY", "The same.", when="where a proxy is set"),
    # Parameter servers.
    RankVariable("TRAINING_ROLE", "TRAINER, PSERVER, HETER_TRAINER or COORDINATOR.", _SERVERS),
    RankVariable("PADDLE_ROLE", "The same, by another name.", _SERVERS),
    RankVariable("POD_IP", "The host of this process's address.", _SERVERS),
    RankVariable("PADDLE_PORT", "The port of this process's address.", _SERVERS),
    RankVariable("PADDLE_PSERVERS_IP_PORT_LIST", "The address of every server.", _SERVERS),
    RankVariable(
        "PADDLE_HETER_TRAINER_IP_PORT_LIST", "The address of every heterogeneous trainer.", _SERVERS
    ),
    RankVariable(
        "PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST", "The same, by another name.", _SERVERS, _HETER
    ),
    RankVariable(
        "PADDLE_PREVIOUS_HETER_TRAINER_IP_PORT_LIST",
        "The addresses of the stage before.",
        _SERVERS,
        _HETER,
    ),
    RankVariable(
        "PADDLE_NEXT_HETER_TRAINER_IP_PORT_LIST",
        "The addresses of the stage after.",
        _SERVERS,
        _HETER,
    ),
    RankVariable("STAGE_ID", "The stage of this process, from 1.", _SERVERS, _HETER),
    RankVariable("STAGE_NUM", "How many stages.", _SERVERS, _HETER),
    RankVariable(
        "PADDLE_STAGE_TRAINERS_NUM", "How many trainers each stage has.", _SERVERS, _HETER
    ),
    RankVariable("HETER_DEVICE_TYPE", "What this stage runs on.", _SERVERS, _HETER),
    RankVariable("PADDLE_COORDINATOR_ENDPOINTS", "The address of every coordinator.", _SERVERS),
    RankVariable("PADDLE_COORDINATOR_NUM", "How many coordinators.", _SERVERS, "for coordinators"),
    RankVariable(
        "PADDLE_WITH_GLOO",
        "Whether trainers wait for each other: 0, 1 or 2, see --with_gloo.",
        yields=True,
    ),
    RankVariable("PADDLE_GLOO_HTTP_ENDPOINT", "Where they meet for that.", _SERVERS),
    RankVariable("PADDLE_GLOO_RENDEZVOUS", "3: by HTTP.", _SERVERS),
    RankVariable("PADDLE_GLOO_RENDEZVOUS", "3: by HTTP.", ("collective", "rpc"), yields=True),
    RankVariable("PADDLE_GLOO_FS_PATH", "A folder for gloo's files.", yields=True),
    # The launch.
    RankVariable("PADDLE_JOB_ID", "The name of the job, see --job_id."),
    RankVariable("PADDLE_LOG_DIR", "The log folder."),
    RankVariable("PADDLE_RESTART_COUNT", "Which attempt it is, from 0."),
    RankVariable("POD_NAME", "The name of the job and the number of the host.", yields=True),
    RankVariable("PADDLE_AUTO_CLUSTER", "0.", yields=True),
    RankVariable(
        "PADDLE_BACKUP_ENV_PATH",
        "A JSON file of the variables that are too long for the system.",
        when="thousands of ranks",
    ),
    RankVariable(
        "PADDLE_PG_TIMEOUT",
        "How long collectives wait, in milliseconds: a week.",
        when="--debug",
        yields=True,
    ),
    RankVariable(
        "FLAGS_stop_check_timeout",
        "How long rpc waits, in seconds: a week.",
        when="--debug",
        yields=True,
    ),
    RankVariable("PYTHONFAULTHANDLER", "1: a crash shows Python's stack too.", yields=True),
    RankVariable(
        "PYTHONPATH", "Yours, after a folder of fleetrun's that a rank's Python runs first."
    ),
)
