"""`fleetrun submit k8s`: an Indexed Job with what it needs, or Kubeflow's PaddleJob."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from fleetrun.commands import parser
from fleetrun.commands.submit import common
from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.printing import put
from fleetrun.records.variables import TOKEN, new_token

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Document = dict[str, Any]

WHAT = "submit k8s"
# A label of DNS (RFC 1035, as names of services are); names of pods add "-" and a number, which
# have to fit into 63, too.
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_VOLUME = re.compile(r"([a-z0-9][-a-z0-9.]*)=(/[^:\0]*)")
# Where the hosts meet. Kubeflow's operator knows it by the name of the container's port.
_PORT = 6070
_MASTER = "master"
# Kubeflow's operator finds the container by this name (its DefaultContainerName).
_CONTAINER = "paddle"
# Between fleetrun's --grace (10 s) and the kernel's KILL, for what comes after the ranks' end.
_GRACE_S = 60
# What another attempt cannot fix: usage, and a host that is not as the command needs it.
_NOT_RETRYABLE = (2, 3)
_GPU = "nvidia.com/gpu"


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


def documents(job: KubernetesJob, kind: str = "job") -> tuple[Document, ...]:
    """Return the resources of JOB, those first that others need; KIND is job or paddlejob."""
    if kind == "paddlejob":
        return _secret(job), _paddlejob(job)
    return _secret(job), _service(job), _indexed(job)


def _metadata(job: KubernetesJob, name: str | None = None) -> Document:
    found: Document = {"name": name or job.name, "labels": _labels(job)}
    if job.namespace:
        found["namespace"] = job.namespace
    return found


def _labels(job: KubernetesJob) -> Document:
    return {
        "app.kubernetes.io/name": "fleetrun",
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/managed-by": "fleetrun",
    }


def _secret(job: KubernetesJob) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(job, f"{job.name}-token"),
        "type": "Opaque",
        "stringData": {"token": job.token},
    }


def _service(job: KubernetesJob) -> Document:
    """Give each pod a name that the others can resolve: NAME-INDEX.NAME."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job),
        "spec": {
            "clusterIP": "None",
            # They look for each other before they are ready.
            "publishNotReadyAddresses": True,
            "selector": {"app.kubernetes.io/instance": job.name},
            "ports": [{"name": _MASTER, "port": _PORT}],
        },
    }


def _indexed(job: KubernetesJob) -> Document:
    env = [
        {"name": "PADDLE_MASTER", "value": f"{job.name}-0.{job.name}:{_PORT}"},
        {"name": "PADDLE_NNODES", "value": str(job.nodes)},
        {"name": "PADDLE_JOB_ID", "value": job.name},
    ]
    template = _template(job, env)
    template["spec"]["subdomain"] = job.name
    # With a failure policy pods are never restarted in place.
    template["spec"]["restartPolicy"] = "Never"
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(job),
        "spec": {
            "completionMode": "Indexed",
            "completions": job.nodes,
            "parallelism": job.nodes,
            # All hosts fail together, so each attempt counts once for each of them.
            "backoffLimit": job.retries * job.nodes,
            "podFailurePolicy": {
                "rules": [
                    # Preempted, drained, evicted: no failure of the job.
                    {
                        "action": "Ignore",
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    },
                    {
                        "action": "FailJob",
                        # The schema of 1.26 asks for it, and none is what is meant.
                        "onPodConditions": [],
                        "onExitCodes": {
                            "containerName": _CONTAINER,
                            "operator": "In",
                            "values": [*_NOT_RETRYABLE],
                        },
                    },
                ]
            },
            "template": template,
        },
    }


def _paddlejob(job: KubernetesJob) -> Document:
    """Return the resource of Kubeflow's training operator, which sets PADDLE_MASTER and NNODES."""
    worker = {
        "replicas": job.nodes,
        "restartPolicy": "OnFailure" if job.retries else "Never",
        "template": _template(job, []),
    }
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PaddleJob",
        "metadata": _metadata(job),
        "spec": {
            "runPolicy": {"backoffLimit": job.retries, "cleanPodPolicy": "None"},
            "paddleReplicaSpecs": {"Worker": worker},
        },
    }


