"""What is gone since 1.0, options and commands, and what to use instead; for one release."""

from __future__ import annotations

from fleetrun.errors import UsageError

# By their names, with underscores; also as lines of a config file.
OPTIONS = {
    "banner": "leave it out: launch.txt has Paddle's tables; --quiet prints no banner.",
    "elastic_pre_hook": "run the command before fleetrun, or at the start of the script.",
    "gloo_port": "write --http_port.",
    "log_max_files": "leave it out: --log_max_size keeps three older parts of each log.",
    "merge_tail": "leave it out: a last round of fewer than k_steps batches is dropped.",
    "port_check": "leave it out: hosts always check each other's ports.",
    "port_range": "write --start_port for the first of the ports.",
    "preload": "leave it out: a restart starts new processes.",
    "scaling": "launch with other numbers of devices, and compare the runs with `fleetrun report`.",
    "ui": "run `fleetrun top` or `fleetrun ui` in another terminal.",
    "ship": "copy the folder to the hosts first, as by `rsync -a ./ HOST:$PWD/`.",
    "install": "put `fleetrun exec` before the command.",
    "uninstall": "remove fleetrun-exec.pth from the site-packages of that environment.",
}
COMMANDS = {
    "on": "use `pdsh -w a,b COMMAND`, or clush.",
}


def refuse(name: str, typed: str, table: dict[str, str] = OPTIONS) -> None:
    """Raise UsageError if NAME of TABLE is gone; TYPED is how it was written, and where."""
    if name in table:
        raise UsageError(f"{typed} is gone: {table[name]}")
