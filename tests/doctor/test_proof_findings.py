"""Findings about whether Paddle could compute on GPUs."""

from __future__ import annotations

from fleetrun.doctor import gpu_check
from fleetrun.doctor.findings import ERROR, OK, WARNING, Finding
from fleetrun.doctor.gpu_check import GpuFailure, GpuProof
from fleetrun.doctor.software import Build

BUILD = Build("2.6.2", "/env/paddle", cuda="11.8", cudnn="8.6.0")
PROOF = GpuProof(("gpu:0", "gpu:1"), program="/f/compute_check.py")
FAILURE = GpuFailure("gpu:1", "convolution", "ended with 255", "words\nthe last word")


def judged(proof: GpuProof, build: Build = BUILD) -> list[Finding]:
    return list(gpu_check.judge(proof, build, "/env/bin/python"))


def test_what_was_computed_is_said() -> None:
    (finding,) = judged(PROOF)
    assert finding.level == OK
    assert finding.seen == "a product, a convolution and a sum of 2 ranks on gpu:0, gpu:1"
    (finding,) = judged(PROOF._replace(devices=("gpu:0",)))
    assert finding.seen == "a product, a convolution on gpu:0"


def test_each_library_that_is_missing_has_the_line_that_brings_it() -> None:
    nccl, cudnn, other = judged(
        PROOF._replace(
            libraries=(
                ("libnccl.so", "nvidia-nccl-cu11"),
                ("libcudnn.so", "nvidia-cudnn-cu11<9"),
                ("libflash.so", ""),
            ),
            # Its failure is not another finding.
            failure=FAILURE._replace(words="library (libcudnn.so) that Paddle depends on"),
        )
    )
    assert {finding.level for finding in (nccl, cudnn, other)} == {ERROR}
    link = "/env/bin/python /f/compute_check.py --link"
    assert nccl.fix == f"/env/bin/python -m pip install 'nvidia-nccl-cu11' && {link}"
    assert cudnn.fix == f"/env/bin/python -m pip install 'nvidia-cudnn-cu11<9' && {link}"
    assert nccl.seen == "Paddle 2.6.2 needs libnccl.so, which is not found here"
    assert "find / -name 'libflash.so*'" in other.fix


def test_a_step_that_fails_is_an_error_with_the_last_words() -> None:
    (finding,) = judged(PROOF._replace(failure=FAILURE))
    assert (finding.check, finding.level) == ("Paddle on the GPUs", ERROR)
    assert finding.seen == "convolution on gpu:1 ended with 255: the last word"
    (finding,) = judged(PROOF._replace(failure=FAILURE._replace(words="", meaning="It is old.")))
    assert finding.seen.endswith("ended with 255: no output")
    assert finding.means == "It is old."


def test_a_sum_that_fails_asks_for_another_way_of_nccl() -> None:
    (finding,) = judged(PROOF._replace(failure=FAILURE._replace(step="sum of the ranks")))
    assert finding.fix.startswith("--nccl P2P_DISABLE=1")


def test_what_could_not_be_tried_is_a_warning() -> None:
    (finding,) = judged(PROOF._replace(trouble="no process can be started"))
    assert finding.level == WARNING
