"""`fleetrun submit k8s` prints the JobSet that the options ask for."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fleetrun.cli import app
from fleetrun.cli.argv import split
from fleetrun.commands.submit import kubernetes

OPTIONS = (
    *("--nodes=4", "--gpus=8", "--cpus=32", "--memory=256Gi", "--namespace=team", "--ttl=10m"),
    *("--env=A=1", "--env=B=a=b c", "--volume=data=/data", "--retries=2", "--kueue=team-queue"),
)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    """Return the resources that `fleetrun submit k8s WORDS` prints."""
    code = app.main(["submit", "k8s", *words], environ={})
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return [*yaml.safe_load_all(out)]


def job_of(job_set: dict[str, Any]) -> dict[str, Any]:
    job: dict[str, Any] = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    return job


def test_the_set_says_all_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    job_set, secret = printed(capsys, "--image=i:1", *OPTIONS, "--", "--tee", "my_train.py")
    assert (job_set["apiVersion"], job_set["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert (job_set["metadata"]["name"], job_set["metadata"]["namespace"]) == ("my-train", "team")
    # Kueue looks for its label at the set, which waits until it is let in.
    assert job_set["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-queue"
    assert (job_set["spec"]["suspend"], job_set["spec"]["ttlSecondsAfterFinished"]) == (True, 600)
    job = job_of(job_set)
    assert job["completions"] == job["parallelism"] == 4
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["python", "-m", "fleetrun", "--tee", "my_train.py"]
    limits = {"nvidia.com/gpu": "8", "cpu": "32", "memory": "256Gi"}
    assert container["resources"] == {"limits": limits}
    assert pod["volumes"][1]["persistentVolumeClaim"] == {"claimName": "data"}
    assert container["volumeMounts"][1]["mountPath"] == "/data"
    told = {variable["name"]: variable.get("value") for variable in container["env"]}
    # The first pod, by the name that the set's service gives it.
    assert told["PADDLE_MASTER"] == "my-train-host-0-0.my-train:6070"
    assert (told["PADDLE_NNODES"], told["A"], told["B"]) == ("4", "1", "a=b c")
    assert secret["metadata"]["name"] == "my-train-token"
    assert secret["stringData"]["token"] not in yaml.safe_dump(job_set)
    again = printed(capsys, "--image=i", "--", "my_train.py")
    assert again[1]["stringData"] != secret["stringData"]
    assert "resources" in job_of(again[0])["template"]["spec"]["containers"][0]


def test_the_whole_set_is_tried_again_but_not_after_usage_errors(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job_set, _ = printed(capsys, "--image=i", "--retries=2", "--", "t.py")
    policy = job_set["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 2
    assert policy["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    job = job_of(job_set)
    rules = job["podFailurePolicy"]["rules"]
    assert (job["backoffLimit"], [rule["action"] for rule in rules]) == (0, ["Ignore", "FailJob"])
    assert rules[0]["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert rules[1]["onExitCodes"]["values"] == [2, 3]


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
    own = ["--name=train", "--image=i", "--", "train.py"]
    params = kubernetes.command.make_context("k8s", own).params
    resources = kubernetes.documents({**params, "token": "t", "words": words})
    job_set, _ = yaml.safe_load_all(yaml.safe_dump_all(resources))
    command = job_of(job_set)["template"]["spec"]["containers"][0]["command"]
    assert [expanded(word) for word in command] == ["python", "-m", "fleetrun", *words]
    parsed = split(words)
    assert parsed.script is not None
    assert parsed.script.args == tuple(args)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--", "train.py"), "give --image NAME"),
        (("--image=i",), "nothing to run"),
        (("--image=i", "--", "--ips=a,b", "t.py"), "--ips comes from the queue; leave it out"),
        (("--image=i", "--volume=data", "--", "t.py"), "--volume=data: give CLAIM=/PATH"),
        (("--image=i", "--kueue=a b", "--", "t.py"), "--kueue=a b: give one word"),
        (("--image=i", "--volcano=b", "--", "t.py"), "--volcano is not in this version: add"),
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
