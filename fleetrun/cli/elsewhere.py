"""What other launchers call an option of ours: what to write instead, after a mistake; pure."""

from __future__ import annotations

_PROCESSES = "use --nproc_per_node{}: the number of processes on this host."
_NODES = "use --nnodes{}: it follows from --ips, which names the hosts."
_MEET = "write --master=HOST:PORT and --nnodes=N, or name the hosts with --ips=A,B."
_ELASTIC = "write --nnodes=MIN:MAX, which counts hosts, and --master=HOST:PORT."
_BY_ITSELF = "leave it out: --hosts=A:8,B:8 starts hosts by ssh; under srun or mpirun, fleetrun "
_BY_ITSELF += "finds the hosts."
_LABEL = "write --tee=all, or --tee=0,3: each line starts with its rank."
_FILTER = "write --tee=all --log_filter=PATTERN, or `fleetrun logs -f --grep=PATTERN`."
_LOGS = "use --log_dir: every rank has its own file there."
_AMP = "your script decides that (paddle.amp)."
_FLEET = "your script decides that; --strategy takes the fields of fleet.DistributedStrategy."

# By the words of torchrun, mpirun, horovodrun, accelerate, deepspeed and srun; {} is replaced by
# `=N` if a number follows.
_ROWS = {
    "n np num_proc num_procs num_processes nprocs num_gpus ngpus ppn npernode": _PROCESSES,
    "ntasks_per_node ntasks gpus_per_node procs_per_node slots slots_per_host": _PROCESSES,
    "ascend_npus": "use --npus{}.",
    "gpu_ids gpu_id device cuda_devices visible_devices i": "use --gpus{}.",
    "node_rank machine_rank": "use --rank{}: this host's position in --ips.",
    "num_nodes num_machines nodes N host_num num_hosts": _NODES,
    "H host_list hostlist": "use --hosts: as a:8,b:8; they are reached by ssh.",
    "machinefile hostsfile": "use --hostfile.",
    "rdzv_endpoint": "use --master: with --nnodes; or name the hosts with --ips.",
    "master_addr main_process_ip rdzv_backend rdzv_conf": _MEET,
    "master_port main_process_port": (
        "use --start_port{}: on one host, fleetrun finds free ports itself."
    ),
    "rdzv_id run_id": "use --job_id{}.",
    "local_addr": "use --host: this host's own address.",
    "standalone": "leave it out: a job is on this host alone unless --ips names others.",
    "network_interface nics": "use --network.",
    "ssh_port p": 'write --ssh="ssh -p PORT" beside --hosts.',
    "launcher no_ssh force_multi": _BY_ITSELF,
    "module": "write -m package.module instead of the script.",
    "script training_script": "write `fleetrun [options] train.py [its arguments]`.",
    "no_python": "leave it out: any program that is not a .py file is executed directly.",
    "x genv export": "write --env NAME=VALUE; every rank gets your exported variables anyway.",
    "wdir chdir D": "leave it out: ranks start in your current folder; cd there first.",
    "num_cpu_threads_per_process": (
        "write --env OMP_NUM_THREADS=N; --bind=cores gives each rank its cores."
    ),
    "max_restarts restarts reset_limit": "use --max_restart{}.",
    "background bg daemon d nohup detached": "use --detach.",
    "role main_training_function main": "leave it out: each rank runs the script.",
    "ssh_identity_file": 'write --ssh="ssh -i FILE" beside --hosts.',
    "shutdown_timeout": "use --grace{}: seconds between TERM and KILL.",
    "monitor_interval": "leave it out: an exit is noticed at once.",
    "start_method": "leave it out: every rank is a program of its own.",
    "timeout": "use --hang_timeout{}: it ends a job after that many seconds without progress.",
    "min_np max_np min_num_proc max_num_proc min_nodes max_nodes elastic_training": _ELASTIC,
    "host_discovery_script": f"hosts join by themselves: {_ELASTIC}",
    "local_ranks_filter": "use --tee{}: it takes ranks of the whole job, or all.",
    "t tag_output l label": _LABEL,
    "duplicate_stdout_filters duplicate_stderr_filters": _FILTER,
    "output_filename output o enable_each_rank_log": _LOGS,
    "r": "write --redirects: each rank's standard error goes to its own file.",
    "v verbose": "write --log_level=debug.",
    "q silent": "write --quiet.",
    "V": "write --version.",
    "config_file f": "use --config.",
    "dryrun": "write --dry-run.",
    "bind_to map_by cpu_bind": "write --bind=cores.",
    "numa_binding": "write --bind=numa.",
    "autotuning": "write `fleetrun tune --vary FIELD=A,B train.py`.",
    "fusion_threshold_mb": "write --set fuse_grad_size_in_MB=N.",
    "cpu use_cpu": "write --backend=gloo to train on the CPU.",
    "multi_gpu": "leave it out: all visible GPUs are used, or those of --gpus.",
    "mixed_precision fp16 bf16 amp": _AMP,
    "use_deepspeed deepspeed use_fsdp zero_stage": _FLEET,
    "allow_run_as_root mpi gloo mca": "leave it out: fleetrun works without it.",
}
SENTENCES = {word: says for words, says in _ROWS.items() for word in words.split()}


def meant(typed: str, value: str = "") -> str | None:
    """Return what to write instead of TYPED, another launcher's option, given VALUE.

    >>> meant("-np", "4")
    'use --nproc_per_node=4: the number of processes on this host.'
    >>> meant("-n4") == meant("-np", "4"), meant("--standalone")[:13], meant("--nonsense")
    (True, 'leave it out:', None)
    """
    name = typed.lstrip("-").replace("-", "_")
    says = SENTENCES.get(name)
    if says is None and not typed.startswith("--"):
        # -n4
        bare = name.rstrip("0123456789")
        says, value = SENTENCES.get(bare), name[len(bare) :]
        if not value:
            return None
    if says is None:
        return None
    # Repeat only numbers: the next word may be the script, or hold a secret.
    most = "0123456789" if says is _PROCESSES else "0123456789,"
    is_fit = value[:1].isdigit() and not value.strip(most)
    return says.format(f"={value}" if is_fit else "")
