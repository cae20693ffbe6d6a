"""GPUs that other processes use."""

from __future__ import annotations

import pytest
from plans import a_request, some_facts

from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.model import Facts, Gpu
from fleetrun.plan.devices import Share, share

GIB = 1 << 30
FREE = Gpu("", used_bytes=GIB, total_bytes=80 * GIB)
FULL = FREE._replace(used_bytes=60 * GIB, users=((7, "python train.py"), (9, "")))
# A process has only just started.
HELD = FREE._replace(users=((7, "jupyter"),))
# In another container.
FILLED = FREE._replace(used_bytes=9 * GIB)
UNKNOWN = Gpu("")


def host(*gpus: Gpu, **fields: object) -> Facts:
    """Make the facts of a host with GPUS, which get names."""
    named = tuple(gpu._replace(uuid=f"GPU-{place}") for place, gpu in enumerate(gpus))
    return some_facts(len(gpus), gpus=named)._replace(**fields)  # type: ignore[arg-type]


def ids(shared: Share) -> list[list[str]]:
    return [[device.id for device in group] for group in shared.groups]


def test_free_are_those_on_which_nobody_computes_and_that_have_their_memory() -> None:
    shared = share(a_request(devices="free"), host(FULL, FREE, HELD, FREE, FILLED))
    assert ids(shared) == [["1"], ["3"]]
    assert shared.notes == ("--devices=free takes 1, 3 of 5 GPUs.",)


@pytest.mark.parametrize("wanted", [1, 2])
def test_as_many_free_ones_are_taken_as_there_are_processes(wanted: int) -> None:
    shared = share(a_request(devices="free", nproc_per_node=wanted), host(FREE, FULL, FREE, FREE))
    assert ids(shared) == [["0"], ["2"]][:wanted]


@pytest.mark.parametrize(
    ("facts", "wanted", "message"),
    [
        (
            host(FULL, HELD),
            None,
            r"0 of 2 GPUs are free, and 1 wanted; `nvidia-smi` shows.*; --gpus=all uses them",
        ),
        (host(FULL, FREE), 2, r"1 of 2 GPUs are free \(1\), and 2 wanted; `nvidia-smi`"),
        (host(FREE, UNKNOWN), None, r"the driver does not tell whether GPU 1 is free"),
        (some_facts(2), None, r"the driver does not tell whether GPU 0 is free"),
    ],
)
def test_too_few_free_ones_are_a_fault(facts: Facts, wanted: int | None, message: str) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        share(a_request(devices="free", nproc_per_node=wanted), facts)


def test_free_stands_alone_and_for_gpus() -> None:
    with pytest.raises(UsageError, match="`free` alone"):
        share(a_request(devices="free,0"), host(FREE))
    with pytest.raises(UsageError, match="which NPUs are free is not known"):
        share(a_request(devices="free"), some_facts(device_counts={"npu": 2}))


def test_an_instance_is_used_by_itself() -> None:
    parts = FULL._replace(uuid="MIG-1"), FREE._replace(uuid="MIG-2")
    facts = host(Gpu("", instances=parts))
    assert ids(share(a_request(devices="free"), facts)) == [["MIG-2"]]
