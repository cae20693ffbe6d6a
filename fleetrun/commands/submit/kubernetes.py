"""`fleetrun submit k8s`: an Indexed Job with what it needs, or Kubeflow's PaddleJob."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from fleetrun.commands import parser
from fleetrun.commands.submit import common
from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.printing import put
from fleetrun.records.variables import TOKEN, new_token

if TYPE_CHECKING:
    from collections.abc import Sequence

    Document = dict[str, Any]

WHAT = "submit k8s"
_QUANTITY = (
    re.compile(r"[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?"),
    "a quantity, as 8, 500m or 64Gi",
)
_QUEUE = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"), "the name of a queue"
# How the values of options are written.
_FORMS = {
    # A label of DNS (RFC 1035, as names of services are); names of pods add "-" and a number, which
    # have to fit into 63, too.
    "name": (
        re.compile(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?"),
        "small letters, digits and hyphens, a letter first, 52 at most",
    ),
    "cpus": _QUANTITY,
    "memory": _QUANTITY,
    "shm": _QUANTITY,
    "kueue": _QUEUE,
    "volcano": _QUEUE,
    "env": (re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL), "NAME=VALUE"),
    "volume": (re.compile(r"([a-z0-9][-a-z0-9.]*)=(/[^:\0]*)"), "CLAIM=/PATH"),
    "node_selector": (
        re.compile(r"[A-Za-z0-9][-A-Za-z0-9_./]*=([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?"),
        "a label, as pool=a100",
    ),
    "toleration": (
        re.compile(
            r"([A-Za-z0-9][-A-Za-z0-9_./]*)(=[-A-Za-z0-9_.]*)?"
            r"(:(NoSchedule|PreferNoSchedule|NoExecute))?"
        ),
        "KEY[=VALUE][:EFFECT]",
    ),
}
_SINGLE = (*("name", "image", "cpus", "memory", "shm", "namespace", "python", "kueue", "volcano"),)
# Where the hosts meet.
_PORT = 6070
_TEMPLATE = os.path.join(os.path.dirname(__file__), "kubernetes.yaml")
# In arguments Kubernetes replaces $(NAME), and takes $$ for a $.
_EXPANDED = re.compile(r"\$(?=[$(])")


class KubernetesJob(NamedTuple):
    """What is asked of Kubernetes."""

    name: str
    image: str
    nodes: int
    words: tuple[str, ...]
    # A fresh one for each job, by which its hosts know each other.
    token: str
    gpus: int = 0
    cpus: str | None = None
    memory: str | None = None
    shm: str = "16Gi"
    namespace: str | None = None
    python: str = "python"
    env: tuple[str, ...] = ()
    # A claim, and where it is mounted.
    volumes: tuple[tuple[str, str], ...] = ()
    # How many pods may fail before the job does; preempted ones do not count.
    retries: int = 0
    # KEY=VALUE of nodes, and the taints that pods tolerate: KEY[=VALUE][:EFFECT].
    node_selector: tuple[str, ...] = ()
    tolerations: tuple[str, ...] = ()
    # Seconds after its end until the job is deleted.
    ttl: int | None = None
    # The queue of Kueue or of Volcano from which all pods start at once.
    kueue: str | None = None
    volcano: str | None = None


def documents(job: KubernetesJob, kind: str = "job") -> tuple[Document, ...]:
    """Return the resources of JOB, those first that others need; KIND is job or paddlejob."""
    import yaml  # only to write

    with open(_TEMPLATE, encoding="utf-8") as file:
        template = yaml.safe_load(file)
    values = _values(job, kind)
    if kind == "paddlejob":
        names = ["secret", "paddlejob"]
    else:
        names = ["secret", "service", *([] if job.volcano is None else ["group"]), "job"]
    return tuple(_filled(template[name], values) for name in names)


def _filled(node: Any, values: Document) -> Any:  # noqa: ANN401 - YAML
    """Return NODE with VALUES for its words, without those of None and what has nothing else."""
    if isinstance(node, list):
        return [_filled(item, values) for item in node]
    if not isinstance(node, dict):
        return deepcopy(values[node[1:]]) if isinstance(node, str) and node[:1] == "$" else node
    filled = {key: _filled(value, values) for key, value in node.items()}
    return {key: value for key, value in filled.items() if value is not None} or None


def _values(job: KubernetesJob, kind: str) -> Document:
    """Return what stands in the template for JOB; None: nothing."""
    is_indexed = kind == "job"
    hosts = {
        "PADDLE_MASTER": f"{job.name}-0.{job.name}:{_PORT}",
        "PADDLE_NNODES": str(job.nodes),
        "PADDLE_JOB_ID": job.name,
    }
    own = dict(pair.split("=", 1) for pair in job.env)
    address = {"fieldRef": {"fieldPath": "status.podIP"}}
    token = {"secretKeyRef": {"name": f"{job.name}-token", "key": "token"}}
    claims = [(f"volume-{number}", *volume) for number, volume in enumerate(job.volumes)]
    amounts = {"nvidia.com/gpu": str(job.gpus or ""), "cpu": job.cpus, "memory": job.memory}
    words = (job.python, "-m", "fleetrun", *job.words)
    has_volcano = job.volcano is not None
    return {
        **{name: getattr(job, name) for name in _AS_THEY_ARE},
        "secret": f"{job.name}-token",
        "port": _PORT,
        "suspend": True if job.kueue else None,
        "failures": job.retries * job.nodes,
        "again": "OnFailure" if job.retries else "Never",
        "group": job.name if has_volcano else None,
        "gang": job.nodes if has_volcano else None,
        "scheduler": "volcano" if has_volcano else None,
        "selector": dict(label.split("=", 1) for label in job.node_selector) or None,
        "tolerations": [_toleration(taint) for taint in job.tolerations] or None,
        "command": [_EXPANDED.sub("$$", word) for word in words],
        "env": [
            *(_variable(name, value) for name, value in hosts.items() if is_indexed),
            {"name": "POD_IP", "valueFrom": address},
            {"name": TOKEN, "valueFrom": token},
            *(_variable(name, value) for name, value in own.items()),
        ],
        "mounts": [
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - it is one
            *({"name": name, "mountPath": path} for name, _, path in claims),
        ],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": job.shm}},
            *(
                {"name": name, "persistentVolumeClaim": {"claimName": claim}}
                for name, claim, _ in claims
            ),
        ],
        "limits": {name: amount for name, amount in amounts.items() if amount} or None,
        "subdomain": job.name if is_indexed else None,
        "restart": "Never" if is_indexed else None,
    }


_AS_THEY_ARE = (
    *("name", "namespace", "nodes", "image", "token", "ttl", "retries", "kueue", "volcano"),
)


def _variable(name: str, value: str) -> Document:
    return {"name": name, "value": value}


def _toleration(text: str) -> Document:
    """Return what a pod tolerates.

    >>> _toleration("nvidia.com/gpu:NoSchedule")
    {'key': 'nvidia.com/gpu', 'operator': 'Exists', 'effect': 'NoSchedule'}
    """
    taint, _, effect = text.partition(":")
    key, has_value, value = taint.partition("=")
    toleration = {"key": key, "operator": "Equal" if has_value else "Exists"}
    return (
        toleration
        | ({"value": value} if has_value else {})
        | ({"effect": effect} if effect else {})
    )


def text(found: Sequence[Document]) -> str:
    """Return FOUND as one file of YAML."""
    import yaml  # only to write

    return "---\n".join(yaml.safe_dump(one, sort_keys=False, width=100) for one in found)


def apply(found: Sequence[Document]) -> int:
    """Create what is FOUND by kubectl, first the job that the rest belongs to; return its code."""
    if shutil.which("kubectl") is None:
        raise EnvironmentFault(
            f"{WHAT}: there is no kubectl on this host; without --apply the resources are printed."
        )
    *others, job = found
    done = _kubectl("create", job, "-o", "json")
    if done.returncode:
        return done.returncode
    owner = {name: job[name] for name in ("apiVersion", "kind")}
    owner |= {"name": job["metadata"]["name"], "uid": json.loads(done.stdout)["metadata"]["uid"]}
    put(f"{job['kind'].lower()}/{owner['name']} created\n")
    for one in others:
        owned = {**one, "metadata": {**one["metadata"], "ownerReferences": [owner]}}
        done = _kubectl("create", owned)
        put(done.stdout)
        if done.returncode:
            # What belongs to it goes, too.
            _kubectl("delete", job, "--wait=false")
            return done.returncode
    return 0


def _kubectl(verb: str, document: Document, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["kubectl", verb, "-f", "-", *options]
    return subprocess.run(
        command, input=text([document]), stdout=subprocess.PIPE, text=True, check=False
    )


def _run(
    words: tuple[str, ...], *, kind: str, is_applied: bool, dry_run: bool, **fields: object
) -> int:
    parsed = common.launch(words, WHAT, fields["config"])
    if common.shown(parsed.words) != parsed.words:
        raise UsageError(
            f"{WHAT}: a word after -- is a secret, which all who may see the job would read: let "
            "the script take it from a variable of the image or of a Secret."
        )
    if is_applied and dry_run:
        raise UsageError(f"{WHAT}: --apply and --dry-run: give one of them.")
    if fields["image"] is None:
        raise UsageError(
            f"{WHAT}: give --image NAME, one that has Paddle, fleetrun and the script."
        )
    name = str(fields["name"] or common.name(parsed).lower().replace("_", "-"))
    given = {
        option: common.texts(value) if isinstance(value, tuple | list) else (str(value),)
        for option, value in {**fields, "name": name}.items()
        if value is not None
    }
    for option, (pattern, wanted) in _FORMS.items():
        for value in given.get(option, ()):
            if not pattern.fullmatch(value):
                shown = value.partition("=")[0] if option == "env" else value
                raise UsageError(f"{WHAT}: --{option}={shown}: give {wanted}.")
    for option in ("image", "namespace"):
        for value in given.get(option, ()):
            common.plain(WHAT, option, value)
    single = {option: values[0] for option, values in given.items() if option in _SINGLE}
    volumes = (volume.partition("=") for volume in given["volume"])
    job = KubernetesJob(
        **single,
        words=parsed.words,
        token=new_token(),
        nodes=common.number(fields["nodes"]) or 1,
        gpus=common.number(fields["gpus"]) or 0,
        retries=common.number(fields["retries"]) or 0,
        ttl=int(ttl) if isinstance(ttl := fields["ttl"], int | float) else None,
        env=given["env"],
        volumes=tuple((claim, path) for claim, _, path in volumes),
        node_selector=given["node_selector"],
        tolerations=given["toleration"],
    )
    if job.kueue is not None and job.volcano is not None:
        raise UsageError(f"{WHAT}: --kueue and --volcano: give one of them.")
    found = documents(job, kind)
    return apply(found) if is_applied else put(text(found))


command = common.QueueCommand(
    "k8s",
    help="Print the resources of a job (an Indexed Job with its service and token, or Kubeflow's "
    "PaddleJob), or create them by kubectl. ARGUMENTS are those of a launch without hosts: "
    "`fleetrun submit k8s --image NAME --nodes 4 --gpus 8 -- train.py`. What is always the same "
    "at a site may stand in fleetrun.yaml under `submit: k8s:`.",
    callback=_run,
    params=[
        parser.option(
            "image", "text", "The image: Paddle, fleetrun and the script.", metavar="NAME"
        ),
        parser.option("nodes", "int", "How many pods.", metavar="N", default="1", minimum=1),
        parser.option("gpus", "int", "GPUs of each pod.", metavar="N", minimum=0),
        parser.option("cpus", "text", "CPUs of each pod.", metavar="QUANTITY"),
        parser.option("memory", "text", "Memory of each pod.", metavar="QUANTITY"),
        parser.option(
            "shm", "text", "Size of /dev/shm, for data loaders.", metavar="QUANTITY", default="16Gi"
        ),
        parser.option("name", "text", "The job's name; the script's.", metavar="NAME"),
        parser.option("namespace", "text", "Kubernetes' namespace.", metavar="NAME"),
        parser.option(
            "kind",
            "choice",
            "Kubernetes' own Job, or Kubeflow's.",
            words=("job", "paddlejob"),
            default="job",
        ),
        parser.option(
            "retries", "int", "Attempts after a failure.", metavar="N", default="0", minimum=0
        ),
        common.repeatable("env", "A variable of the pods (repeatable).", "NAME=VALUE"),
        common.repeatable("volume", "Mount a claim (repeatable).", "CLAIM=/PATH"),
        common.repeatable(
            "node_selector", "Only nodes that have this label (repeatable).", "KEY=VALUE"
        ),
        common.repeatable(
            "toleration", "Also nodes with this taint (repeatable).", "KEY[=VALUE][:EFFECT]"
        ),
        parser.option(
            "ttl", "duration", "Delete the job so long after its end.", metavar="SECONDS", minimum=0
        ),
        parser.option("kueue", "text", "Kueue's queue for it.", metavar="QUEUE"),
        parser.option(
            "volcano", "text", "Volcano's queue for it; all pods start at once.", metavar="QUEUE"
        ),
        parser.option("python", "text", "Python in the image.", metavar="PATH", default="python"),
        click.Option(["--apply", "is_applied"], is_flag=True, help="Create it by kubectl."),
        click.Option(["--dry-run"], is_flag=True, help="Print the resources, as without --apply."),
        common.config(),
        common.command_line(),
    ],
)
