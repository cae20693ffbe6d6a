"""Answers words that are not ours: those of other launchers, of other tools, and gone since 1.0."""

from __future__ import annotations

import os
from collections.abc import Iterable

from fleetrun import text
from fleetrun.errors import UsageError
from fleetrun.model import Script
from fleetrun.rundir.variables import EXEC

# What people type for torchrun, mpirun, horovodrun, accelerate, deepspeed and srun.
_PROCESSES = "use --nproc_per_node: the number of processes on this host."
_MEETING = "write --master=HOST:PORT --nnodes=N, or name the hosts with --ips."
_ROWS = {
    "n np num_proc num_procs num_processes nprocs num_gpus ngpus ppn npernode": _PROCESSES,
    "ntasks_per_node ntasks gpus_per_node": _PROCESSES,
    "gpu_ids gpu_id device cuda_devices visible_devices": "use --gpus.",
    "node_rank machine_rank": "use --rank: this host's position in --ips.",
    "num_nodes num_machines nodes N": "use --nnodes: it follows from --ips, which names hosts.",
    "H host_list hostlist": "use --hosts: as a:8,b:8; they are reached by ssh.",
    "rdzv_endpoint rdzv_backend rdzv_conf master_addr main_process_ip": _MEETING,
    "rdzv_id": "use --job_id.",
    "master_port main_process_port": "use --start_port: one host finds free ports itself.",
    "standalone multi_gpu": "leave it out: a job is on this host alone, on all its devices.",
    "cpu use_cpu": "write --backend=gloo.",
    "mixed_precision": "use paddle.amp in the script.",
    "local_ranks_filter": "use --tee: the ranks that the console shows.",
    "r redirect enable_each_rank_log": "use --redirects: every rank has a log in --log_dir anyway.",
    "ssh_port": "write --ssh='ssh -p PORT'.",
    "x genv export": "write --env NAME=VALUE; every rank gets your exported variables anyway.",
    "max_restarts restarts": "use --max_restart.",
    "min_np max_np min_nodes max_nodes": "write --nnodes=MIN:MAX and --master=HOST:PORT.",
    "timeout": "use --hang_timeout: it ends a job after that many seconds without progress.",
    "v verbose": "write --log_level=debug.",
}
HINTS = {word: hint for words, hint in _ROWS.items() for word in words.split()}

# The names of other tools for commands of ours.
_COMMANDS = {
    **dict.fromkeys(("run", "launch", "start"), "train.py"),
    **dict.fromkeys(("list", "ls", "status", "jobs"), "ps"),
    **dict.fromkeys(("kill", "pkill", "halt", "cancel"), "stop"),
    "watch": "top",
    "check": "doctor",
    "tail": "logs",
    "test": "run_check",
    "version": "--version",
    "help": "--help",
}

# Options and variables of 1.0 and of Paddle that there are not; also as lines of a config file.
_GONE = {
    "enable_auto_mapping cluster_topo_path rank_mapping_path $PADDLE_RANK_MAPPING_PATH": (
        "write the addresses in --ips and the devices in --gpus in the order that you want."
    ),
    "auto_parallel_config auto_cluster_config auto_tuner_json $PADDLE_AUTO_PARALLEL_CONFIG "
    "$PADDLE_AUTO_CLUSTER": (
        f"for Paddle's own tuner, write `{EXEC}=off python -m paddle.distributed.launch`."
    ),
    "allreduce": "run `fleetrun --nproc_per_node=2 run_check`, or NCCL's all_reduce_perf.",
    "banner color log_max_files merge_tail port_check preload": "leave it out.",
    "ssh_fanout virtual_local_rank": "leave it out.",
    "debug": "let the script call debugpy.listen(PORT) and debugpy.wait_for_client().",
    "elastic_pre_hook": "run the command before fleetrun, or at the start of the script.",
    "exclude include": "name the hosts to use in --hosts, or in a file for --hostfile.",
    "from_manifest": "run the line `repeat` of that manifest.json in a shell.",
    "gather_logs ship": "let the hosts share the folder, or copy it by rsync.",
    "gloo_port": "write --http_port.",
    "gpu_memory_fraction": "set FLAGS_allocator_strategy=naive_best_fit and the fraction by --env.",
    "log_filter": "run `fleetrun logs -f --grep=REGEX` in another terminal.",
    "nccl": "write --env NCCL_NAME=VALUE.",
    "port_range": "write --start_port for the first of the ports.",
    "on_end webhook": "write `fleetrun ...; COMMAND $?`; log/latest/events.jsonl has the outcome.",
    "preflight": "run `fleetrun doctor` with the same options first.",
    "scaling": "launch on other numbers of devices, and compare by `fleetrun report A B`.",
    "stdin": "the rank that --tee shows reads a terminal, and the first one a pipe.",
    "toleration node_selector volcano": "add it to what `submit k8s` prints, or use --kueue.",
    "ui": "run `fleetrun top` or `fleetrun ui` in another terminal.",
}
GONE = {word: answer for words, answer in _GONE.items() for word in words.split()}


def refuse_gone(name: str, typed: str) -> None:
    """Raise UsageError if NAME is gone; TYPED is how it was written, and where."""
    if name in GONE:
        raise UsageError(f"{typed} is not in this version: {GONE[name]}")


def suggest(typed: str, names: Iterable[str], prefix: str = "--") -> str:
    """Return the end of a sentence: what to write instead of the unknown option TYPED."""
    name = typed.lstrip("-").replace("-", "_")
    if hint := HINTS.get(name) or HINTS.get(name.rstrip("0123456789")):  # -n4
        return f"; {hint}"
    otherwise = "`fleetrun --help=all` lists them all."
    if prefix and not typed.startswith("--"):
        otherwise = "for Python's own options write `fleetrun [options] python -u train.py`."
    return text.suggestion(name, names if len(name) > 1 else (), otherwise, prefix)


def refuse_mistaken(
    script: Script, options: Iterable[str], commands: Iterable[str], *, is_after_dashes: bool
) -> None:
    """Raise UsageError if SCRIPT is more likely one of OPTIONS or COMMANDS, or another tool's."""
    target = script.target
    taken = f'"{target}" is taken as the script: write'
    name, equals, _ = target.partition("=")
    if script.form == "module":
        if len(target.split()) > 1 or "/" in target or target.endswith((".py", ".ipynb")):
            problem = "a module's name has no slash, blank or .py; leave -m out for a file."
            raise UsageError(f"-m {target}: {problem}")
    elif target.isalpha() and not is_after_dashes:
        meant = _COMMANDS.get(target) or text.closest(target, commands, 0.8)
        if meant is not None:
            raise UsageError(
                f"there is no command {target}; did you mean `fleetrun {meant}`? "
                f"`fleetrun -- {target}` runs a program of that name."
            )
    elif equals and name.replace("-", "_") in options:
        raise UsageError(f"{taken} --{target}.")
    elif not os.path.exists(target) and (
        (not target[:1].isalpha() and target[:1] not in "./~_") or len(target.split()) > 1
    ):
        raise UsageError(
            f"{taken} options with two plain hyphens, lists with commas as in --gpus=0,1, and no "
            "blanks or quotation marks that are part of a word."
        )
