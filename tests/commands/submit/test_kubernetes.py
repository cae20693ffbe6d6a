"""`fleetrun submit k8s` prints valid Kubernetes resources that request the given job.

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

from fleetrun.cli import app
from fleetrun.cli.argv import split
from fleetrun.commands.submit import kubernetes

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
    """Return the violations of SCHEMA, which may refer to KNOWN ones, in VALUE."""
    if "$ref" in schema:
        return faults(value, known[schema["$ref"].rpartition("/")[2]], known, at)
    used = {"type", "properties", "required", "additionalProperties", "items", "oneOf", "enum"}
    assert set(schema) <= used | {"format", "minimum"}, schema
    if "oneOf" in schema:
        fitting = [part for part in schema["oneOf"] if not faults(value, part, known, at)]
        return [] if len(fitting) == 1 else [f"{at}: {value!r} is none of {schema['oneOf']}"]
    if not is_of(value, schema.get("type", list(TYPES))):
        return [f"{at}: {value!r} is no {schema['type']}"]
    problems = []
    if "enum" in schema and value not in schema["enum"]:
        problems = [f"{at}: {value!r} is not one of {schema['enum']}"]
    if isinstance(value, list):
        for place, part in enumerate(value):
            problems += faults(part, schema.get("items", {}), known, f"{at}[{place}]")
    return problems + (in_fields(value, schema, known, at) if isinstance(value, dict) else [])


def is_of(value: object, types: str | list[str]) -> bool:
    names = [types] if isinstance(types, str) else types
    if isinstance(value, bool):
        return "boolean" in names
    return any(isinstance(value, TYPES[name]) for name in names)


def in_fields(
    value: dict[str, Any], schema: dict[str, Any], known: dict[str, Any], at: str
) -> list[str]:
    """Return the violations of SCHEMA in the fields of VALUE."""
    properties, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
    problems = [f"{at}: lacks {name}" for name in schema.get("required", ()) if name not in value]
    for name, part in value.items():
        if name in properties:
            problems += faults(part, properties[name], known, f"{at}.{name}")
        elif rest is False:
            problems.append(f"{at}: no field {name}")
        elif isinstance(rest, dict):
            problems += faults(part, rest, known, f"{at}.{name}")
    return problems


def check(document: dict[str, Any], version: str, kind: str | None = None) -> list[str]:
    known = SCHEMAS[version]
    return faults(document, known[KINDS[kind or document["kind"]]], known)


def loaded(text: str) -> Iterator[dict[str, Any]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    documents: Iterator[dict[str, Any]] = yaml.load_all(text, Loader=loader)
    return documents


def a_job(**fields: Any) -> dict[str, Any]:
    words = ["--name=train", "--image=registry/image:1", "--nodes=4", "--", "train.py"]
    context = kubernetes.command.make_context("k8s", words)
    return {**context.params, "token": "t0ken", **fields}


FULL = {
    "gpus": 8,
    "cpus": "32",
    "memory": "256Gi",
    "namespace": "team",
    "env": ("A=1", "B=a=b c"),
    "volume": ("data=/data",),
    "retries": 2,
    "node_selector": ("example.com/pool=a100", "zone="),
    "toleration": ("nvidia.com/gpu:NoSchedule", "team=ml:NoExecute", "spot"),
    "ttl": 600,
    "kueue": "team-queue",
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
    secret, job = kubernetes.documents(a_job(**FULL, kind="paddlejob"))
    assert check(secret, version) == []
    # kubeflow.org_paddlejobs.yaml of the training operator, 1.5 and later.
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PaddleJob")
    assert set(job["spec"]) == {"runPolicy", "paddleReplicaSpecs"}
    policy = {"backoffLimit", "cleanPodPolicy", "suspend", "ttlSecondsAfterFinished"}
    assert set(job["spec"]["runPolicy"]) == policy
    assert list(job["spec"]["paddleReplicaSpecs"]) == ["Worker"]
    worker = job["spec"]["paddleReplicaSpecs"]["Worker"]
    assert set(worker) == {"replicas", "restartPolicy", "template"}
    assert check(worker["template"], version, "PodTemplate") == []
    container = worker["template"]["spec"]["containers"][0]
    # The operator looks for both names, and sets PADDLE_MASTER and PADDLE_NNODES itself.
    assert container["name"] == "paddle"
    assert container["ports"][0]["name"] == "master"
    assert {variable["name"] for variable in container["env"]} == {
        "POD_IP",
        "FLEETRUN_TOKEN",
        "A",
        "B",
    }


def test_pods_meet_at_the_first_by_a_name_that_the_service_gives() -> None:
    secret, service, job = kubernetes.documents(a_job())
    template = job["spec"]["template"]
    assert template["spec"]["subdomain"] == service["metadata"]["name"] == "train"
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert (service["spec"]["clusterIP"], job["spec"]["completionMode"]) == ("None", "Indexed")
    container = template["spec"]["containers"][0]
    told = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert told["PADDLE_MASTER"] == f"train-0.train:{service['spec']['ports'][0]['port']}"
    assert told["PADDLE_NNODES"] == "4"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 4
    reference = next(
        variable for variable in container["env"] if variable["name"] == "FLEETRUN_TOKEN"
    )
    assert reference["valueFrom"]["secretKeyRef"] == {"name": "train-token", "key": "token"}
    assert secret["stringData"] == {"token": "t0ken"}
    assert "t0ken" not in json.dumps(job)


def test_preemption_is_no_failure_and_usage_errors_are_final() -> None:
    rules = kubernetes.documents(a_job(retries=2))[2]["spec"]["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["Ignore", "FailJob"]
    assert rules[0]["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert rules[1]["onExitCodes"]["values"] == [2, 3]
    assert kubernetes.documents(a_job(retries=2))[2]["spec"]["backoffLimit"] == 8


def expanded(text: str) -> str:
    """Expand an argument as Kubernetes does (third_party/forked/golang/expansion)."""
    expansion, at = "", 0
    while at < len(text):
        if text[at] != "$" or at + 1 == len(text):
            expansion, at = expansion + text[at], at + 1
        elif text[at + 1] == "$":
            expansion, at = expansion + "$", at + 2
        elif text[at + 1] == "(" and ")" in text[at:]:
            end = text.index(")", at)
            expansion, at = expansion + f"<{text[at + 2 : end]}>", end + 1
        else:
            expansion, at = expansion + text[at : at + 2], at + 2
    return expansion


ARGUMENTS = st.text(min_size=1, max_size=20) | st.text("$()A", min_size=1, max_size=12)


@given(st.lists(ARGUMENTS, max_size=5))
def test_words_arrive_as_they_were_given(args: list[str]) -> None:
    words = ("train.py", *args)
    *_, job = loaded(kubernetes.text(kubernetes.documents(a_job(words=words))))
    container = job["spec"]["template"]["spec"]["containers"][0]
    command = [expanded(word) for word in container["command"]]
    assert command == ["python", "-m", "fleetrun", *words]
    parsed = split(command[3:])
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
    ("words", "problem"),
    [
        (("--", "train.py"), "give --image NAME"),
        (("--image=i",), "nothing to run"),
        (
            ("--image=i", "--", "--ips=a,b", "train.py"),
            "--ips comes from the queue; leave it out",
        ),
        (("--image=i", "--name=Big_Job", "--", "t.py"), "--name=Big_Job: give small letters"),
        # A service of that name would be refused although the secret already exists.
        (("--image=i", "--", "3d_unet.py"), "--name=3d-unet: give small letters, digits and"),
        (("--image=i", "--memory=lots", "--", "t.py"), "--memory=lots: give a quantity"),
        (("--image=i", "--volume=data", "--", "t.py"), "--volume=data: give CLAIM=/PATH"),
        (("--image=i", "--env=1=2", "--", "t.py"), "--env=1=***: give NAME=VALUE"),
        (("--image=i", "--node_selector=a", "--", "t.py"), "--node_selector=a: give a label"),
        (("--image=i", "--toleration=a:Never", "--", "t.py"), "give KEY[=VALUE][:EFFECT]"),
        (("--image=i", "--kueue=a b", "--", "t.py"), "--kueue=a b: give the name of a queue"),
        (("--image=i", "--kueue=a", "--volcano=b", "--", "t.py"), "give one of them"),
        (("--image=i", "--", "t.py", "--password=hunter2"), "a word after -- is a secret"),
        (("--image=i", "--", "--nporc=2", "t.py"), "no such option: --nporc"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    words: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(["submit", "k8s", *words], environ={}) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert problem in err
    assert "hunter2" not in err


def test_pods_go_where_they_may_and_the_job_goes_after_its_time() -> None:
    *_, job = kubernetes.documents(a_job(**FULL))
    pods = job["spec"]["template"]["spec"]
    assert pods["nodeSelector"] == {"example.com/pool": "a100", "zone": ""}
    assert pods["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "team", "operator": "Equal", "value": "ml", "effect": "NoExecute"},
        {"key": "spot", "operator": "Exists"},
    ]
    assert job["spec"]["ttlSecondsAfterFinished"] == 600
    # Kueue looks for its label at the job, which waits until it is let in.
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-queue"
    assert job["spec"]["suspend"] is True


@pytest.mark.parametrize("version", SCHEMAS)
def test_volcano_starts_all_pods_at_once(version: str) -> None:
    secret, service, group, job = kubernetes.documents(a_job(volcano="default"))
    assert not [*check(secret, version), *check(service, version), *check(job, version)]
    # scheduling.volcano.sh_podgroups.yaml of Volcano.
    assert (group["apiVersion"], group["kind"]) == ("scheduling.volcano.sh/v1beta1", "PodGroup")
    assert group["spec"] == {"minMember": 4, "queue": "default"}
    template = job["spec"]["template"]
    assert template["spec"]["schedulerName"] == "volcano"
    assert template["metadata"]["annotations"] == {
        "scheduling.k8s.io/group-name": group["metadata"]["name"]
    }
    _, theirs = kubernetes.documents(a_job(volcano="default", kind="paddlejob"))
    policy = theirs["spec"]["runPolicy"]["schedulingPolicy"]
    assert policy == {"minAvailable": 4, "queue": "default"}


def test_the_sites_settings_of_a_queue_come_from_the_config_file(tmp_path: Path) -> None:
    (tmp_path / "fleetrun.yaml").write_text(
        "submit:\n  k8s:\n    image: i\n    ttl: 60\n    kueue: ours\n"
        "    toleration: [nvidia.com/gpu]\n    node_selector: {pool: a100}\n"
    )
    done = run("--node-selector=pool=h100", "--", "t.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    *_, job = loaded(done.stdout)
    pods = job["spec"]["template"]["spec"]
    assert pods["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert pods["nodeSelector"] == {"pool": "h100"}
    assert (job["spec"]["ttlSecondsAfterFinished"], job["spec"]["suspend"]) == (60, True)


def test_without_kubectl_nothing_is_applied(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert app.main(["submit", "k8s", "--image=i", "--apply", "--", "t.py"], environ={}) == 3
    assert "there is no kubectl on this host" in capsys.readouterr().err


# Keeps each file that it gets, and names a job as the server does.
KUBECTL = """#!/bin/sh
number=$(/bin/cat {folder}/number 2>/dev/null || echo 0)
echo $((number + 1)) >{folder}/number
echo "$@" >{folder}/words.$number
/bin/cat >{folder}/file.$number
[ $number != "$FAIL" ] || exit 4
case "$*" in *json*) echo '{{"metadata": {{"uid": "7-8-9"}}}}' ;; *) echo created ;; esac
"""


def applied(folder: Path, monkeypatch: pytest.MonkeyPatch, fail: str) -> int:
    """Return the code of a submission to a kubectl whose call number FAIL fails."""
    kubectl = folder / "kubectl"
    kubectl.write_text(KUBECTL.format(folder=folder))
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("FAIL", fail)
    return app.main(["submit", "k8s", "--image=i", "--apply", "--", "t.py"], environ={})


def handed(folder: Path, number: int) -> tuple[str, dict[str, Any]]:
    """Return the words of call NUMBER of kubectl, and the resource that it got."""
    (resource,) = loaded((folder / f"file.{number}").read_text())
    return (folder / f"words.{number}").read_text().strip(), resource


def test_what_a_job_needs_belongs_to_it_and_goes_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert applied(tmp_path, monkeypatch, "none") == 0
    assert [handed(tmp_path, number)[1]["kind"] for number in range(3)] == [
        *("Job", "Secret", "Service"),
    ]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "t", "uid": "7-8-9"}
    for number in (1, 2):
        words, resource = handed(tmp_path, number)
        assert (words, resource["metadata"]["ownerReferences"]) == ("create -f -", [owner])
        assert check(resource, "1.37.0") == []
    assert capsys.readouterr().out == "job/t created\ncreated\ncreated\n"


@pytest.mark.parametrize("fail", [0, 2])
def test_a_job_that_cannot_have_what_it_needs_is_not_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fail: int
) -> None:
    assert applied(tmp_path, monkeypatch, str(fail)) == 4
    if fail:
        words, resource = handed(tmp_path, 3)
        assert (words, resource["kind"]) == ("delete -f - --wait=false", "Job")
    else:
        assert not (tmp_path / "words.1").exists()


def test_a_dry_run_is_what_the_absence_of_apply_means(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["submit", "k8s", "--image=i", "--dry-run"]
    assert app.main([*words, "--", "t.py"], environ={}) == 0
    assert "kind: Job" in capsys.readouterr().out
    assert app.main([*words, "--apply", "--", "t.py"], environ={}) == 2
    assert "--apply and --dry-run: give one of them." in capsys.readouterr().err
