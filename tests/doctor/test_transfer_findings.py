"""Findings about measured allreduces."""

from __future__ import annotations

import pytest

from fleetrun.doctor import output, transfers
from fleetrun.doctor.findings import ERROR, OK, WARNING, exit_code, ok, warning
from fleetrun.doctor.nvidia import Gpu, Gpus
from fleetrun.doctor.transfers import Transfer, Transfers

ROWS = (Transfer(1024, 0.0002, is_right=True), Transfer(1 << 26, 0.05, is_right=True))
WELL = Transfers("gloo", 2, ROWS, link=3e9)
NO_GPUS = Gpus(has_driver=False)


@pytest.mark.parametrize(
    ("measured", "level", "seen"),
    [
        (WELL, OK, "1.34 GB/s at 64 MiB; the link carries 3 GB/s"),
        (WELL._replace(link=None), OK, "200 us for 1 KiB"),
        (WELL._replace(rows=()), OK, "rank 0's host"),
        (WELL._replace(trouble="exit code 1"), ERROR, "exit code 1"),
        (WELL._replace(rows=(ROWS[0], ROWS[1]._replace(is_right=False))), ERROR, "64 MiB"),
        (WELL._replace(link=100e9), WARNING, "the link carries 100 GB/s"),
        (WELL._replace(rows=(ROWS[0]._replace(seconds=0.04), ROWS[1])), WARNING, "40000 us"),
    ],
)
def test_transfers_are_judged(measured: Transfers, level: str, seen: str) -> None:
    (finding,) = transfers.judge(measured, NO_GPUS)
    assert finding.level == level
    assert seen in finding.seen


def test_over_nccl_the_link_is_nvlink_where_every_gpu_has_it() -> None:
    gpu = Gpu(0, "H100", "GPU-0", capability=(9, 0), nvlinks=(18, 18))
    over = WELL._replace(backend="nccl", link=1.0)
    assert transfers.link_speed(over, Gpus(has_driver=True, gpus=(gpu, gpu))) == 450e9
    alone = gpu._replace(nvlinks=None)
    assert transfers.link_speed(over, Gpus(has_driver=True, gpus=(gpu, alone))) is None


def test_the_page_has_every_finding_and_the_document_the_numbers() -> None:
    findings = [ok("port", "6070 can be used"), *transfers.judge(WELL, NO_GPUS)]
    text = output.text(findings, WELL, width=80)
    assert "allreduce of 2 ranks over gloo:" in text
    assert text.endswith("2 ok, 0 warnings, 0 errors\n")
    assert max(map(len, text.splitlines())) <= 80
    document = output.document("node1", findings, WELL)
    assert document["exit_code"] == exit_code(findings) == 0
    assert [row["bytes"] for row in document["allreduce"]["rows"]] == [1024, 1 << 26]


def test_a_command_is_never_broken_and_a_sentence_is() -> None:
    fix = "a command " * 20
    text = output.text([warning("clock", "slow " * 30, "late " * 30, fix)], width=80)
    assert fix in text
    assert all(len(line) <= 80 for line in text.splitlines() if fix not in line)
    assert "\x1b[33mwarning" in output.text([warning("a", "b", "c", "d")], is_coloured=True)
