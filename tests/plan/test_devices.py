"""Which devices each rank gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import a_request, from_variable, some_facts

from fleetrun.errors import EnvironmentFault, FleetrunError, UsageError
from fleetrun.model import Setting
from fleetrun.plan.devices import Share, share

if TYPE_CHECKING:
    from fleetrun.model import Facts

UUIDS = ("GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3")


def masked(mask: str, gpus: int = 8, **fields: Any) -> Facts:
    """Make facts with CUDA_VISIBLE_DEVICES=MASK."""
    return some_facts(gpus, environ={"CUDA_VISIBLE_DEVICES": mask}, **fields)


def indexes(found: Share) -> list[list[int]]:
    """Return the indexes of each rank's devices."""
    return [[device.ordinal for device in group] for group in found.groups]


def test_every_gpu_gets_a_process() -> None:
    found = share(a_request(), some_facts(3))
    assert indexes(found) == [[0], [1], [2]]
    assert (found.kind, found.backend, found.notes) == ("gpu", "nccl", ())


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ("0,1", [[0], [1]]),
        ("0, 1", [[0], [1]]),
        (" 3 ,1", [[3], [1]]),
        ("1-3", [[1], [2], [3]]),
        ("1 - 2", [[1], [2]]),
        ("0,2-3", [[0], [2], [3]]),
        ("07", [[7]]),
        ("all", [[0], [1], [2], [3], [4], [5], [6], [7]]),
    ],
)
def test_ids_are_written_in_many_ways(devices: str, expected: list[list[int]]) -> None:
    assert indexes(share(a_request(devices=devices), some_facts(8))) == expected


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("", "an id is missing"),
        ("0,,1", "an id is missing"),
        ("0,", "an id is missing"),
        ("3-1", "3-1 is not a range"),
        ("0-99999999999", "is not a range"),
        ("x", "x is no device"),
        ("-1", "-1 is no device"),
        ("0-", "0- is no device"),
        ("²", "² is no device"),
        ("0 1", "0 1 is no device"),
        ("0,0", "names 0 twice"),
        ("all,0", "names 0 twice"),
        ("0-2,1", "names 1 twice"),
    ],
)
def test_ids_that_say_nothing_are_usage_errors(devices: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        share(a_request(devices=devices), some_facts(8))


def test_a_missing_device_is_named_with_where_it_came_from() -> None:
    settings = from_variable("devices", "0,9", "PADDLE_DEVICES")
    with pytest.raises(EnvironmentFault) as caught:
        share(a_request(devices="0,9", settings=settings), some_facts(8))
    assert str(caught.value) == (
        "--devices=0,9 (from $PADDLE_DEVICES): this host has 8 GPUs, 0-7; 9 is not there."
    )


def test_one_gpu_is_spoken_of_in_the_singular() -> None:
    with pytest.raises(EnvironmentFault, match=r"this host has 1 GPU, number 0; 1 is not there\."):
        share(a_request(devices="1", device_kind="gpu"), some_facts(1))


def test_ids_are_looked_up_in_the_mask() -> None:
    found = share(a_request(devices="4,7", device_kind="gpu"), masked("4,5,6,7"))
    assert indexes(found) == [[0], [3]]
    assert [group[0].id for group in found.groups] == ["4", "7"]
    assert found.notes == ("--gpus=4,7 is devices 0,3 of CUDA_VISIBLE_DEVICES.",)


def test_one_id_is_mapped_in_the_singular() -> None:
    found = share(a_request(devices="7", device_kind="gpu"), masked("4,5,6,7"))
    assert found.notes == ("--gpus=7 is device 3 of CUDA_VISIBLE_DEVICES.",)


def test_ids_outside_the_mask_are_refused() -> None:
    with pytest.raises(EnvironmentFault) as caught:
        share(a_request(devices="0,1", device_kind="gpu"), masked("4,5"))
    assert str(caught.value) == "--gpus=0,1: CUDA_VISIBLE_DEVICES does not hold 0; it allows 4, 5."


def test_the_mask_alone_decides() -> None:
    assert indexes(share(a_request(), masked(" 4, 05 ,6"))) == [[0], [1], [2]]


def test_a_mask_of_all_is_no_mask() -> None:
    assert indexes(share(a_request(devices="1"), masked("all", 2))) == [[1]]


@pytest.mark.parametrize("mask", ["", " ", "-1", "NoDevFiles", "-1,0"])
def test_an_empty_mask_means_the_cpu(mask: str) -> None:
    found = share(a_request(nproc_per_node=3), masked(mask))
    assert (found.kind, found.groups, found.backend) == ("cpu", ((), (), ()), "gloo")
    assert "hides all 8 GPUs: training runs on the CPU" in found.notes[0]


def test_the_driver_reads_a_mask_up_to_its_first_mistake() -> None:
    assert indexes(share(a_request(), masked("2,3,-1,4"))) == [[0], [1]]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ("0,8", "names 8: this host has 8 GPUs, 0-7"),
        ("1,1", "names 1 twice"),
        # CUDA reads 4 alone.
        ("4-7", "4-7 is no number, and drivers differ in what they make of it; list the numbers"),
        ("0,1;2", "1;2 is no number"),
    ],
)
def test_a_mask_that_the_driver_would_refuse_is_a_fault(mask: str, message: str) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        share(a_request(), masked(mask))


