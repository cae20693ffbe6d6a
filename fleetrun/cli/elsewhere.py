"""Answers words that are not ours: those of other launchers, of other tools, and gone since 1.0."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from fleetrun import text
from fleetrun.errors import UsageError
from fleetrun.model import Script

_PROCESSES = "use --nproc_per_node{}: the number of processes on this host."
_NODES = "use --nnodes{}: it follows from --ips, which names the hosts."
_MEET = "write --master=HOST:PORT and --nnodes=N, or name the hosts with --ips=A,B."

# What people type for torchrun, mpirun, horovodrun, accelerate, deepspeed and srun; {} is replaced
# by `=N` if a number follows.
_ROWS = {
    "n np num_proc num_procs num_processes nprocs num_gpus ngpus ppn npernode": _PROCESSES,
    "ntasks_per_node ntasks gpus_per_node procs_per_node slots": _PROCESSES,
    "gpu_ids gpu_id device cuda_devices visible_devices i": "use --gpus{}.",
    "node_rank machine_rank": "use --rank{}: this host's position in --ips.",
    "num_nodes num_machines nodes N num_hosts": _NODES,
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
    "max_restarts restarts": "use --max_restart{}.",
    "min_np max_np min_nodes max_nodes": "write --nnodes=MIN:MAX and --master=HOST:PORT.",
    "timeout": "use --hang_timeout{}: it ends a job after that many seconds without progress.",
    "v verbose": "write --log_level=debug.",
    "config_file f": "use --config.",
}
HINTS = {word: hint for words, hint in _ROWS.items() for word in words.split()}

# The names of other tools for commands of ours.
COMMANDS = {
    **dict.fromkeys(("run", "launch", "start"), ""),
    **dict.fromkeys(("list", "ls", "status", "jobs"), "ps"),
    **dict.fromkeys(("kill", "pkill", "halt", "cancel"), "stop"),
    **dict.fromkeys(("watch", "monitor"), "top"),
    **dict.fromkeys(("strategies", "presets"), "strategy list"),
    "check": "doctor",
    "tail": "logs",
    "test": "run_check",
    "version": "--version",
    "help": "--help",
}

# Gone since 1.0, by their names with underscores; also as lines of a config file.
GONE = {
    "pattern": "print `step 120 loss 0.5`, or write the step to the rank's heartbeat file.",
    "lines": "leave it out: `fleetrun attach` shows the last 8 KiB, `fleetrun logs` everything.",
    "apply": "pipe what `fleetrun submit k8s` prints into `kubectl create -f -`.",
    "banner": "leave it out: launch.txt has the settings; --quiet prints no banner.",
    "color": "leave it out: fleetrun's own lines have no colours.",
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
    "stdin": "the rank that --tee shows reads a terminal, and the first one a pipe.",
    "on_end": "write `fleetrun ...; COMMAND $?`; log/latest/events.jsonl ends with how it ended.",
    "webhook": "write `fleetrun ...; curl -d $? URL`.",
    "ship": "copy the folder to the hosts first, as by `rsync -a ./ HOST:$PWD/`.",
    "toleration": "add it to what `fleetrun submit k8s` prints, or use --kueue.",
    "node_selector": "add it to what `fleetrun submit k8s` prints, or use --kueue.",
    "volcano": "use --kueue, or add Volcano's PodGroup to what `fleetrun submit k8s` prints.",
    "install": "put `fleetrun exec` before the command.",
    "uninstall": "remove fleetrun-exec.pth from the site-packages of that environment.",
}
GONE_COMMANDS = {"on": "use `pdsh -w a,b COMMAND`, or clush."}


def refuse_gone(name: str, typed: str, table: Mapping[str, str] = GONE) -> None:
    """Raise UsageError if NAME of TABLE is gone; TYPED is how it was written, and where."""
    if name in table:
        raise UsageError(f"{typed} is gone: {table[name]}")


def suggest(typed: str, names: Iterable[str], prefix: str = "--", value: str = "") -> str:
    """Return the end of a sentence: what to write instead of the unknown option TYPED, with VALUE.

    >>> suggest("-np", (), value="4")
    '; use --nproc_per_node=4: the number of processes on this host.'
    >>> suggest("--nporc_per_node", ["nproc_per_node"])
    '; did you mean --nproc_per_node?'
    """
    name = typed.lstrip("-").replace("-", "_")
    bare = name.rstrip("0123456789")
    if name not in HINTS and bare in HINTS and prefix and not typed.startswith("--"):
        name, value = bare, name[len(bare) :]  # -n4
    if name in HINTS:
        # Repeat only numbers: the next word may be the script, or hold a secret.
        is_fit = value and not value.strip("0123456789")
        return f"; {HINTS[name].format(f'={value}' if is_fit else '')}"
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
    if script.form == "module":
        if len(target.split()) > 1 or "/" in target or target.endswith((".py", ".ipynb")):
            problem = "a module's name has no slash, blank or .py; leave -m out for a file."
            raise UsageError(f"-m {target}: {problem}")
    elif target.isalpha() and not is_after_dashes:
        _refuse_command(script, commands)
    elif not os.path.exists(target):
        name, equals, _ = target.partition("=")
        if equals and name.replace("-", "_") in options:
            raise UsageError(f"{taken} --{target}.")
        if equals and name.isidentifier() and name.isupper():
            raise UsageError(f"{taken} --env {target} for a variable of ranks.")
        if (not target[:1].isalnum() and target[:1] not in "./~_") or len(target.split()) > 1:
            raise UsageError(
                f"{taken} an option with two plain hyphens, and neither options nor the script "
                "with blanks or quotation marks that are part of them."
            )
        if not target.strip("0123456789,.-"):
            raise UsageError(f"{taken} lists with commas and without blanks, as in --gpus=0,1.")


def _refuse_command(script: Script, commands: Iterable[str]) -> None:
    """Raise UsageError if SCRIPT is nearly one of COMMANDS, or another tool's: it hardly trains."""
    word = script.target
    refuse_gone(word, f"fleetrun {word}", GONE_COMMANDS)
    meant = COMMANDS.get(word, text.closest(word, commands, 0.8))
    if meant is not None:
        instead = f"fleetrun {meant}" if meant else "fleetrun train.py"
        raise UsageError(
            f"there is no command {word}; did you mean `{instead}`? "
            f"`fleetrun -- {word}` runs a program of that name."
        )
