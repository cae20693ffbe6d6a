"""The equivalents of other launchers' options; loaded only after a mistake."""

# No `from __future__ import annotations` here, for the reason given in model.py.
import re
from typing import NamedTuple

_PROCESSES = "nproc_per_node"


class Hint(NamedTuple):
    """The equivalent of another launcher's option.

    `option` is ours with the same kind of value; `says` is a sentence of its own, or a remark about
    the option.
    """

    option: str = ""
    says: str = ""


_PER_HOST = Hint(_PROCESSES, "the number of processes on this host")
_IPS = "name the hosts with --ips=A,B and run the same command on each"
_NEEDLESS = "leave it out: "
_SCRIPTS_OWN = "your script decides that"

_ROWS: tuple[tuple[str, Hint], ...] = (
    # How many processes: mpirun, horovodrun, torchrun, accelerate, deepspeed, srun.
    (
        """
        n np num_proc num_procs num_processes nprocs num_gpus ngpus nproc_per_host npernode ppn
        ntasks_per_node tasks_per_node ntasks procs_per_node processes_per_node
        """,
        _PER_HOST,
    ),
    ("gpu_ids gpu_id device cuda_devices visible_devices i", Hint("gpus")),
    ("ascend_npus", Hint("npus")),
    ("gpus_per_node gpus_per_task", _PER_HOST),
    ("no_virtual_local_rank", Hint(says=f"{_NEEDLESS}each rank sees all devices anyway.")),
    ("multi_gpu", Hint(says=f"{_NEEDLESS}all visible GPUs are used, or those of --gpus.")),
    ("cpu use_cpu", Hint(says="write --backend=gloo to train on the CPU.")),
    (
        "tpu",
        Hint(says="Paddle supports GPUs, XPUs, and the devices of plug-ins (--npus)."),
    ),
    # Which hosts, and which of them this is.
    (
        "node_rank machine_rank noderank",
        Hint("rank", "this host's position in --ips"),
    ),
    (
        "num_nodes num_machines nodes N nnode host_num num_hosts",
        Hint("nnodes", "it follows from --ips, which names the hosts"),
    ),
    ("H host_list hostlist", Hint("hosts", "as a:8,b:8; they are reached by ssh")),
    ("machinefile default_hostfile hostsfile", Hint("hostfile")),
    ("rdzv_endpoint", Hint("master", "with --nnodes; or name the hosts with --ips")),
    (
        "master_addr main_process_ip rdzv_backend rdzv_conf same_network",
        Hint(says="write --master=HOST:PORT and --nnodes=N, or name the hosts with --ips=A,B."),
    ),
    ("rdzv_id run_id", Hint("job_id")),
    (
        "master_port main_process_port",
        Hint("start_port", "on one host, fleetrun finds free ports itself"),
    ),
    ("local_addr node_addr", Hint("host", "this host's own address")),
    ("standalone", Hint(says=f"{_NEEDLESS}a job is on this host alone unless --ips names others.")),
    (
        "network_interface network_interfaces nics",
        Hint("network"),
    ),
    ("ssh_port p", Hint(says='write --ssh="ssh -p PORT" beside --hosts.')),
    ("ssh_identity_file", Hint(says='write --ssh="ssh -i FILE" beside --hosts.')),
    (
        """
        launcher launcher_args pdsh mpi_args deepspeed_multinode_launcher no_ssh no_ssh_check
        force_multi
        """,
        Hint(
            says=f"{_NEEDLESS}--hosts=A:8,B:8 starts hosts by ssh; under srun or mpirun, "
            f"fleetrun finds the hosts; else {_IPS}."
        ),
    ),
    # What is run.
    ("module", Hint(says="write -m package.module instead of the script.")),
    (
        "script script_args training_script training_script_args",
        Hint(says="write `fleetrun [options] train.py [its arguments]`."),
    ),
    (
        "no_python no_local_rank",
        Hint(says=f"{_NEEDLESS}any program that is not a .py file is executed directly."),
    ),
    (
        "x genv genvlist export",
        Hint(says="write --env NAME=VALUE; every rank gets your exported variables anyway."),
    ),
    (
        "wdir workdir chdir D",
        Hint(says=f"{_NEEDLESS}ranks start in your current folder; cd there first."),
    ),
    (
        "num_cpu_threads_per_process",
        Hint(says="write --env OMP_NUM_THREADS=N; --bind=cores gives each rank its cores."),
    ),
    ("main_training_function role main", Hint(says=f"{_NEEDLESS}each rank runs the script.")),
    # How it goes.
    ("max_restarts restarts reset_limit", Hint("max_restart")),
    ("shutdown_timeout kill_timeout", Hint("grace", "seconds between TERM and KILL")),
    ("monitor_interval", Hint(says=f"{_NEEDLESS}an exit is noticed at once.")),
    ("start_method", Hint(says=f"{_NEEDLESS}every rank is a program of its own.")),
    (
        "start_timeout elastic_launch_timeout timeout",
        Hint("hang_timeout", "it ends a job after that many seconds without progress"),
    ),
    (
        """
        min_np max_np min_num_proc max_num_proc min_nodes max_nodes min_elastic_nodes
        max_elastic_nodes elastic_training
        """,
        Hint(says="write --nnodes=MIN:MAX, which counts hosts, and --master=HOST:PORT."),
    ),
    (
        "host_discovery_script",
        Hint(
            says="hosts join by themselves: start fleetrun on each with --nnodes=MIN:MAX and "
            "--master=HOST:PORT."
        ),
    ),
    ("slots_per_host slots", _PER_HOST),
    ("background bg daemon daemonize d nohup detached", Hint("detach")),
    # What is shown and kept.
    ("local_ranks_filter", Hint("tee", "it takes ranks of the whole job, or all")),
    (
        "t tag_output l prepend_rank label",
        Hint(says="write --tee=all, or --tee=0,3: each line starts with its rank."),
    ),
    (
        "output_filename output o enable_each_rank_log",
        Hint("log_dir", "every rank has its own file there"),
    ),
    (
        "event_log_handler logs_specs save_pid use_agent_store",
        Hint(says=f"{_NEEDLESS}log/latest has events.jsonl, and `fleetrun ps` the processes."),
    ),
    ("r", Hint(says="write --redirects: each rank's standard error goes to its own file.")),
    (
        "duplicate_stdout_filters duplicate_stderr_filters",
        Hint(
            says="write --tee=all --log_filter=PATTERN, or `fleetrun logs -f --grep=PATTERN`: they "
            "merge the matching lines of all ranks."
        ),
    ),
    ("timeline_filename", Hint("profile", "as RANK:STEPS")),
    ("v verbose", Hint(says="write --log_level=debug.")),
    ("q silent", Hint(says="write --quiet.")),
    ("V", Hint(says="write --version.")),
    ("config_file f", Hint("config")),
    ("dryrun print_only", Hint(says="write --dry-run.")),
    # Tuning and binding.
    ("bind_to map_by bind_cores_to_rank cpu_bind bind_core_list", Hint(says="write --bind=cores.")),
    ("numa_binding", Hint(says="write --bind=numa.")),
    ("autotuning autotune", Hint(says="write `fleetrun tune --vary FIELD=A,B train.py`.")),
    (
        "fusion_threshold_mb",
        Hint(says="write --set fuse_grad_size_in_MB=N."),
    ),
    (
        "mixed_precision fp16 bf16 amp dynamo_backend",
        Hint(says=f"{_SCRIPTS_OWN} (paddle.amp)."),
    ),
    (
        "use_deepspeed deepspeed deepspeed_config use_fsdp use_megatron_lm zero_stage",
        Hint(says=f"{_SCRIPTS_OWN}; --strategy takes the fields of fleet.DistributedStrategy."),
    ),
    (
        "allow_run_as_root use_hwthread_cpus mpi gloo nccl_backend mca mpi_version",
        Hint(says=f"{_NEEDLESS}fleetrun works without it."),
    ),
)