def test_a_mask_may_hold_uuids_and_their_beginnings() -> None:
    parts = ((), ("MIG-1234", "MIG-5678"), ())
    facts = masked("GPU-cccc,MIG-1234", 3, device_ids={"gpu": UUIDS}, instances=parts)
    found = share(a_request(), facts)
    assert [group[0].id for group in found.groups] == ["GPU-cccc", "MIG-1234"]
    assert indexes(found) == [[0], [1]]


def test_uuids_of_no_device_are_refused_where_they_are_known() -> None:
    with pytest.raises(EnvironmentFault, match="names GPU-ffff, which this host does not have"):
        share(a_request(), masked("GPU-ffff", 3, device_ids={"gpu": UUIDS}))
    assert indexes(share(a_request(), masked("GPU-ffff", 3))) == [[0]]


def test_numbers_are_places_in_a_mask_of_uuids() -> None:
    found = share(a_request(devices="1"), masked("GPU-cccc-3,GPU-aaaa-1", 3))
    assert found.groups[0][0].id == "GPU-aaaa-1"
    assert found.notes == ("--devices=1 is device 1 of CUDA_VISIBLE_DEVICES.",)
    with pytest.raises(EnvironmentFault, match="does not hold 2; it allows GPU-cccc-3"):
        share(a_request(devices="2"), masked("GPU-cccc-3,GPU-aaaa-1", 3))


def test_a_gpu_can_be_named_by_the_beginning_of_its_uuid() -> None:
    ids = {"gpu": UUIDS}
    assert indexes(share(a_request(devices="GPU-cc"), some_facts(3, device_ids=ids))) == [[2]]
    in_mask = masked("2,1", 3, device_ids=ids)
    assert indexes(share(a_request(devices="GPU-aabb-2"), in_mask)) == [[1]]
    by_uuid = masked("GPU-cccc,GPU-aaaa", 3, device_ids=ids)
    assert indexes(share(a_request(devices="GPU-aaaa-1"), by_uuid)) == [[1]]


def test_a_beginning_of_several_uuids_is_refused() -> None:
    with pytest.raises(UsageError, match="GPU-aa is the beginning of several: 0, 1"):
        share(a_request(devices="GPU-aa"), some_facts(3, device_ids={"gpu": UUIDS}))


