"""`fleetrun submit k8s`: creates an Indexed Job with its resources, or Kubeflow's PaddleJob."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import click
import yaml

from fleetrun.cli import parser
from fleetrun.commands.submit import common
from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.printing import put
from fleetrun.rundir.variables import TOKEN, new_token

Document = dict[str, Any]

WHAT = "submit k8s"
# The syntax of option values.
_quantity = common.matching(
    r"[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?", "give a quantity, as 8, 500m or 64Gi"
)
_queue = common.matching(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", "give the name of a queue")
# A DNS label (RFC 1035, as service names are); pod names add "-" and a number, within 63
# characters.
_dns_label = common.matching(
    r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?",
    "give small letters, digits and hyphens, a letter first, 52 at most",
)
_variable = common.matching(r"[A-Za-z_][A-Za-z0-9_]*=.*", "give NAME=VALUE")
_volume = common.matching(r"([a-z0-9][-a-z0-9.]*)=(/[^:\0]*)", "give CLAIM=/PATH")
_label = common.matching(
    r"[A-Za-z0-9][-A-Za-z0-9_./]*=([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?",
    "give a label, as pool=a100",
)
_taint = common.matching(
    r"([A-Za-z0-9][-A-Za-z0-9_./]*)(=[-A-Za-z0-9_.]*)?"
    r"(:(NoSchedule|PreferNoSchedule|NoExecute))?",
    "give KEY[=VALUE][:EFFECT]",
)
# The rendezvous port.
_PORT = 6070
_TEMPLATE = os.path.join(os.path.dirname(__file__), "kubernetes.yaml")
# Kubernetes expands $(NAME) in arguments, and takes $$ for a $.
_EXPANDED = re.compile(r"\$(?=[$(])")


def documents(given: Mapping[str, Any]) -> tuple[Document, ...]:
    """Return the resources of the job with the options GIVEN, dependencies first."""
    with open(_TEMPLATE, encoding="utf-8") as file:
        template = yaml.safe_load(file)
    values = _values(given)
    if given["kind"] == "paddlejob":
        names = ["secret", "paddlejob"]
    else:
        names = ["secret", "service", *(["group"] if given["volcano"] else []), "job"]
    return tuple(_filled(template[name], values) for name in names)


def _filled(node: Any, values: Document) -> Any:  # noqa: ANN401 - YAML
    """Return NODE with VALUES substituted, without entries that are None or empty."""
    if isinstance(node, list):
        return [_filled(item, values) for item in node]
    if not isinstance(node, dict):
        return deepcopy(values[node[1:]]) if isinstance(node, str) and node[:1] == "$" else node
    filled = {key: _filled(value, values) for key, value in node.items()}
    return {key: value for key, value in filled.items() if value is not None} or None


def _values(given: Mapping[str, Any]) -> Document:
    """Return the values of the template for the options GIVEN; None: omit the entry."""
    name, nodes, retries, volcano = (given[key] for key in ("name", "nodes", "retries", "volcano"))
    is_indexed = given["kind"] == "job"
    hosts = {
        "PADDLE_MASTER": f"{name}-0.{name}:{_PORT}",
        "PADDLE_NNODES": str(nodes),
        "PADDLE_JOB_ID": name,
    }
    own = dict(pair.split("=", 1) for pair in given["env"])
    address = {"fieldRef": {"fieldPath": "status.podIP"}}
    token = {"secretKeyRef": {"name": f"{name}-token", "key": "token"}}
    claims = [
        (f"volume-{number}", *volume.split("=", 1)) for number, volume in enumerate(given["volume"])
    ]
    amounts = {
        "nvidia.com/gpu": str(given["gpus"] or ""),
        "cpu": given["cpus"],
        "memory": given["memory"],
    }
    words = (given["python"], "-m", "fleetrun", *given["words"])
    return {
        **given,
        "secret": f"{name}-token",
        "port": _PORT,
        "suspend": True if given["kueue"] else None,
        "failures": retries * nodes,
        "again": "OnFailure" if retries else "Never",
        "group": name if volcano else None,
        "gang": nodes if volcano else None,
        "scheduler": "volcano" if volcano else None,
        "selector": dict(label.split("=", 1) for label in given["node_selector"]) or None,
        "tolerations": [_toleration(taint) for taint in given["toleration"]] or None,
        "command": [_EXPANDED.sub("$$", word) for word in words],
        "env": [
            *(_entry(name, value) for name, value in hosts.items() if is_indexed),
            {"name": "POD_IP", "valueFrom": address},
            {"name": TOKEN, "valueFrom": token},
            *(_entry(name, value) for name, value in own.items()),
        ],
        "mounts": [
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - it is one
            *({"name": volume, "mountPath": path} for volume, _, path in claims),
        ],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": given["shm"]}},
            *(
                {"name": volume, "persistentVolumeClaim": {"claimName": claim}}
                for volume, claim, _ in claims
            ),
        ],
        "limits": {key: amount for key, amount in amounts.items() if amount} or None,
        "subdomain": name if is_indexed else None,
        "restart": "Never" if is_indexed else None,
    }


def _entry(name: str, value: str) -> Document:
    return {"name": name, "value": value}


def _toleration(text: str) -> Document:
    """Return the toleration for a taint.

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


def text(resources: Sequence[Document]) -> str:
    """Return RESOURCES as one YAML file."""
    return "---\n".join(
        yaml.safe_dump(resource, sort_keys=False, width=100) for resource in resources
    )


