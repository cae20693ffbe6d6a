"""What to write instead of words of other launchers, and of words that are gone since 1.0; pure."""

from __future__ import annotations

from fleetrun.errors import UsageError

_PROCESSES = "use --nproc_per_node{}: the number of processes on this host."
_NODES = "use --nnodes{}: it follows from --ips, which names the hosts."
_MEET = "write --master=HOST:PORT and --nnodes=N, or name the hosts with --ips=A,B."
_ELASTIC = "write --nnodes=MIN:MAX, which counts hosts, and --master=HOST:PORT."

# What people type for torchrun, mpirun, horovodrun, accelerate, deepspeed and srun; {} is replaced
# by `=N` if a number follows.
_ROWS = {
    "n np num_proc num_procs num_processes nprocs num_gpus ngpus ppn npernode": _PROCESSES,
    "ntasks_per_node ntasks gpus_per_node procs_per_node slots slots_per_host": _PROCESSES,
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
    "standalone": "leave it out: a job is on this host alone unless --ips names others.",
    "module": "write -m package.module instead of the script.",
    "x genv export": "write --env NAME=VALUE; every rank gets your exported variables anyway.",
    "max_restarts restarts reset_limit": "use --max_restart{}.",
    "background bg daemon d nohup": "use --detach.",
    "timeout": "use --hang_timeout{}: it ends a job after that many seconds without progress.",
    "min_np max_np min_num_proc max_num_proc min_nodes max_nodes elastic_training": _ELASTIC,
    "r": "write --redirects: each rank's standard error goes to its own file.",
    "v verbose": "write --log_level=debug.",
    "q silent": "write --quiet.",
    "config_file f": "use --config.",
    "bind_to map_by cpu_bind": "write --bind=cores.",
}
HINTS = {word: hint for words, hint in _ROWS.items() for word in words.split()}

# The names of other tools for commands of ours.
COMMANDS = {
    **dict.fromkeys(("run", "launch", "start"), ""),
    **dict.fromkeys(("list", "ls", "status", "jobs"), "ps"),
    **dict.fromkeys(("kill", "pkill", "killall", "halt", "cancel", "terminate"), "stop"),
    **dict.fromkeys(("watch", "monitor"), "top"),
    **dict.fromkeys(("dashboard", "web"), "ui"),
    **dict.fromkeys(("check", "diagnose"), "doctor"),
    **dict.fromkeys(("strategies", "presets"), "strategy list"),
    "tail": "logs",
    "test": "run_check",
    "version": "--version",
}

# Gone since 1.0, by their names with underscores; also as lines of a config file.
GONE = {
    "pattern": "print `step 120 loss 0.5`, or write the step to the rank's heartbeat file.",
    "lines": "leave it out: `fleetrun attach` shows the last 8 KiB, `fleetrun logs` everything.",
    "apply": "pipe what `fleetrun submit k8s` prints into `kubectl create -f -`.",
    "banner": "leave it out: launch.txt has the settings; --quiet prints no banner.",
    "elastic_pre_hook": "run the command before fleetrun, or at the start of the script.",
    "exclude": "name the hosts to use in --hosts, or in a file for --hostfile.",
    "gather_logs": "let the hosts share a log folder, or copy theirs by rsync.",
    "gloo_port": "write --http_port.",
    "include": "name the hosts to use in --hosts, or in a file for --hostfile.",
    "log_max_files": "leave it out: --log_max_size keeps three older parts of each log.",
    "merge_tail": "leave it out: a last round of fewer than k_steps batches is dropped.",
    "port_check": "leave it out: hosts always check each other's ports.",
    "port_range": "write --start_port for the first of the ports.",
    "preload": "leave it out: a restart starts new processes.",
    "scaling": "launch with other numbers of devices, and compare the runs with `fleetrun report`.",
    "ui": "run `fleetrun top` or `fleetrun ui` in another terminal.",
    "webhook": "write `--on_end='curl -d @- URL'`.",
    "ship": "copy the folder to the hosts first, as by `rsync -a ./ HOST:$PWD/`.",
    "toleration": "add it to what `fleetrun submit k8s` prints, or use --kueue.",
    "node_selector": "add it to what `fleetrun submit k8s` prints, or use --kueue.",
    "volcano": "use --kueue, or add Volcano's PodGroup to what `fleetrun submit k8s` prints.",
    "install": "put `fleetrun exec` before the command.",
    "uninstall": "remove fleetrun-exec.pth from the site-packages of that environment.",
}
GONE_COMMANDS = {"on": "use `pdsh -w a,b COMMAND`, or clush."}


def refuse_gone(name: str, typed: str, table: dict[str, str] = GONE) -> None:
    """Raise UsageError if NAME of TABLE is gone; TYPED is how it was written, and where."""
    if name in table:
        raise UsageError(f"{typed} is gone: {table[name]}")


def hint(typed: str, value: str = "") -> str | None:
    """Return what to write instead of TYPED, another launcher's option, given VALUE.

    >>> hint("-np", "4")
    'use --nproc_per_node=4: the number of processes on this host.'
    >>> hint("-n4") == hint("-np", "4"), hint("--standalone")[:13], hint("--nonsense")
    (True, 'leave it out:', None)
    """
    name = typed.lstrip("-").replace("-", "_")
    sentence = HINTS.get(name)
    if sentence is None and not typed.startswith("--"):
        # -n4
        bare = name.rstrip("0123456789")
        value = name[len(bare) :]
        sentence = HINTS.get(bare) if value else None
    if sentence is None:
        return None
    # Repeat only numbers: the next word may be the script, or hold a secret.
    allowed = "0123456789" if sentence is _PROCESSES else "0123456789,"
    is_fit = value[:1].isdigit() and not value.strip(allowed)
    return sentence.format(f"={value}" if is_fit else "")