def test_uuids_that_nobody_knows_are_refused() -> None:
    with pytest.raises(EnvironmentFault, match="this host has 2 GPUs, 0-1; GPU-aa is not there"):
        share(a_request(devices="GPU-aa"), some_facts(2))
    with pytest.raises(EnvironmentFault, match="CUDA_VISIBLE_DEVICES does not hold GPU-aa"):
        share(a_request(devices="GPU-aa"), masked("0,1", 2))


def test_no_driver_means_the_cpu_in_one_line() -> None:
    found = share(a_request(), some_facts())
    assert (found.kind, found.groups, found.backend) == ("cpu", ((),), "gloo")
    assert found.notes == (
        "this host has no GPU driver: training runs on the CPU with the gloo backend.",
    )


def test_a_mask_without_a_driver_is_remarked_on() -> None:
    found = share(a_request(), masked("0,1", 0))
    assert found.notes[0].startswith("CUDA_VISIBLE_DEVICES=0,1 is set, but this host has no GPU")
    assert share(a_request(), masked("", 0)).notes[0].startswith("this host has no GPU driver")


def test_asking_for_gpus_without_a_driver_is_a_fault() -> None:
    with pytest.raises(EnvironmentFault, match=r"--gpus=0 asks for devices, but this host has no"):
        share(a_request(devices="0", device_kind="gpu"), some_facts())
    with pytest.raises(EnvironmentFault, match=r"; FLEETRUN_ASSUME_DEVICES=gpu:8 plans as if"):
        share(a_request(devices="0", device_kind="gpu", dry_run="table"), some_facts())
    with pytest.raises(EnvironmentFault, match=r"--nproc_per_node=gpu asks for devices"):
        share(a_request(nproc_per_node="gpu"), some_facts())
    with pytest.raises(EnvironmentFault, match=r"--devices=0 asks .* hides all 8 GPUs"):
        share(a_request(devices="0"), masked(""))


@pytest.mark.parametrize("mask", [None, "0,1", ""])
def test_a_refusal_for_want_of_devices_is_one_sentence_and_one_remedy(mask: str | None) -> None:
    environ = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    for gpus in (0, 8) if mask == "" else (0,):
        with pytest.raises(EnvironmentFault) as caught:
            share(a_request(devices="0,1"), some_facts(gpus, environ=environ))
        said = str(caught.value)
        assert said.count("but") == 1, said
        assert "training runs on the CPU" not in said
        assert said.endswith("leave the option out to train on the CPU.")


@pytest.mark.parametrize(
    ("nproc", "expected"),
    [
        (None, [[0], [1], [2], [3]]),
        ("auto", [[0], [1], [2], [3]]),
        ("gpu", [[0], [1], [2], [3]]),
        (2, [[0], [1]]),
        ("2", [[0], [1]]),
        (4, [[0], [1], [2], [3]]),
        ("cpu", [[]] * 6),
    ],
)
def test_processes_are_counted_or_named(nproc: int | str | None, expected: list[list[int]]) -> None:
    assert indexes(share(a_request(nproc_per_node=nproc), some_facts(4))) == expected


@pytest.mark.parametrize("nproc", [0, -1, "two", "0", "-1", "²", "1.5", ""])
def test_other_numbers_of_processes_are_usage_errors(nproc: int | str) -> None:
    with pytest.raises(UsageError, match="give a number from 1, or one of auto, gpu, cpu"):
        share(a_request(nproc_per_node=nproc), some_facts(4))


def test_gpu_means_gpus_even_where_other_devices_are() -> None:
    facts = some_facts(device_counts={"npu": 4})
    with pytest.raises(EnvironmentFault, match="no GPU driver"):
        share(a_request(nproc_per_node="gpu"), facts)


def test_cpu_and_devices_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="names devices, and --nproc_per_node=cpu asks for none"):
        share(a_request(nproc_per_node="cpu", devices="0"), some_facts(4))


def test_named_devices_are_divided_among_the_processes() -> None:
    found = share(a_request(devices="0-3", nproc_per_node=2), some_facts(4))
    assert indexes(found) == [[0, 1], [2, 3]]
    found = share(a_request(devices="0,1", nproc_per_node=1), some_facts(4))
    assert indexes(found) == [[0, 1]]