def apply(resources: Sequence[Document]) -> int:
    """Create RESOURCES with kubectl, the owning job first; return its exit code."""
    if shutil.which("kubectl") is None:
        raise EnvironmentFault(
            f"{WHAT}: there is no kubectl on this host; without --apply the resources are printed."
        )
    *owned_resources, job = resources
    done = _kubectl("create", job, "-o", "json")
    if done.returncode:
        return done.returncode
    owner = {name: job[name] for name in ("apiVersion", "kind")}
    owner |= {"name": job["metadata"]["name"], "uid": json.loads(done.stdout)["metadata"]["uid"]}
    put(f"{job['kind'].lower()}/{owner['name']} created\n")
    for resource in owned_resources:
        owned = {**resource, "metadata": {**resource["metadata"], "ownerReferences": [owner]}}
        done = _kubectl("create", owned)
        put(done.stdout)
        if done.returncode:
            # The resources that it owns are deleted, too.
            _kubectl("delete", job, "--wait=false")
            return done.returncode
    return 0


def _kubectl(verb: str, document: Document, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["kubectl", verb, "-f", "-", *options]
    return subprocess.run(
        command, input=text([document]), stdout=subprocess.PIPE, text=True, check=False
    )


def _run(words: tuple[str, ...], *, is_applied: bool, dry_run: bool, **given: Any) -> int:  # noqa: ANN401 - click's
    parsed = common.launch(words, WHAT, given["config"])
    if common.shown(parsed.words) != parsed.words:
        raise UsageError(
            f"{WHAT}: a word after -- is a secret, which everyone who can see the job could read: "
            "let the script take it from a variable of the image or of a Secret."
        )
    if is_applied and dry_run:
        raise UsageError(f"{WHAT}: --apply and --dry-run: give one of them.")
    if given["image"] is None:
        raise UsageError(
            f"{WHAT}: give --image NAME, one that has Paddle, fleetrun and the script."
        )
    if given["kueue"] and given["volcano"]:
        raise UsageError(f"{WHAT}: --kueue and --volcano: give one of them.")
    name = given["name"] or parser.value(_NAME, common.name(parsed).lower().replace("_", "-"))
    ttl = None if given["ttl"] is None else int(given["ttl"])
    own = {"name": name, "ttl": ttl, "words": parsed.words, "token": new_token()}
    resources = documents({**given, **own})
    return apply(resources) if is_applied else put(text(resources))


_NAME = parser.option(
    "name", "text", "Job name.  [default: the script]", metavar="NAME", reader=_dns_label
)
command = common.QueueCommand(
    "k8s",
    short_help="Print the resources of a job, or create them.",
    help="Print the resources of a job (an Indexed Job with its service and token, or a "
    "PaddleJob of Kubeflow), or create them with kubectl. ARGUMENTS are those of a launch "
    "without hosts: `fleetrun submit k8s --image NAME --nodes 4 --gpus 8 -- train.py`. Put the "
    "options that never change at your site into fleetrun.yaml under `submit: k8s:`.",
    callback=_run,
    params=[
        parser.option("nodes", "int", "Number of pods.", metavar="N", default="1", minimum=1),
        parser.option("gpus", "int", "GPUs per pod.", metavar="N", minimum=0),
        _NAME,
        *(
            parser.option(name, kind, text, metavar=metavar, reader=reader)
            for name, kind, metavar, reader, text in (
                (
                    "image",
                    "text",
                    "NAME",
                    common.word,
                    "Image with Paddle, fleetrun and the script.",
                ),
                ("cpus", "text", "QUANTITY", _quantity, "CPUs per pod."),
                ("memory", "text", "QUANTITY", _quantity, "Memory per pod."),
                ("namespace", "text", "NAME", common.word, "Kubernetes namespace."),
                ("kueue", "text", "QUEUE", _queue, "Kueue queue."),
                ("volcano", "text", "QUEUE", _queue, "Volcano queue; all pods start together."),
                ("env", "pairs", "NAME=VALUE", _variable, "Variable of the pods (repeatable)."),
                (
                    "volume",
                    "texts",
                    "CLAIM=/PATH",
                    _volume,
                    "Mount this volume claim (repeatable).",
                ),
                (
                    "toleration",
                    "texts",
                    "KEY[=VALUE][:EFFECT]",
                    _taint,
                    "Tolerate this taint of nodes (repeatable).",
                ),
            )
        ),
        parser.option(
            "node_selector",
            "texts",
            "Use only nodes with this label (repeatable).",
            metavar="KEY=VALUE",
            aliases=("node-selector",),
            reader=_label,
        ),
        parser.option(
            "shm",
            "text",
            "Size of /dev/shm, for data loaders.",
            metavar="QUANTITY",
            default="16Gi",
            reader=_quantity,
        ),
        parser.option(
            "kind",
            "choice",
            "A Kubernetes Job, or a PaddleJob of Kubeflow.",
            words=("job", "paddlejob"),
            default="job",
        ),
        parser.option(
            "retries", "int", "Retries after a failure.", metavar="N", default="0", minimum=0
        ),
        parser.option(
            "ttl",
            "duration",
            "Delete the job this long after it ends.",
            metavar="SECONDS",
            minimum=0,
        ),
        parser.option("python", "text", "Python in the image.", metavar="PATH", default="python"),
        click.Option(
            ["--apply", "is_applied"], is_flag=True, help="Create the resources with kubectl."
        ),
        parser.option("dry_run", "flag", "Print the resources (the default).", in_file=False),
        common.config(),
        common.command_line(),
    ],
)
