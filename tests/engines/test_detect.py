"""Each engine's variables give the hosts, this host's place, and the number of launchers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from clusters import BATCH, HYDRA, MPI, STEP
from hypothesis import given
from hypothesis import strategies as st

from fleetrun.engines import detect
from fleetrun.errors import EnvironmentFault

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from fleetrun.engines.detect import Detected


def read(environ: Mapping[str, str]) -> Detected:
    return detect.read(detect.rows(environ), environ)


def test_a_step_of_slurm_names_its_hosts_and_our_place() -> None:
    detected = read(STEP)
    assert (detected.engine, detected.hosts, detected.node) == ("Slurm", ("n2", "n3"), 1)
    assert (detected.nnodes, detected.launchers, detect.unspread(detected)) == (2, 2, None)
    assert str(detected.sources["hosts"]) == "SLURM_STEP_NODELIST=n[2-3]"


@pytest.mark.parametrize("step", [None, "4294967290", "4294967291"])
def test_a_script_or_shell_in_an_allocation_is_one_process_for_all_its_hosts(
    step: str | None,
) -> None:
    detected = read(BATCH if step is None else {**BATCH, "SLURM_STEP_ID": step})
    assert (detected.hosts, detected.launchers) == (("n1", "n2", "n3", "n4"), 1)
    assert detect.unspread(detected) == (
        "Slurm has started 1 fleetrun for 4 hosts (SLURM_JOB_NUM_NODES=4); wanted is one on each "
        "host, which starts the ranks there, or one for each rank: `srun --ntasks-per-node=1 "
        "fleetrun ...`. With --nnodes=1 each is a job of its own."
    )


def test_a_task_for_each_rank_has_its_place_on_its_host() -> None:
    uneven = {
        **STEP,
        "SLURM_STEP_NUM_TASKS": "13",
        "SLURM_STEP_TASKS_PER_NODE": "8,5",
        "SLURM_LOCALID": "4",
    }
    detected = read(uneven)
    assert (detected.nnodes, detected.here, detected.local, detect.unspread(detected)) == (
        2,
        5,
        4,
        None,
    )
    assert detect.has_tasks(detected)
    assert not detect.has_tasks(read(STEP))
    detected = read({**STEP, "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"})
    assert (detected.here, detected.run) == (4, "77/0")


def test_only_tasks_of_several_hosts_have_what_no_stranger_knows() -> None:
    known = {**MPI, "OMPI_MCA_orte_precondition_transports": "0123456789abcdef-0123456789abcdef"}
    assert read(known).token == known["OMPI_MCA_orte_precondition_transports"]
    # Each of two mpiruns with one task is a separate world, but the hosts may meet all the same.
    alone = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    assert not read({**known, **alone}).token
    assert not read(MPI).token


def test_an_mpi_with_as_many_tasks_on_each_host_counts_the_hosts() -> None:
    detected = read({**MPI, "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    assert (detected.nnodes, detected.node, detected.here) == (2, None, 4)
    assert detect.has_tasks(detected)
    assert read({**HYDRA, "MPI_LOCALNRANKS": "4"}).nnodes == 1


def test_an_mpi_in_an_allocation_has_the_hosts_of_the_allocation() -> None:
    detected = read({**MPI, **BATCH})
    assert (detected.engine, detected.hosts, detected.launchers) == (
        "Open MPI",
        ("n1", "n2", "n3", "n4"),
        4,
    )
    # Its ranks may follow another order than the list.
    assert detected.node is None
    assert detect.unspread(detected) is None
    assert detect.unspread(read({**MPI, **BATCH, "OMPI_COMM_WORLD_SIZE": "8"})) is not None


@pytest.mark.parametrize(
    "environ",
    [
        {"LSB_JOBID": "5", "LSB_MCPU_HOSTS": "n1 2 n2 2", "LSB_HOSTS": "n1 n1 n2 n2"},
        {"PBS_JOBID": "5.server", "PBS_NODEFILE": "hosts"},
    ],
    ids=["lsf", "pbs"],
)
def test_batch_systems_list_each_host_once(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("n1\nn1\nn2\n\n", encoding="utf-8")
    detected = read(environ)
    assert (detected.hosts, detected.nnodes, detected.node) == (("n1", "n2"), 2, None)
    assert "job" in detected.sources
    assert detect.unspread(detected) is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**STEP, "SLURM_NODEID": "2"}, r"1\(x2\) has no number for each host"),
        ({**STEP, "SLURM_STEP_NODELIST": "n[2-"}, r"^SLURM_STEP_NODELIST=n\[2-: n\[2- is no list"),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "two"}, r"SLURM_STEP_NUM_TASKS=two is not a number"),
        ({**STEP, "SLURM_NODEID": "-1"}, r"SLURM_NODEID=-1 is not a number from 0 on"),
        ({"PBS_JOBID": "5", "PBS_NODEFILE": "/none"}, r"PBS_NODEFILE=/none cannot be read \(No su"),
        ({"PBS_JOBID": "5", "PBS_NODEFILE": "/dev/null"}, r"PBS_NODEFILE=/dev/null names no host"),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "4"}, r"PER_NODE=4 has no number for each host"),
        ({**MPI, "OMPI_COMM_WORLD_RANK": "4"}, r"OMPI_COMM_WORLD_RANK=4, but .*SIZE=4: Open MPI"),
    ],
)
def test_variables_that_contradict_each_other_are_one_sentence(
    environ: dict[str, str], message: str
) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        read(environ)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        # A rank of a job that fleetrun has started in a step.
        {**STEP, "FLEETRUN_JOB": "20250102T030405Z-default-1"},
        # Variables that other modules of fleetrun read.
        {"PADDLE_TRAINERS": "a,b", "PADDLE_TRAINER_ID": "0", "POD_IP": "10.0.0.1"},
        {"PADDLE_MASTER": "a:1", "PADDLE_NNODES": "2", "PADDLE_JOB_ID": "j"},
        # Slurm's pmi2 is not MPICH.
        {"PMI_RANK": "0", "PMI_SIZE": "2"},
    ],
)
def test_no_engine_is_seen_where_none_has_to_be(environ: dict[str, str]) -> None:
    assert detect.rows(environ) == ()


@given(
    st.dictionaries(
        st.sampled_from(sorted(detect.VARIABLES)),
        st.one_of(st.text(max_size=8), st.integers(0, 9).map(str), st.just("n[1-3]")),
    )
)
def test_whatever_is_in_the_variables_is_understood_or_one_sentence(
    environ: dict[str, str],
) -> None:
    rows = detect.rows(environ)
    if not rows:
        return
    try:
        detected = detect.read(rows, environ)
    except EnvironmentFault:
        return
    assert detected.node is None or detected.nnodes is None or detected.node < detected.nnodes
    assert len(set(detected.hosts)) == len(detected.hosts)