@pytest.mark.parametrize("devices", [None, "4,5"])
def test_one_process_has_all_visible_devices(devices: str | None) -> None:
    found = share(a_request(devices=devices, nproc_per_node=1), masked("4,5"))
    assert [device.id for device in found.groups[0]] == ["4", "5"]
    assert indexes(found) == [[0, 1]]
    assert not [note for note in found.notes if "idle" in note]


def test_one_process_beside_others_has_one_device() -> None:
    found = share(a_request(nproc_per_node=1), some_facts(2), takes_all=False)
    assert indexes(found) == [[0]]


@pytest.mark.parametrize(
    ("nproc", "mask", "note"),
    [
        (
            2,
            "0,1,2,3",
            (
                "GPUs 2-3 are idle: --nproc_per_node=2 uses one GPU for each process; --gpus=0-3 "
                "beside it gives each process 2."
            ),
        ),
        (
            3,
            "4,5,6,7",
            "GPU 7 is idle: --nproc_per_node=3 uses one GPU for each process.",
        ),
        (
            2,
            "6,4,1,3,2",
            "GPUs 1, 3, 2 are idle: --nproc_per_node=2 uses one GPU for each process.",
        ),
    ],
)
def test_devices_that_nobody_uses_are_named(nproc: int, mask: str, note: str) -> None:
    found = share(a_request(nproc_per_node=nproc), masked(mask))
    assert indexes(found) == [[index] for index in range(nproc)]
    assert found.notes == (note,)


def test_devices_that_cannot_be_divided_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match="3 GPUs cannot be divided evenly among 2 processes"):
        share(a_request(devices="0-2", nproc_per_node=2), some_facts(4))


def test_more_processes_than_devices_need_a_word() -> None:
    with pytest.raises(UsageError, match=r"^4 processes, 2 devices; add --oversubscribe"):
        share(a_request(nproc_per_node=4), some_facts(2))
    with pytest.raises(UsageError, match=r"^2 processes, 1 device; add --oversubscribe"):
        share(a_request(devices="3", nproc_per_node=2), some_facts(4))
    found = share(a_request(nproc_per_node=5, oversubscribe=True), some_facts(2))
    assert indexes(found) == [[0], [1], [0], [1], [0]]


@pytest.mark.parametrize(
    ("kind", "mask", "backend"),
    [
        ("npu", "ASCEND_RT_VISIBLE_DEVICES", "xccl"),
        ("npu", "NPU_VISIBLE_DEVICES", "xccl"),
        ("xpu", "XPU_VISIBLE_DEVICES", "bkcl"),
        ("xpu", "XPULINK_VISIBLE_DEVICES", "bkcl"),
    ],
)
def test_other_kinds_have_masks_and_backends_of_their_own(
    kind: str, mask: str, backend: str
) -> None:
    facts = some_facts(device_counts={kind: 4}, environ={mask: "2,3", "CUDA_VISIBLE_DEVICES": ""})
    found = share(a_request(devices="3", device_kind=kind), facts)
    assert (found.kind, found.backend, indexes(found)) == (kind, backend, [[1]])
    assert share(a_request(), facts).kind == kind


def test_gpus_come_before_other_kinds() -> None:
    facts = some_facts(device_counts={"npu": 1, "gpu": 2})
    assert share(a_request(), facts).kind == "gpu"
    assert share(a_request(device_kind="npu"), facts).kind == "npu"


@pytest.mark.parametrize(("backend", "gpus"), [("nccl", 2), ("heter", 2), ("flagcx", 1)])
def test_a_backend_that_the_devices_can_use_is_used(backend: str, gpus: int) -> None:
    assert share(a_request(backend=backend), some_facts(gpus)).backend == backend