# What to write instead of values that other launchers accept for an option of ours.
_VALUES = (
    (
        "backend",
        "mpi",
        (
            "Paddle has no such backend; leave it out (unset PADDLE_DISTRI_BACKEND). MPI may start "
            "the job: `mpirun -n 8 fleetrun train.py`."
        ),
    ),
    (
        "redirects",
        r"[12]|\d+:\d.*",
        (
            "give true (torchrun's 3), for all ranks and both streams, or false, for one log of "
            "each rank; --tee=0,3 chooses the ranks that the console shows."
        ),
    ),
    (
        "tee",
        r"\d+:\d.*",
        "it takes ranks, or all, and shows both streams, as torchrun's 3: write --tee=0,3.",
    ),
)

TABLE: dict[str, Hint] = {word: hint for words, hint in _ROWS for word in words.split()}


def of_value(option: str, value: str) -> str | None:
    """Return what to write instead of VALUE, which other launchers accept for OPTION, if known."""
    word = value.strip().lower()
    for name, pattern, says in _VALUES:
        if name == option and re.fullmatch(pattern, word):
            return says
    return None


def find(typed: str, value: str = "") -> str | None:
    """Return the equivalent of TYPED, an option of another launcher, given VALUE.

    >>> find("-np", "4")
    'use --nproc_per_node=4: the number of processes on this host.'
    >>> find("-n4") == find("-np", "4"), find("--standalone")[:13], find("--nonsense")
    (True, 'leave it out:', None)
    """
    name = typed.lstrip("-").replace("-", "_")
    hint = TABLE.get(name)
    if hint is None and not typed.startswith("--"):
        # -n4
        bare = name.rstrip("0123456789")
        hint, value = TABLE.get(bare), name[len(bare) :]
        if not value:
            return None
    if hint is None:
        return None
    if not hint.option:
        return hint.says
    # Repeat only numbers: the next word may be the script, or hold a secret.
    number = value if value[:1].isdigit() and not value.strip("0123456789,.") else ""
    is_fit = number.isdigit() or (number and hint.option != _PROCESSES)
    written = f"--{hint.option}={number}" if is_fit else f"--{hint.option}"
    return f"use {written}" + (f": {hint.says}." if hint.says else ".")
