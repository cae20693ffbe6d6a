"""`fleetrun submit k8s`: prints a JobSet with one pod for each host."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from fleetrun.cli import types
from fleetrun.commands.submit import common
from fleetrun.commands.submit.common import WORD, option
from fleetrun.errors import UsageError
from fleetrun.printing import put
from fleetrun.rundir import secrets
from fleetrun.rundir.variables import TOKEN, new_token

Document = dict[str, Any]

WHAT = "submit k8s"
# The name of the only job of the set, whose pods are NAME-host-0-INDEX.NAME.
_HOST = "host"
# The rendezvous port.
_PORT = 6070
# Between fleetrun's --grace (10 s) and the kernel's KILL, for what comes after the ranks' end.
_GRACE_S = 60
# Kubernetes expands $(NAME) in arguments, and takes $$ for a $.
_EXPANDED = re.compile(r"\$(?=[$(])")


def documents(given: Mapping[str, Any]) -> tuple[Document, ...]:
    """Return the JobSet of the job with the options GIVEN, and the Secret that it needs."""
    name, nodes = given["name"], given["nodes"]
    labels = {"app.kubernetes.io/name": "fleetrun", "app.kubernetes.io/instance": name}
    metadata = {"name": name, "labels": labels, "namespace": given["namespace"]}
    queue = {"kueue.x-k8s.io/queue-name": given["kueue"]} if given["kueue"] else {}
    disrupted = {"type": "DisruptionTarget", "status": "True"}
    rules = [
        # Preempted, drained, evicted: no failure of the job.
        {"action": "Ignore", "onPodConditions": [disrupted]},
        # What another attempt cannot fix: usage, and a host that is not as it should be.
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2, 3]}},
    ]
    job = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        # A host that fails ends the job on all hosts, so the whole set begins again, or nothing.
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": dict(labels)}, "spec": _pod(given)},
    }
    final = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    spec = {
        # Kueue lets it begin when there is room for all pods.
        "suspend": True if queue else None,
        "ttlSecondsAfterFinished": given["ttl"],
        "failurePolicy": {"maxRestarts": given["retries"], "rules": [final]},
        # Hosts look for each other before they are ready.
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": _HOST, "replicas": 1, "template": {"spec": job}}],
    }
    job_set = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "spec": spec}
    job_set["metadata"] = {**metadata, "labels": {**labels, **queue}}
    secret = {"apiVersion": "v1", "kind": "Secret", "stringData": {"token": given["token"]}}
    secret["metadata"] = {**metadata, "name": f"{name}-token"}
    return _without_none(job_set), _without_none(secret)


def _pod(given: Mapping[str, Any]) -> Document:
    """Return a pod, which is a host of the job."""
    name = given["name"]
    variables = {
        "PADDLE_MASTER": f"{name}-{_HOST}-0-0.{name}:{_PORT}",
        "PADDLE_NNODES": str(given["nodes"]),
        "PADDLE_JOB_ID": name,
        **dict(pair.split("=", 1) for pair in given["env"]),
    }
    gpus = str(given["gpus"]) if given["gpus"] else None
    limits = {"nvidia.com/gpu": gpus, "cpu": given["cpus"], "memory": given["memory"]}
    volumes = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": given["shm"]}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108 - it is one
    for number, pair in enumerate(given["volume"]):
        claim, path = pair.split("=", 1)
        volume = {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}}
        volumes.append(volume)
        mounts.append({"name": f"volume-{number}", "mountPath": path})
    secret = {"secretKeyRef": {"name": f"{name}-token", "key": "token"}}
    words = (given["python"], "-m", "fleetrun", *given["words"])
    container = {
        "name": "paddle",
        "image": given["image"],
        "command": [_EXPANDED.sub("$$", word) for word in words],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": TOKEN, "valueFrom": secret},
            *({"name": key, "value": value} for key, value in variables.items()),
        ],
        "volumeMounts": mounts,
        "resources": {"limits": limits},
    }
    return {
        "containers": [container],
        "terminationGracePeriodSeconds": _GRACE_S,
        "volumes": volumes,
        # With a failure policy, pods are never restarted in place.
        "restartPolicy": "Never",
    }


def _without_none(node: Any) -> Any:  # noqa: ANN401 - YAML
    """Return a copy of NODE without the fields that are None."""
    if isinstance(node, list):
        return list(map(_without_none, node))
    if isinstance(node, dict):
        return {key: _without_none(value) for key, value in node.items() if value is not None}
    return node


def _run(words: tuple[str, ...], *, dry_run: bool, **given: Any) -> int:  # noqa: ANN401, ARG001 - click's, and it is always dry
    parsed = common.launch(words, WHAT)
    if secrets.conceal(parsed.words) != parsed.words:
        raise UsageError(
            f"{WHAT}: a word after -- is a secret, which everyone who can see the job could read: "
            "let the script take it from a variable of the image or of a Secret."
        )
    if given["image"] is None:
        raise UsageError(f"{WHAT}: give --image NAME, with Paddle, fleetrun and the script.")
    name = given["name"] or common.name(parsed).lower().replace("_", "-")
    ttl = None if given["ttl"] is None else int(given["ttl"])
    own = {"name": name, "ttl": ttl, "words": parsed.words, "token": new_token()}
    resources = documents({**given, **own})
    return put(yaml.safe_dump_all(resources, sort_keys=False, width=100))


_is_claim = common.matching(r"[^=]+=/[^:\0]*", "give CLAIM=/PATH")
_claim = types.Type("texts", _is_claim)
command = common.QueueCommand(
    "k8s",
    short_help="Print the resources of a job.",
    help="Print a JobSet that runs the job with one pod for each host, and a Secret with its "
    "token, for `kubectl create -f -`, which checks them. ARGUMENTS are those of a launch without "
    "hosts: `fleetrun submit k8s --image NAME --nodes 4 --gpus 8 -- train.py`.",
    callback=_run,
    params=[
        option("nodes", types.number(1), "N", "Number of pods.", default="1"),
        option("gpus", types.number(0), "N", "GPUs per pod."),
        option("name", WORD, "NAME", "Job name.  [default: the script]"),
        option("image", WORD, "NAME", "Image with Paddle, fleetrun and the script."),
        option("cpus", WORD, "QUANTITY", "CPUs per pod."),
        option("memory", WORD, "QUANTITY", "Memory per pod."),
        option("namespace", WORD, "NAME", "Kubernetes namespace."),
        option("kueue", WORD, "QUEUE", "Kueue queue."),
        option("env", types.VARIABLE, "NAME=VALUE", "Variable of the pods (repeatable)."),
        option("volume", _claim, "CLAIM=/PATH", "Mount this claim (repeatable)."),
        option("shm", WORD, "QUANTITY", "Size of /dev/shm, for data loaders.", default="16Gi"),
        option("retries", types.number(0), "N", "Retries after a failure.", default="0"),
        option("ttl", types.seconds(0), "SECONDS", "Delete the job this long after its end."),
        option("python", WORD, "PATH", "Python in the image.", default="python"),
        option("dry_run", types.FLAG, "", "Print the resources (always)."),
        common.COMMAND_LINE,
    ],
)