@pytest.mark.parametrize(("backend", "gpus"), [("nccl", 0), ("bkcl", 2), ("xccl", 2)])
def test_a_backend_that_is_not_there_is_a_fault(backend: str, gpus: int) -> None:
    with pytest.raises(EnvironmentFault, match=f"--backend={backend}: training here runs on"):
        share(a_request(backend=backend), some_facts(gpus))


def test_an_unknown_backend_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="--backend=foo: give one of auto, nccl"):
        share(a_request(backend="foo"), some_facts(2))


def test_gloo_trains_on_the_cpu_unless_devices_are_named() -> None:
    assert indexes(share(a_request(backend="gloo"), some_facts(4))) == [[]]
    assert indexes(share(a_request(backend="gloo", nproc_per_node=2), some_facts(4))) == [[], []]
    found = share(a_request(backend="gloo", devices="0,1"), some_facts(4))
    assert (found.backend, indexes(found)) == ("gloo", [[0], [1]])
    assert found.notes == ("Paddle trains on the CPU with gloo, even with GPUs named.",)


DIVIDED = some_facts(
    3, device_ids={"gpu": UUIDS}, instances=(("MIG-1", "MIG-2"), (), ("MIG-3", "MIG-4"))
)


def ids(found: Share) -> list[list[str]]:
    """Return the ids of each rank's devices."""
    return [[device.id for device in group] for group in found.groups]


def test_each_process_has_an_instance_of_a_gpu_that_is_divided() -> None:
    found = share(a_request(), DIVIDED)
    # Beside instances, CUDA counts whole GPUs otherwise: they are named by their UUIDs.
    assert ids(found) == [["MIG-1"], ["MIG-2"], [UUIDS[1]], ["MIG-3"], ["MIG-4"]]
    assert found.has_own_masks
    assert found.notes[0].startswith("Each process sees one MIG instance")
    assert "NCCL takes no two ranks on one GPU" in found.notes[1]


@pytest.mark.parametrize(
    ("named", "mask", "expected"),
    [
        ("0", None, ["MIG-1", "MIG-2"]),
        ("1", None, ["1"]),
        ("2", None, ["MIG-3", "MIG-4"]),
        ("0", "2,0", ["MIG-1", "MIG-2"]),
        ("GPU-cccc", None, ["MIG-3", "MIG-4"]),
        ("MIG-3", None, ["MIG-3"]),
        ("MIG-1,MIG-3", None, ["MIG-1", "MIG-3"]),
        ("1", "MIG-1,MIG-3", ["MIG-3"]),
        ("all", "MIG-1,MIG-2", ["MIG-1", "MIG-2"]),
        ("all", f"{UUIDS[0]},MIG-1", ["MIG-1", "MIG-2"]),
    ],
)
def test_instances_are_named_by_their_gpu_or_by_themselves(
    named: str, mask: str | None, expected: list[str]
) -> None:
    facts = DIVIDED._replace(environ={} if mask is None else {"CUDA_VISIBLE_DEVICES": mask})
    found = share(a_request(devices=named), facts)
    whole = [each if each != "1" else UUIDS[1] for each in expected]
    assert ids(found) == [[each] for each in whole]
    assert found.has_own_masks == (expected != ["1"])


def test_a_beginning_of_several_instances_is_refused() -> None:
    with pytest.raises(UsageError, match="MIG- is the beginning of several: MIG-1, MIG-2, MIG-3"):
        share(a_request(devices="MIG-"), DIVIDED)


def test_instances_of_several_gpus_are_nothing_to_nccl() -> None:
    found = share(a_request(devices="MIG-1,1,MIG-3"), DIVIDED)
    assert len(found.notes) == 1


def test_one_process_has_one_instance_and_the_others_are_idle() -> None:
    found = share(a_request(nproc_per_node=1), DIVIDED)
    assert ids(found) == [["MIG-1"]]
    assert "are idle" in found.notes[0]


def test_a_process_cannot_have_two_instances() -> None:
    with pytest.raises(UsageError, match=r"a process sees only one; give --nproc_per_node=2\."):
        share(a_request(devices="0", nproc_per_node=1), DIVIDED)


