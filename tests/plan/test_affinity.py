"""Every rank gets its own CPUs while there are enough, near its GPU if that is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import a_request, a_roster, gpus, some_facts

from fleetrun.model import Device, LaunchPlan, Processors
from fleetrun.plan import planner
from fleetrun.plan.affinity import bind
from fleetrun.plan.devices import Share
from fleetrun.text import format_ranges

# Two nodes of four cores with two threads each, numbered as Intel's are.
TWO_NODES = Processors(
    tuple((core, core + 8) for core in range(8)),
    (0, 0, 0, 0, 1, 1, 1, 1),
    {"0": 1, "1": 1, "2": 0, "3": 0, "GPU-aa": 1, "GPU-ab": 0},
)
NO_DEVICE: tuple[Device, ...] = ()


@st.composite
def machines(draw: st.DrawFn) -> Processors:
    """Make a machine of which taskset or a container allows any part."""
    threads = draw(st.integers(1, 4))
    cores = draw(st.integers(1, 24))
    numbers = draw(st.permutations(range(threads * cores)))
    kept = []
    for core in range(cores):
        own = sorted(numbers[core * threads : (core + 1) * threads])
        left = draw(st.integers(0, threads))
        if left:
            kept.append((tuple(own[:left]), draw(st.integers(0, 3))))
    if not kept:
        kept.append(((0,), 0))
    return Processors(tuple(core for core, _ in kept), tuple(node for _, node in kept))


def cpus_of(machine: Processors) -> list[int]:
    return [cpu for core in machine.cores for cpu in core]


@given(machines(), st.integers(1, 40), st.sampled_from(["cores", "numa"]))
def test_s79_masks_are_disjoint_and_within_what_we_may_use(
    machine: Processors, ranks: int, how: str
) -> None:
    masks, threads = bind(how, machine, [NO_DEVICE] * ranks)
    allowed = cpus_of(machine)
    assert len(masks) == len(threads) == ranks
    assert all(mask and set(mask) <= set(allowed) for mask in masks)
    assert all(list(mask) == sorted(set(mask)) for mask in masks)
    used = [cpu for mask in masks for cpu in mask]
    if ranks <= len(allowed):
        assert len(used) == len(set(used))
        assert threads == [len(mask) for mask in masks]
        if how == "cores":
            assert set(used) == set(allowed)
    else:
        assert all(count in {1, len(mask)} for mask, count in zip(masks, threads, strict=True))


@given(machines(), st.lists(st.integers(0, 3), min_size=1, max_size=12), st.booleans())
def test_masks_near_devices_are_disjoint_where_they_can_be(
    machine: Processors,
    nodes: list[int],
    is_numa: bool,
) -> None:
    near = {str(index): node for index, node in enumerate(nodes)}
    groups = [gpus(index) for index in range(len(nodes))]
    how = "numa" if is_numa else "cores"
    masks, _ = bind(how, machine._replace(near=near), groups)
    allowed = cpus_of(machine)
    used = [cpu for mask in masks for cpu in mask]
    assert all(masks)
    assert set(used) <= set(allowed)
    if not is_numa and len(nodes) <= len(allowed):
        assert len(used) == len(set(used))


@pytest.mark.parametrize(
    ("device", "near"),
    [
        (Device("gpu", "7", 0), {}),
        (Device("npu", "0", 0), {"0": 1}),
        (Device("gpu", "0", 0), {"0": 5}),
    ],
)
def test_where_nearness_will_not_do_ranks_get_their_turn(
    device: Device, near: dict[str, int]
) -> None:
    masks, _ = bind("cores", TWO_NODES._replace(near=near), [(device,), (device,)])
    assert [format_ranges(mask, ",") for mask in masks] == ["0-3,8-11", "4-7,12-15"]


def test_ranks_run_near_their_gpus() -> None:
    masks, _ = bind("cores", TWO_NODES, [gpus(0), (Device("gpu", "GPU-ab", 1),)])
    assert [format_ranges(mask, ",") for mask in masks] == ["4-7,12-15", "0-3,8-11"]


def test_a_crowded_node_is_shared_with_numa_and_left_with_cores() -> None:
    machine = Processors(((0,), (1,), (2,), (3,)), (0, 1, 1, 1), {"0": 0, "1": 0})
    assert bind("numa", machine, [gpus(0), gpus(1)]) == ([(0,), (0,)], [1, 1])
    assert bind("cores", machine, [gpus(0), gpus(1)])[0] == [(0, 1), (2, 3)]


def made(how: str, **fields: object) -> LaunchPlan:
    facts = some_facts(processors=TWO_NODES)._replace(**fields)  # type: ignore[arg-type]
    roster = a_roster(ranks=2, cpu=True)
    share = Share("cpu", roster.members[0].groups, "gloo")
    return planner.plan(a_request(bind=how), facts, share, roster)


def test_what_the_user_says_of_threads_stays() -> None:
    plan = made("cores", environ={"OMP_NUM_THREADS": "3"})
    assert all("OMP_NUM_THREADS" not in process.env for process in plan.processes)
    roster = a_roster(ranks=1, cpu=True)
    share = Share("cpu", roster.members[0].groups, "gloo")
    request = a_request(bind="numa", env=(("OMP_NUM_THREADS", "5"),))
    plan = planner.plan(request, some_facts(processors=TWO_NODES), share, roster)
    assert plan.processes[0].env["OMP_NUM_THREADS"] == "5"
