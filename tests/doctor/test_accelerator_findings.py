"""Findings about devices of Paddle's plug-ins, and signs of unusable ones."""

from __future__ import annotations

import pytest

from fleetrun.doctor import gpus
from fleetrun.doctor.findings import OK, WARNING


def test_a_plain_host_has_nothing_to_say() -> None:
    assert list(gpus.judge_plugins({}, {})) == []
    # The reason why GPUs are missing is a finding about GPUs.
    assert list(gpus.judge_plugins({}, {"gpu": "GPU 0 may not be opened"})) == []


def test_each_kind_that_paddle_has_is_named() -> None:
    findings = list(gpus.judge_plugins({"mlu": 4, "foo": 1}, {}))
    assert [(finding.check, finding.level) for finding in findings] == [("MLUs", OK), ("FOOs", OK)]
    assert findings[0].seen == "4 of Paddle's kind mlu; ranks talk to each other by xccl"


@pytest.mark.parametrize(
    ("kind", "counts", "check", "fix"),
    [
        # A driver without its plug-in.
        ("npu", {}, "NPUs", "pip install paddle-custom-npu  # of Paddle's own version"),
        ("musa", {}, "MUSAs", "pip install the plug-in for MUSAs  # of Paddle's own version"),
        # A plug-in without its device.
        (
            "npu",
            {"npu": 0},
            "NPUs",
            "ls /dev/davinci*  # are they there, may this user open them, ",
        ),
        ("foo", {"foo": 0}, "FOOs", "look at the vendor's driver  # are they there, may this user"),
        # Plug-ins of another Paddle.
        (
            "plug-in",
            {},
            "plug-ins",
            "install the plug-in for this Paddle's version, or unset CUSTOM",
        ),
    ],
)
def test_what_is_missing_is_said_with_what_mends_it(
    kind: str, counts: dict[str, int], check: str, fix: str
) -> None:
    (finding,) = gpus.judge_plugins(counts, {kind: "why"})
    assert (finding.check, finding.level, finding.seen) == (check, WARNING, "why")
    assert finding.fix.startswith(fix)