def test_a_mask_names_instances_that_are_there() -> None:
    facts = DIVIDED._replace(environ={"CUDA_VISIBLE_DEVICES": "MIG-9"})
    with pytest.raises(EnvironmentFault, match="names MIG-9, which this host does not have"):
        share(a_request(), facts)


def test_amds_gpus_have_a_mask_of_their_own() -> None:
    environ = {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0,1"}
    facts = some_facts(2, environ=environ)
    assert ids(share(a_request(), facts._replace(is_rocm=True))) == [["1"]]
    assert ids(share(a_request(), facts)) == [["0"], ["1"]]


@settings(deadline=None)
@given(
    count=st.integers(0, 16),
    mask=st.none() | st.lists(st.integers(0, 15), unique=True),
    wanted=st.none() | st.lists(st.integers(0, 15), max_size=6),
    nproc=st.none() | st.integers(1, 20) | st.sampled_from(["auto", "gpu", "cpu"]),
    oversubscribe=st.booleans(),
)
def test_whatever_is_asked_a_share_is_sound_or_refused(
    count: int,
    mask: list[int] | None,
    wanted: list[int] | None,
    nproc: int | str | None,
    oversubscribe: bool,
) -> None:
    environ = {} if mask is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, mask))}
    facts = some_facts(count, environ=environ)
    devices = None if wanted is None else ",".join(map(str, wanted))
    request = a_request(devices=devices, nproc_per_node=nproc, oversubscribe=oversubscribe)
    try:
        found = share(request, facts)
    except FleetrunError as error:
        assert str(error).endswith(".")  # noqa: PT017 - not the only outcome
        return
    visible = list(range(count)) if mask is None else mask
    flat = [device for group in found.groups for device in group]
    assert all(str(visible[device.ordinal]) == device.id for device in flat)
    assert len({len(group) for group in found.groups}) == 1
    assert oversubscribe or len(set(flat)) == len(flat)
    if isinstance(nproc, int):
        assert len(found.groups) == nproc
    assert (found.kind == "cpu") == (not flat) == (found.backend == "gloo")
    if wanted is not None:
        assert {device.id for device in flat} <= set(map(str, wanted))


# -- the kinds of plug-ins -----------------------------------------------------------------------


def plugged(environ: dict[str, str] | None = None, **counts: int) -> Facts:
    """Make facts with COUNTS of devices that Paddle has counted."""
    return some_facts(paddle_counts=counts, has_plugins=True, environ=environ or {})


def chosen(kind: str, source: str = "command line") -> dict[str, Any]:
    """Make the fields of a request with --device_kind=KIND."""
    return {"device_kind": kind, "settings": (Setting("device_kind", kind, source),)}


def test_any_kind_of_a_plugin_is_used_by_the_rule() -> None:
    found = share(a_request(), plugged(foo=3))
    assert (found.kind, found.backend, indexes(found)) == ("foo", "xccl", [[0], [1], [2]])
    assert share(a_request(backend="xccl"), plugged(foo=3)).backend == "xccl"


@pytest.mark.parametrize(
    ("mask", "count", "ids", "places"),
    [
        # Paddle has counted what the mask leaves, and numbers it anew.
        ("1,3", 2, ["1", "3"], [[0], [1]]),
        (" uuid-a , uuid-b ", 2, ["uuid-a", "uuid-b"], [[0], [1]]),
        ("all", 2, ["0", "1"], [[0], [1]]),
        ("0,2,-1,3", 2, ["0", "2"], [[0], [1]]),
        # The plug-in does not read it.
        ("1,3", 4, ["1", "3"], [[1], [3]]),
        ("5-7", 8, ["5", "6", "7"], [[5], [6], [7]]),
    ],
)
def test_a_plugins_mask_is_what_paddle_makes_of_it(
    mask: str, count: int, ids: list[str], places: list[list[int]]
) -> None:
    found = share(a_request(), plugged({"FOO_VISIBLE_DEVICES": mask}, foo=count))
    assert [group[0].id for group in found.groups] == ids
    assert indexes(found) == places


