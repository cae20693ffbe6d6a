"""`fleetrun submit k8s`: an Indexed Job with what it needs, or Kubeflow's PaddleJob."""

from __future__ import annotations

import json
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
_LABEL = re.compile(r"[A-Za-z0-9][-A-Za-z0-9_./]*=([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_TOLERATION = re.compile(
    r"([A-Za-z0-9][-A-Za-z0-9_./]*)(=[-A-Za-z0-9_.]*)?(:(NoSchedule|PreferNoSchedule|NoExecute))?"
)
_QUEUE = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
# Kueue's own label, and what Volcano looks for at pods.
_KUEUE = "kueue.x-k8s.io/queue-name"
_GROUP = "scheduling.k8s.io/group-name"
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
    if kind == "paddlejob":
        return _secret(job), _paddlejob(job)
    group = () if job.volcano is None else (_pod_group(job),)
    return _secret(job), _service(job), *group, _indexed(job)


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


def _pod_group(job: KubernetesJob) -> Document:
    """Let Volcano start all pods at once, or none."""
    return {
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "kind": "PodGroup",
        "metadata": _metadata(job),
        "spec": {"minMember": job.nodes, "queue": job.volcano},
    }


def _of_queue(job: KubernetesJob) -> Document:
    """Return the metadata of the resource that Kueue admits."""
    found = _metadata(job)
    if job.kueue is not None:
        found["labels"] = {**found["labels"], _KUEUE: job.kueue}
    return found


def _given(**fields: object) -> Document:
    """Return those of FIELDS that are said."""
    return {name: value for name, value in fields.items() if value is not None}


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
        "metadata": _of_queue(job),
        "spec": {
            # Kueue lets it begin when there is room for all pods.
            **_given(suspend=True if job.kueue else None, ttlSecondsAfterFinished=job.ttl),
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
    gang = None if job.volcano is None else {"minAvailable": job.nodes, "queue": job.volcano}
    worker = {
        "replicas": job.nodes,
        "restartPolicy": "OnFailure" if job.retries else "Never",
        "template": _template(job, []),
    }
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PaddleJob",
        "metadata": _of_queue(job),
        "spec": {
            "runPolicy": {
                "backoffLimit": job.retries,
                "cleanPodPolicy": "None",
                **_given(
                    suspend=True if job.kueue else None,
                    ttlSecondsAfterFinished=job.ttl,
                    schedulingPolicy=gang,
                ),
            },
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
        "command": [_EXPANDED.sub("$$", one) for one in (job.python, "-m", "fleetrun", *job.words)],
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
    selected = dict(one.split("=", 1) for one in job.node_selector)
    metadata: Document = {"labels": _labels(job)}
    if job.volcano is not None:
        metadata["annotations"] = {_GROUP: job.name}
    return {
        "metadata": metadata,
        "spec": {
            **_given(
                nodeSelector=selected or None,
                tolerations=[_toleration(one) for one in job.tolerations] or None,
                schedulerName=None if job.volcano is None else "volcano",
            ),
            "containers": [container],
            "terminationGracePeriodSeconds": _GRACE_S,
            "volumes": volumes,
        },
    }


def _toleration(text: str) -> Document:
    """Return what a pod tolerates.

    >>> _toleration("nvidia.com/gpu:NoSchedule")
    {'key': 'nvidia.com/gpu', 'operator': 'Exists', 'effect': 'NoSchedule'}
    """
    taint, _, effect = text.partition(":")
    key, has_value, value = taint.partition("=")
    found: Document = {"key": key, "operator": "Equal" if has_value else "Exists"}
    return {**found, **_given(value=value if has_value else None, effect=effect or None)}


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
    for option in ("kueue", "volcano"):
        if fields[option] is not None:
            _fits(option, str(fields[option]), _QUEUE, "the name of a queue")
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
        node_selector=_each(fields, "node_selector", _LABEL, "a label, as pool=a100"),
        tolerations=_each(fields, "toleration", _TOLERATION, "KEY[=VALUE][:EFFECT]"),
        ttl=common.number(fields["ttl"]),
        kueue=_text(fields, "kueue"),
        volcano=_text(fields, "volcano"),
    )
    if job.kueue is not None and job.volcano is not None:
        raise UsageError(f"{WHAT}: --kueue and --volcano: give one of them.")
    found = documents(job, kind)
    return apply(found) if is_applied else put(text(found))


def _each(
    fields: Mapping[str, object], name: str, pattern: re.Pattern[str], wanted: str
) -> tuple[str, ...]:
    """Return the values of the repeatable option NAME, each as PATTERN says."""
    values = common.texts(fields[name])
    for one in values:
        _fits(name, one, pattern, wanted)
    return values


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
        common.repeatable(
            "node_selector", "Only nodes that have this label (repeatable).", "KEY=VALUE"
        ),
        common.repeatable(
            "toleration", "Also nodes with this taint (repeatable).", "KEY[=VALUE][:EFFECT]"
        ),
        parser.option(
            "ttl", "int", "Delete the job so long after its end.", metavar="SECONDS", minimum=0
        ),
        parser.option("kueue", "text", "Kueue's queue for it.", metavar="QUEUE"),
        parser.option(
            "volcano", "text", "Volcano's queue for it; all pods start at once.", metavar="QUEUE"
        ),
        parser.option("python", "text", "Python in the image.", metavar="PATH", default="python"),
        click.Option(["--apply", "is_applied"], is_flag=True, help="Create it by kubectl."),
        common.config(),
        common.command_line(),
    ],
)
