"""`manifest.json` in the run directory: the provenance of a result, and how to reproduce it.

Schema 1; `fleetrun --from-manifest FILE` reads it. Written when the ranks have started, once more
when git has answered, in one step each time; only its owner may read it (mode 0600).

- `schema`: 1; goes up when a key changes its meaning or goes away.
- `command`: the words typed after `fleetrun`. No secret is among them: `hidden` lists the places
  (`at`) where one was, what stands `before` it in its word, and the `variable` it may come from.
- `cwd`, `python`: the folder of the launch, and the interpreter.
- `versions`: of `fleetrun`, `python`, `paddle` (package and version), `kernel`, `driver`; null is
  unknown.
- `git`: the `folder` of the script, its `commit` and `branch`, and whether a tracked file differs
  from it (`dirty`; null: the launch was over before git answered). Null outside of a repository.
- `job_id`, `mode`, `engine`, `generation`, `world_size`, `hosts` in rank order, `node_rank` (ours),
  `hostname`, `launcher_pid`.
- `started`: seconds since 1970; `started_utc` is the same to be read.
- `ranks`: for each of the job `rank`, `host` (its place in `hosts`) and `devices` (kind and id);
  for those on this host also the `cpus` it is bound to (empty: all); `role`, if not a trainer.
- `environment`: the `names` of all variables that the launcher had, and the `values` of those that
  planning and Paddle read (PADDLE_*, FLAGS_*, NCCL_*, ...), unless they are secret.
- `settings`: every option's `name`, `value` and `source`.
- `config`: the `path` of the config file and its `lines` that counted; null without a file. A
  line's secret is to come from its `variable`.
- `strategies`: for each preset or file of the strategy its `name`, its `knobs` (section, name,
  value, and where it was said), and the `hidden` variables whose values are secret.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from fleetrun.records import names, variables
from fleetrun.records.folder import Folder
from fleetrun.run.observers import Sink

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fleetrun.model import LaunchPlan, Request
    from fleetrun.run.loop import Waiting
    from fleetrun.sinks.git import GitStatus, Revision

# As the other chores of the run directory: when the ranks have had the processors for a while.
_AFTER_S = 0.4


class ManifestFile(Sink):
    """Writes the manifest of the launch of REQUEST, made in ENVIRON."""

    def __init__(
        self,
        plan: LaunchPlan,
        request: Request,
        environ: Mapping[str, str],
        folder: Folder | None = None,
        hide: Callable[[str], str] = str,
    ) -> None:
        self._plan = plan
        self._hide = hide
        self._folder = folder or Folder(os.path.join(plan.cwd, plan.run_dir))
        self._request = request
        self._environ = environ
        self._started = time.time()
        self._is_written = False
        self._question: GitStatus | None = None

    def open(self, waiting: Waiting) -> None:
        """Write a little after the ranks have started."""
        self._waiting = waiting
        waiting.alarm("manifest", time.monotonic() + _AFTER_S, self._begin)

    def close(self) -> None:
        """Write now what a short launch has not written yet."""
        if self._question is not None:
            self._question.close()
        if not self._is_written:
            self._write(self._read_revision())

    # Git ----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        revision = self._read_revision()
        self._write(revision)
        if revision is None:
            return
        from fleetrun.run.signals import defaults_for_children  # after the start
        from fleetrun.sinks.git import GitStatus

        own = self._plan.processes[0].env.get(variables.JOB) if self._plan.processes else None
        self._question = GitStatus(
            self._place(),
            self._waiting,
            self._on_answer,
            marker={} if own is None else {variables.JOB: own},
            default_signals=defaults_for_children(),
        )

    def _on_answer(self, revision: Revision | None) -> None:
        if revision is not None:
            self._write(revision)

    def _read_revision(self) -> Revision | None:
        from fleetrun.sinks import git  # the start is over when this runs

        return git.read(self._place())

    def _place(self) -> str:
        """Return the script's folder; ours for a module or a program of the system."""
        script = self._request.script
        is_here = script.form == "file" and ("/" in script.target or script.target.endswith(".py"))
        own = os.path.dirname(script.target) if is_here else ""
        return os.path.normpath(os.path.join(self._plan.cwd, own))

    # The file -----------------------------------------------------------------------------------

    def _write(self, revision: Revision | None) -> None:
        import json  # the start is over when this runs

        from fleetrun.plan import secrets

        document = secrets.everywhere(self._document(revision), self._hide)
        text = json.dumps(document, indent=1) + "\n"
        self._folder.write(names.MANIFEST, text)
        self._is_written = True

    def _document(self, revision: Revision | None) -> dict[str, object]:
        from fleetrun import manifest  # the start is over when this runs
        from fleetrun.plan import arguments, secrets

        plan, request = self._plan, self._request
        command, hidden = arguments.conceal(request.typed)
        system = os.uname()
        return {
            "schema": manifest.SCHEMA,
            "command": command,
            "hidden": [each._asdict() for each in hidden],
            "cwd": plan.cwd,
            "python": sys.executable,
            "versions": _versions(system.release),
            "git": None
            if revision is None
            else {
                "folder": self._place(),
                "commit": revision.commit,
                "branch": revision.branch,
                "dirty": revision.is_dirty,
            },
            "job_id": plan.job_id,
            "mode": plan.mode,
            "engine": plan.engine,
            "generation": plan.generation,
            "world_size": len(plan.ranks),
            "hosts": plan.nodes,
            "node_rank": plan.node_rank,
            "hostname": system.nodename,
            "launcher_pid": os.getpid(),
            "started": round(self._started, 3),
            "started_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started)),
            "ranks": self._ranks(),
            "environment": {
                "names": sorted(self._environ),
                "values": {
                    name: value
                    for name, value in sorted(self._environ.items())
                    if manifest.is_remembered(name) and secrets.redact(name, value) == value
                },
            },
            "settings": [setting._asdict() for setting in request.settings],
            "config": _config(request),
            "strategies": _strategies(request),
        }

    def _ranks(self) -> list[dict[str, object]]:
        cpus = {spec.rank: spec.cpus for spec in self._plan.processes if spec.rank is not None}
        return [
            {
                "rank": spec.rank,
                "host": spec.node_rank,
                "devices": [{"kind": device.kind, "id": device.id} for device in spec.devices],
                **({"cpus": cpus[spec]} if spec in cpus else {}),
                **({} if spec.role == "TRAINER" else {"role": spec.role}),
            }
            for spec in self._plan.ranks
        ]