def test_devices_are_named_as_in_the_plugins_mask() -> None:
    facts = plugged({"FOO_VISIBLE_DEVICES": "4,7"}, foo=2)
    request = a_request(devices="7", device_kind="foo")
    assert indexes(share(request, facts)) == [[1]]
    uuids = plugged({"FOO_VISIBLE_DEVICES": "DRS-1a,DRS-2b"}, foo=2)
    for uuid in ("DRS-2b", "DRS-2"):
        assert indexes(share(request._replace(devices=uuid), uuids)) == [[1]]
    with pytest.raises(EnvironmentFault, match=r"FOO_VISIBLE_DEVICES does not hold 0; it allows 4"):
        share(request._replace(devices="0"), facts)


@pytest.mark.parametrize(
    ("devices", "places"), [("0,1", [[0], [1]]), ("1", [[1]]), ("5,4", [[1], [0]])]
)
def test_places_behind_a_vendors_mask_are_taken_as_by_paddles_launcher(
    devices: str, places: list[list[int]]
) -> None:
    facts = plugged({"ASCEND_RT_VISIBLE_DEVICES": "4,5"}, npu=2)
    found = share(a_request(devices=devices, device_kind="npu"), facts)
    assert indexes(found) == places
    assert "of ASCEND_RT_VISIBLE_DEVICES" in found.notes[0]


@pytest.mark.parametrize(
    ("mask", "count", "number"),
    [
        ("0,9", 1, "2 devices"),
        ("4-7", 1, "4 devices"),
        ("[0,1]", 8, "no device"),
        ("4,9", 8, "2 d"),
    ],
)
def test_a_mask_that_names_what_paddle_does_not_see_is_a_fault(
    mask: str, count: int, number: str
) -> None:
    with pytest.raises(EnvironmentFault, match=f"names {number}.*but Paddle sees {count} behind"):
        share(a_request(), plugged({"FOO_VISIBLE_DEVICES": mask}, foo=count))


@pytest.mark.parametrize(
    ("mask", "count"),
    [
        ("", 0),
        ("-1", 0),
        ("none", 0),
        ("[0]", 0),
        ("", 4),
        ("-1,2", 4),
        ("void", 4),
        ("NoDevFiles", 4),
    ],
)
def test_a_plugins_mask_that_hides_all_means_the_cpu(mask: str, count: int) -> None:
    facts = plugged({"FOO_VISIBLE_DEVICES": mask}, foo=count)
    for request in (a_request(), a_request(**chosen("foo", "$PADDLE_XCCL_BACKEND"))):
        found = share(request, facts._replace(absent={"foo": "Paddle sees none"}))
        assert found.kind == "cpu"
        assert found.notes[0].startswith(f"FOO_VISIBLE_DEVICES={mask} hides all FOOs: training")


def test_paddle_prefers_plugins_to_gpus_and_one_of_several_is_said() -> None:
    facts = plugged(npu=0, mlu=2)._replace(device_counts={"gpu": 8})
    found = share(a_request(), facts)
    assert found.kind == "mlu"
    assert found.notes == (
        "This host has MLUs and GPUs: MLUs are used; --device_kind=gpu uses the others.",
    )
    assert share(a_request(**chosen("gpu")), facts).kind == "gpu"
    assert share(a_request(nproc_per_node="gpu"), facts).kind == "gpu"
    assert share(a_request(devices="0", device_kind="gpu"), facts).kind == "gpu"


