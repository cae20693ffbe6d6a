"""What `fleetrun submit k8s` prints is what Kubernetes takes, and says what was asked for.

The schemas beside this file are those of Job, Service and Secret and of all that they refer to,
taken from the strict ones of the package kubernetes-validate 1.37.0 (PyPI, Apache-2.0), without
descriptions and status; like a server with strict validation, they know no other fields.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from commandline import fleetrun
from hypothesis import given
from hypothesis import strategies as st

from fleetrun import argv, cli
from fleetrun.commands.submit import kubernetes
from fleetrun.commands.submit.kubernetes import KubernetesJob

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

SCHEMAS = {
    path.stem: json.loads(path.read_text())
    for path in sorted((Path(__file__).parent / "kubernetes").glob("*.json"))
}
KINDS = {
    "Job": "io.k8s.api.batch.v1.Job",
    "Service": "io.k8s.api.core.v1.Service",
    "Secret": "io.k8s.api.core.v1.Secret",
    "PodTemplate": "io.k8s.api.core.v1.PodTemplateSpec",
}
TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}


def faults(value: object, schema: dict[str, Any], known: dict[str, Any], at: str = "") -> list[str]:
    """Return what SCHEMA, which may refer to what is KNOWN, has against VALUE."""
    if "$ref" in schema:
        return faults(value, known[schema["$ref"].rpartition("/")[2]], known, at)
    used = {"type", "properties", "required", "additionalProperties", "items", "oneOf", "enum"}
    assert set(schema) <= used | {"format", "minimum"}, schema
    if "oneOf" in schema:
        fitting = [one for one in schema["oneOf"] if not faults(value, one, known, at)]
        return [] if len(fitting) == 1 else [f"{at}: {value!r} is none of {schema['oneOf']}"]
    if not is_of(value, schema.get("type", list(TYPES))):
        return [f"{at}: {value!r} is no {schema['type']}"]
    found = []
    if "enum" in schema and value not in schema["enum"]:
        found = [f"{at}: {value!r} is not one of {schema['enum']}"]
    if isinstance(value, list):
        for place, one in enumerate(value):
            found += faults(one, schema.get("items", {}), known, f"{at}[{place}]")
    return found + (in_fields(value, schema, known, at) if isinstance(value, dict) else [])


def is_of(value: object, types: str | list[str]) -> bool:
    names = [types] if isinstance(types, str) else types
    if isinstance(value, bool):
        return "boolean" in names
    return any(isinstance(value, TYPES[name]) for name in names)


def in_fields(
    value: dict[str, Any], schema: dict[str, Any], known: dict[str, Any], at: str
) -> list[str]:
    """Return what SCHEMA has against the fields of VALUE."""
    properties, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
    found = [f"{at}: lacks {name}" for name in schema.get("required", ()) if name not in value]
    for name, one in value.items():
        if name in properties:
            found += faults(one, properties[name], known, f"{at}.{name}")
        elif rest is False:
            found.append(f"{at}: no field {name}")
        elif isinstance(rest, dict):
            found += faults(one, rest, known, f"{at}.{name}")
    return found


def check(document: dict[str, Any], version: str, kind: str | None = None) -> list[str]:
    known = SCHEMAS[version]
    return faults(document, known[KINDS[kind or document["kind"]]], known)


def loaded(text: str) -> Iterator[dict[str, Any]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    documents: Iterator[dict[str, Any]] = yaml.load_all(text, Loader=loader)
    return documents


def a_job(**fields: Any) -> KubernetesJob:
    return KubernetesJob("train", "registry/image:1", 4, ("train.py",), "t0ken")._replace(**fields)


FULL = {
    "gpus": 8,
    "cpus": "32",
    "memory": "256Gi",
    "namespace": "team",
    "env": ("A=1", "B=a=b c"),
    "volumes": (("data", "/data"),),
    "retries": 2,
}


def run(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return fleetrun("submit", "k8s", *words, folder=folder)


def test_the_schemas_are_real_and_refuse_what_is_wrong() -> None:
    assert sorted(SCHEMAS) == ["1.26.0", "1.31.0", "1.37.0"]
    for version in SCHEMAS:
        _, service, job = kubernetes.documents(a_job())
        service["spec"]["clusterIp"] = "None"
        job["spec"]["completions"] = "4"
        del job["spec"]["podFailurePolicy"]["rules"][0]["action"]
        job["spec"]["template"]["spec"]["containers"][0]["ports"][0]["containerPort"] = True
        assert check(service, version) == [".spec: no field clusterIp"]
        assert len(check(job, version)) == 3


@pytest.mark.parametrize("version", SCHEMAS)
@pytest.mark.parametrize("fields", [{}, FULL], ids=["plain", "full"])
def test_each_resource_is_valid_in_each_version(version: str, fields: dict[str, Any]) -> None:
    for document in loaded(kubernetes.text(kubernetes.documents(a_job(**fields)))):
        assert check(document, version) == []


@pytest.mark.parametrize("version", SCHEMAS)
def test_the_pods_of_kubeflows_job_are_valid_and_its_own_fields_known(version: str) -> None:
    secret, job = kubernetes.documents(a_job(**FULL), "paddlejob")
    assert check(secret, version) == []
    # kubeflow.org_paddlejobs.yaml of the training operator, 1.5 and later.
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PaddleJob")
    assert set(job["spec"]) == {"runPolicy", "paddleReplicaSpecs"}
    assert set(job["spec"]["runPolicy"]) == {"backoffLimit", "cleanPodPolicy"}
    assert list(job["spec"]["paddleReplicaSpecs"]) == ["Worker"]
    worker = job["spec"]["paddleReplicaSpecs"]["Worker"]
    assert set(worker) == {"replicas", "restartPolicy", "template"}
    assert check(worker["template"], version, "PodTemplate") == []
    container = worker["template"]["spec"]["containers"][0]
    # The operator looks for both names, and sets PADDLE_MASTER and PADDLE_NNODES itself.
    assert container["name"] == "paddle"
    assert container["ports"][0]["name"] == "master"
    assert {one["name"] for one in container["env"]} == {"POD_IP", "FLEETRUN_TOKEN", "A", "B"}


def test_pods_meet_at_the_first_by_a_name_that_the_service_gives() -> None:
    secret, service, job = kubernetes.documents(a_job())
    template = job["spec"]["template"]
    assert template["spec"]["subdomain"] == service["metadata"]["name"] == "train"
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert (service["spec"]["clusterIP"], job["spec"]["completionMode"]) == ("None", "Indexed")
    container = template["spec"]["containers"][0]
    told = {one["name"]: one.get("value") for one in container["env"]}
    assert told["PADDLE_MASTER"] == f"train-0.train:{service['spec']['ports'][0]['port']}"
    assert told["PADDLE_NNODES"] == "4"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 4
    reference = next(one for one in container["env"] if one["name"] == "FLEETRUN_TOKEN")
    assert reference["valueFrom"]["secretKeyRef"] == {"name": "train-token", "key": "token"}
    assert secret["stringData"] == {"token": "t0ken"}
    assert "t0ken" not in json.dumps(job)


def test_preemption_is_no_failure_and_usage_errors_are_final() -> None:
    rules = kubernetes.documents(a_job(retries=2))[2]["spec"]["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["Ignore", "FailJob"]
    assert rules[0]["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert rules[1]["onExitCodes"]["values"] == [2, 3]
    assert kubernetes.documents(a_job(retries=2))[2]["spec"]["backoffLimit"] == 8


@given(st.lists(st.text(min_size=1, max_size=20), max_size=5))
def test_words_arrive_as_they_were_given(args: list[str]) -> None:
    words = ("train.py", *args)
    *_, job = loaded(kubernetes.text(kubernetes.documents(a_job(words=words))))
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["python", "-m", "fleetrun", *words]
    parsed = argv.split(container["command"][3:])
    assert parsed.script is not None
    assert parsed.script.args == tuple(args)


def test_the_command_prints_what_is_asked_for_with_a_token_of_its_own(tmp_path: Path) -> None:
    words = ("--image=i:1", "--nodes=2", "--gpus=8", "--", "--strategy=comm_fusion", "my_train.py")
    first, second = (run(*words, folder=tmp_path) for _ in range(2))
    assert first.returncode == 0, first.stderr
    secret, _, job = loaded(first.stdout)
    assert job["metadata"]["name"] == "my-train"
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["command"][3:] == ["--strategy=comm_fusion", "my_train.py"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert next(loaded(second.stdout))["stringData"] != secret["stringData"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--", "train.py"), "give --image NAME"),
        (("--image=i",), "nothing to run"),
        (
            ("--image=i", "--", "--ips=a,b", "train.py"),
            "--ips is what the queue says; leave it out",
        ),
        (("--image=i", "--name=Big_Job", "--", "t.py"), "--name=Big_Job: give small letters"),
        # A service of that name would be refused, and the secret be there already.
        (("--image=i", "--", "3d_unet.py"), "--name=3d-unet: give small letters, digits and"),
        (("--image=i", "--memory=lots", "--", "t.py"), "--memory=lots: give a quantity"),
        (("--image=i", "--volume=data", "--", "t.py"), "--volume=data: give CLAIM=/PATH"),
        (("--image=i", "--env=1=2", "--", "t.py"), "--env=1: give NAME=VALUE"),
        (("--image=i", "--", "t.py", "--password=hunter2"), "a word after -- is a secret"),
        (("--image=i", "--", "--nporc=2", "t.py"), "no such option: --nporc"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["submit", "k8s", *words], environ={}) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
    assert "hunter2" not in err


def test_without_kubectl_nothing_is_applied(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["submit", "k8s", "--image=i", "--apply", "--", "t.py"], environ={}) == 3
    assert "there is no kubectl on this host" in capsys.readouterr().err


def test_kubectl_is_handed_what_would_be_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(
        f'#!/bin/sh\necho "$@" >{tmp_path}/words\n/bin/cat >{tmp_path}/file\nexit 4\n'
    )
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["submit", "k8s", "--image=i", "--apply", "--", "t.py"], environ={}) == 4
    assert (tmp_path / "words").read_text() == "create -f -\n"
    kinds = [one["kind"] for one in loaded((tmp_path / "file").read_text())]
    assert kinds == ["Secret", "Service", "Job"]
