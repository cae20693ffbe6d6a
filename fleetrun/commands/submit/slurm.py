"""`fleetrun submit slurm`: a readable batch script, printed or submitted."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from string import Template
from typing import Any

from fleetrun import __version__
from fleetrun.cli import types
from fleetrun.commands.submit import common
from fleetrun.commands.submit.common import WORD, WORDS, option
from fleetrun.errors import EnvironmentFault
from fleetrun.host import probe, scripts
from fleetrun.printing import put, remark
from fleetrun.rundir import secrets
from fleetrun.rundir.variables import with_token

WHAT = "submit slurm"
_SCRIPT = Template("""\
#!/bin/bash
# Written by fleetrun $version.
#SBATCH --ntasks-per-node=1
$directives

${modules}${setup}cd $folder || exit
# One launcher per host starts the ranks there and ends with the job. The exit code is that of
# the rank that failed first: these options keep Slurm from ending the other launchers
# itself, which would hide that code.
${exec}srun $srun \\
    $command
$again""")
# Slurm 22.05 requeues a preempted job only if it had to kill it.
_AGAIN = """\
code=$?
# A preempted job that ends within the partition's GraceTime has failed for Slurm, and would
# not be requeued.
case "$code $(scontrol show job "$SLURM_JOB_ID")" in
143*PreemptTime=[0-9]*) scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit "$code"
"""
_DIRECTIVES = ("name", "nodes", "gpus", "cpus", "memory", "time", "partition", "account", "signal")
# sbatch's names of those that it calls otherwise.
_NAMES = {"name": "job-name", "gpus": "gpus-per-node", "cpus": "cpus-per-task", "memory": "mem"}


def script(given: Mapping[str, Any], words: Sequence[str], folder: str) -> str:
    """Return the script that runs `fleetrun WORDS` in FOLDER, by the options GIVEN."""
    directives = [f"{_NAMES.get(n, n)}={given[n]}" for n in _DIRECTIVES if given[n]]
    # A requeued job appends to the same file.
    directives += ["requeue", "open-mode=append"] if given["requeue"] else ["no-requeue"]
    directives += ["no-kill"] if given["no_kill"] else []
    directives += [directive.lstrip("-") for directive in given["sbatch"]]
    srun = ["--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=0"]
    # srun does not inherit it from the job since Slurm 22.05.
    srun += [f"--cpus-per-task={given['cpus']}"] if given["cpus"] else []
    srun += ["--no-kill"] if given["no_kill"] else []
    modules = given["module"]
    return _SCRIPT.substitute(
        version=__version__,
        directives="\n".join(f"#SBATCH --{directive}" for directive in directives),
        modules=f"module load {shlex.join(modules)} || exit\n" if modules else "",
        setup="".join(f"{line}\n" for line in given["setup"]),
        folder=shlex.quote(folder),
        exec="" if given["requeue"] else "exec ",
        srun=shlex.join(srun),
        command=shlex.join((given["python"] or sys.executable, "-m", "fleetrun", *words)),
        again=_AGAIN if given["requeue"] else "",
    )


def _run(words: tuple[str, ...], *, dry_run: bool, **given: Any) -> int:  # noqa: ANN401 - click's
    parsed = common.launch(words, WHAT, most=given["nodes"])
    given["name"] = given["name"] or _NAME.read(_NAME.given(common.name(parsed)))
    if dry_run:
        shown = secrets.conceal(parsed.words)
        if shown != parsed.words:
            remark("secret values are shown as ***; without --dry-run they are submitted.")
        return put(script(given, shown, probe.current_folder()))
    if shutil.which("sbatch") is None:
        raise EnvironmentFault(
            f"{WHAT}: there is no sbatch on this host; use a host with Slurm, or "
            "--dry-run's script there."
        )
    # The job runs in this folder, maybe tomorrow; other programs may be there only.
    is_python = parsed.script is not None and parsed.script.target.endswith(".py")
    if parsed.script is not None and is_python and not given["setup"]:
        scripts.find(parsed.script, probe.current_folder(), os.environ)
    text = script(given, parsed.words, probe.current_folder())
    # The environment, but not the script, is passed on unseen.
    env = with_token(os.environ)
    return subprocess.run(["sbatch"], input=text, text=True, check=False, env=env).returncode  # noqa: S607 - the user's own


_NAME = option("name", WORD, "NAME", "Job name.  [default: the script]")
_line = types.Type("texts", common.matching(r"[^\n\r]*", "give one line of shell"))
command = common.QueueCommand(
    "slurm",
    help="Write a batch script and submit it with sbatch. ARGUMENTS are those of a launch "
    "without hosts: `fleetrun submit slurm --nodes 4 --gpus 8 -- train.py`.",
    callback=_run,
    params=[
        _NAME,
        option("nodes", types.number(1), "N", "Number of hosts.", default="1"),
        option("gpus", types.number(0), "N", "GPUs per host."),
        option("cpus", types.number(1), "N", "CPUs per host."),
        option("time", WORD, "TIME", "Time limit as for sbatch: 12:00:00, 2-00 (days-hours)."),
        option("memory", WORD, "SIZE", "Memory per host: 64G; 0: all."),
        option("partition", WORD, "NAME", "Slurm partition."),
        option("account", WORD, "NAME", "Account to charge."),
        option("module", WORDS, "NAME", "Load this environment module (repeatable)."),
        option("sbatch", WORDS, "OPTION[=VALUE]", "Pass this option to sbatch (repeatable)."),
        option("setup", _line, "LINE", "Run this line before (repeatable)."),
        # TERM ends the ranks within --grace, USR1 is passed on to them.
        option("signal", WORD, "SIGNAL@SECONDS", "Send it so long before the time limit."),
        option("requeue", types.FLAG, "", "Requeue the job after preemption."),
        # With --nnodes=MIN:N after -- the job continues.
        option("no_kill", types.FLAG, "", "Keep the job if a host is lost."),
        option("python", WORD, "PATH", "Python on the hosts.  [default: this one]"),
        option("dry_run", types.FLAG, "", "Print the script without submitting it."),
        common.COMMAND_LINE,
    ],
)