def test_gpus_are_the_devices_of_a_plugin_where_there_is_no_gpu() -> None:
    found = share(a_request(devices="0,1", device_kind="gpu"), plugged(mlu=2))
    assert (found.kind, indexes(found)) == ("mlu", [[0], [1]])
    assert found.notes == ("--gpus=0,1 names MLUs: no GPU is here.",)
    with pytest.raises(EnvironmentFault, match="this host has no GPU driver"):
        share(a_request(devices="0", **chosen("gpu")), plugged(mlu=2))


def test_a_kind_that_was_chosen_and_is_not_there_is_a_fault() -> None:
    facts = some_facts(absent={"npu": "Paddle has no plug-in for NPUs"})
    with pytest.raises(EnvironmentFault) as caught:
        share(a_request(**chosen("npu", "$PADDLE_XCCL_BACKEND")), facts)
    assert str(caught.value) == (
        "--device_kind=npu (from $PADDLE_XCCL_BACKEND) asks for devices, but Paddle has no plug-in "
        "for NPUs; leave the option out to train on the CPU."
    )


def test_a_refusal_says_what_would_be_trained_on_without_the_option() -> None:
    facts = some_facts(
        paddle_counts={"sdaa": 2},
        has_plugins=True,
        absent={"npu": "Paddle has no plug-in for NPUs"},
    )
    for asked in (a_request(devices="0", device_kind="npu"), a_request(**chosen("npu"))):
        with pytest.raises(EnvironmentFault, match="leave the option out to train on SDAAs"):
            share(asked, facts)


def test_an_option_is_called_as_it_was_written_beside_the_kind_of_a_variable() -> None:
    given_by = (
        Setting("device_kind", "gcu", "$PADDLE_XCCL_BACKEND"),
        Setting("gcus", "9", "command line"),
    )
    request = a_request(devices="9", device_kind="gcu", settings=given_by)
    with pytest.raises(EnvironmentFault, match=r"^--gcus=9: this host has 2 GCUs"):
        share(request, plugged(gcu=2))


def test_signs_of_a_device_that_cannot_be_used_are_said() -> None:
    found = share(a_request(), some_facts(absent={"npu": "this host has 8 NPUs, and no plug-in"}))
    assert found.kind == "cpu"
    assert found.notes == (
        "this host has 8 NPUs, and no plug-in: training runs on the CPU with the gloo backend.",
    )


def test_the_cpu_is_a_kind_too() -> None:
    found = share(a_request(nproc_per_node=2, **chosen("cpu")), plugged(mlu=2))
    assert (found.kind, found.groups, found.notes) == ("cpu", ((), ()), ())
    with pytest.raises(UsageError, match=r"--devices=0 names devices, and --device_kind=cpu asks"):
        share(a_request(devices="0", **chosen("cpu")), plugged(mlu=2))


@pytest.mark.parametrize(
    ("kind", "counts", "ending"),
    [
        ("gup", {}, "; did you mean --gpus?"),
        ("epoch", {}, "; `fleetrun --help=all` lists them all."),
        ("epoch", {"mlu": 2}, "; Paddle here has --mlus."),
    ],
)
def test_an_option_for_a_kind_that_nobody_knows_is_a_slip(
    kind: str, counts: dict[str, int], ending: str
) -> None:
    with pytest.raises(UsageError) as caught:
        share(a_request(devices="0", device_kind=kind), some_facts(paddle_counts=counts))
    assert str(caught.value) == f"no such option: --{kind}s{ending}"


def test_hangs_are_looked_for_without_the_devices_of_a_plugin_and_that_is_said() -> None:
    (note,) = share(a_request(hang_timeout_s=60.0), plugged(mlu=2)).notes
    assert note == (
        "Whether MLUs compute is not known: ranks that only wait for theirs count as hung after "
        "60 s (--hang_timeout)."
    )
    assert share(a_request(hang_timeout_s=60.0), some_facts(2)).notes == ()


def test_which_devices_of_a_plugin_are_free_is_not_known() -> None:
    with pytest.raises(UsageError, match="which MLUs are free is not known; name them"):
        share(a_request(devices="free", device_kind="mlu"), plugged(mlu=2))