def _template(job: KubernetesJob, env: Sequence[Document]) -> Document:
    """Return the pod of JOB, told ENV."""
    volumes: list[Document] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": job.shm}}
    ]
    mounts: list[Document] = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108 - it is one
    for number, (claim, path) in enumerate(job.volumes):
        volume = {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}}
        volumes.append(volume)
        mounts.append({"name": f"volume-{number}", "mountPath": path})
    amounts = {_GPU: str(job.gpus or ""), "cpu": job.cpus, "memory": job.memory}
    limits = {resource: amount for resource, amount in amounts.items() if amount}
    pairs = (one.partition("=") for one in job.env)
    container: Document = {
        "name": _CONTAINER,
        "image": job.image,
        "command": [job.python, "-m", "fleetrun", *job.words],
        "env": [
            *env,
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {
                "name": TOKEN,
                "valueFrom": {"secretKeyRef": {"name": f"{job.name}-token", "key": "token"}},
            },
            *({"name": key, "value": value} for key, _, value in pairs),
        ],
        "ports": [{"name": _MASTER, "containerPort": _PORT}],
        "volumeMounts": mounts,
    }
    if limits:
        container["resources"] = {"limits": limits, "requests": dict(limits)}
    return {
        "metadata": {"labels": _labels(job)},
        "spec": {
            "containers": [container],
            "terminationGracePeriodSeconds": _GRACE_S,
            "volumes": volumes,
        },
    }


def text(found: Sequence[Document]) -> str:
    """Return FOUND as one file of YAML."""
    import yaml  # only to write

    return "---\n".join(yaml.safe_dump(one, sort_keys=False, width=100) for one in found)


def apply(written: str) -> int:
    """Hand WRITTEN to kubectl, and return its exit code."""
    if shutil.which("kubectl") is None:
        raise EnvironmentFault(
            f"{WHAT}: there is no kubectl on this host; without --apply the resources are printed."
        )
    command = ["kubectl", "create", "-f", "-"]
    return subprocess.run(command, input=written, text=True, check=False).returncode


def _run(words: tuple[str, ...], *, kind: str, is_applied: bool, **fields: object) -> int:
    parsed = common.launch(words, WHAT, fields["config"])
    if common.shown(parsed.words) != parsed.words:
        raise UsageError(
            f"{WHAT}: a word after -- is a secret, which all who may see the job would read: let "
            "the script take it from a variable of the image or of a Secret."
        )
    if fields["image"] is None:
        raise UsageError(
            f"{WHAT}: give --image NAME, one that has Paddle, fleetrun and the script."
        )
    name = str(fields["name"] or common.name(parsed).lower().replace("_", "-"))
    _fits("name", name, _NAME, "small letters, digits and hyphens, a letter first, 52 at most")
    for option in ("cpus", "memory", "shm"):
        if fields[option] is not None:
            _fits(option, str(fields[option]), _QUANTITY, "a quantity, as 8, 500m or 64Gi")
    env = common.texts(fields["env"])
    for pair in env:
        _fits("env", pair, _VARIABLE, "NAME=VALUE")
    volumes = []
    for volume in common.texts(fields["volume"]):
        _fits("volume", volume, _VOLUME, "CLAIM=/PATH")
        claim, _, path = volume.partition("=")
        volumes.append((claim, path))
    namespace = fields["namespace"]
    job = KubernetesJob(
        name=name,
        image=common.plain(WHAT, "image", str(fields["image"])),
        nodes=common.number(fields["nodes"]) or 1,
        words=parsed.words,
        token=new_token(),
        gpus=common.number(fields["gpus"]) or 0,
        cpus=_text(fields, "cpus"),
        memory=_text(fields, "memory"),
        shm=str(fields["shm"]),
        namespace=None if namespace is None else common.plain(WHAT, "namespace", str(namespace)),
        python=str(fields["python"]),
        env=env,
        volumes=tuple(volumes),
        retries=common.number(fields["retries"]) or 0,
    )
    written = text(documents(job, kind))
    return apply(written) if is_applied else put(written)


def _text(fields: Mapping[str, object], name: str) -> str | None:
    return None if fields[name] is None else str(fields[name])


def _fits(option: str, value: str, pattern: re.Pattern[str], wanted: str) -> None:
    """Raise UsageError unless the whole VALUE of OPTION is as PATTERN says."""
    if not pattern.fullmatch(value):
        shown = value.partition("=")[0] if option == "env" else value
        raise UsageError(f"{WHAT}: --{option}={shown}: give {wanted}.")


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
        parser.option("python", "text", "Python in the image.", metavar="PATH", default="python"),
        click.Option(["--apply", "is_applied"], is_flag=True, help="Create it by kubectl."),
        common.config(),
        common.command_line(),
    ],
)