def _config(request: Request) -> dict[str, object] | None:
    """Return the lines of the config file that took effect."""
    path = next((one.value for one in request.settings if one.name == "config"), "None")
    lines = []
    for setting in request.settings:
        if not setting.source.startswith(f"{path}:"):
            continue
        option, dot, key = setting.name.partition(".")
        chosen = dict(request.env if option == "env" else request.nccl)
        is_hidden = option != "set" and bool(dot) and chosen.get(key) != setting.value
        lines.append(
            {
                "option": option,
                "value": f"{key}={setting.value}" if dot else setting.value,
                "source": setting.source,
                "variable": key if is_hidden else None,
            }
        )
    sources = {one.source for one in request.settings if one.name == "config"}
    return None if sources <= {"default"} else {"path": path, "lines": lines}


def _strategies(request: Request) -> list[dict[str, object]]:
    """Return what each preset and file of the strategy said."""
    from fleetrun.plan import secrets  # the start is over when this runs

    found: list[dict[str, object]] = []
    for layer in request.strategy.layers if request.strategy is not None else ():
        hidden = [
            knob.name
            for knob in layer.knobs
            if secrets.redact(knob.name, str(knob.value)) != str(knob.value)
        ]
        knobs = [
            (
                knob.section,
                knob.name,
                secrets.HIDDEN if knob.name in hidden else knob.value,
                knob.source,
            )
            for knob in layer.knobs
        ]
        found.append({"name": layer.name, "knobs": knobs, "hidden": hidden})
    return found


def _versions(kernel: str) -> dict[str, str | None]:
    from fleetrun import __version__  # the start is over when this runs

    return {
        "fleetrun": __version__,
        "python": sys.version.partition(" ")[0],
        "paddle": _paddle(),
        "kernel": kernel,
        "driver": _driver(),
    }


def _paddle() -> str | None:
    """Return the name and version of the installed Paddle, as `paddlepaddle-gpu 3.3.1`."""
    # importlib.metadata would block the supervisor for 60 ms, and says the same.
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for name in names:
            if name.startswith("paddlepaddle") and name.endswith(".dist-info"):
                package, _, version = name.removesuffix(".dist-info").partition("-")
                return f"{package.replace('_', '-')} {version}"
    return None


def _driver() -> str | None:
    try:
        with open("/sys/module/nvidia/version", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None
