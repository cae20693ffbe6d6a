"""Which devices each rank gets."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import a_request, from_variable, known_gpus, some_facts

from fleetrun.errors import EnvironmentFault, FleetrunError, UsageError
from fleetrun.model import Setting
from fleetrun.plan.devices import Share, share

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fleetrun.model import Facts

UUIDS = ("GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3")


def masked(mask: str, gpus: int = 8, /, **fields: Any) -> Facts:
    """Make facts with CUDA_VISIBLE_DEVICES=MASK."""
    return some_facts(gpus, environ={"CUDA_VISIBLE_DEVICES": mask}, **fields)


def indexes(shared: Share) -> list[list[int]]:
    """Return the indexes of each rank's devices."""
    return [[device.ordinal for device in group] for group in shared.groups]


def ids(shared: Share) -> list[list[str]]:
    """Return the ids of each rank's devices."""
    return [[device.id for device in group] for group in shared.groups]


def plugged(environ: dict[str, str] | None = None, **counts: int) -> Facts:
    """Make facts with COUNTS of devices that Paddle has counted."""
    return some_facts(paddle_counts=counts, has_plugins=True, environ=environ or {})


def chosen(kind: str, source: str = "command line") -> dict[str, Any]:
    """Make the fields of a request with --device_kind=KIND."""
    return {"device_kind": kind, "settings": (Setting("device_kind", kind, source),)}


def alone(*ordinals: int) -> list[list[int]]:
    """Return the devices of ranks that have one each."""
    return [[ordinal] for ordinal in ordinals]


DIVIDED = some_facts(
    3, gpus=known_gpus(*UUIDS, instances=(("MIG-1", "MIG-2"), (), ("MIG-3", "MIG-4")))
)
ON_CPU_ALONE: list[list[int]] = [[]]
ON_CPU = "training runs on the CPU with the gloo backend."
CUDA = "CUDA_VISIBLE_DEVICES"
ROCM = some_facts(2, environ={"HIP_VISIBLE_DEVICES": "1", CUDA: "0,1"}, is_rocm=True)
TWO_KINDS = some_facts(device_counts={"npu": 1, "gpu": 2})
PREFERRED = plugged(npu=0, mlu=2)._replace(device_counts={"gpu": 8})
ON_GPU = {"device_kind": "gpu"}
# The request, the host, the devices of each rank in the mask, and other expectations.
# fmt: off
SHARED: list[tuple[Mapping[str, Any], Facts, list[list[int]], Mapping[str, Any]]] = [
    # Every GPU gets a process.
    ({}, some_facts(3), alone(0, 1, 2), {"kind": "gpu", "backend": "nccl", "notes": ()}),
    # Ids are written in many ways.
    *(({"devices": devices}, some_facts(8), alone(*expected), {}) for devices, expected in (
        ("0,1", (0, 1)), ("0, 1", (0, 1)), (" 3 ,1", (3, 1)), ("1-3", (1, 2, 3)),
        ("1 - 2", (1, 2)), ("0,2-3", (0, 2, 3)), ("07", (7,)), ("all", range(8)))),
    # They are looked up in the mask, which the driver reads up to the first error.
    ({"devices": "4,7", **ON_GPU}, masked("4,5,6,7"), alone(0, 3),
     {"ids": [["4"], ["7"]]}),
    ({}, masked(" 4, 05 ,6"), alone(0, 1, 2), {}),
    ({"devices": "1"}, masked("all", 2), alone(1), {}),
    ({}, masked("2,3,-1,4"), alone(0, 1), {}),
    # An empty mask means the CPU, and so does a missing driver; oddities are reported.
    *(({"nproc_per_node": 3}, masked(mask), ON_CPU_ALONE * 3,
       {"kind": "cpu", "backend": "gloo", "says": f"hides all 8 GPUs: {ON_CPU}"})
      for mask in ("", " ", "-1", "NoDevFiles", "-1,0")),
    ({}, some_facts(), [[]], {"kind": "cpu", "backend": "gloo",
                              "notes": (f"this host has no GPU driver: {ON_CPU}",)}),
    ({}, masked("0,1", 0), [[]], {"says": f"{CUDA}=0,1 is set, but this host has no GPU"}),
    ({}, masked("", 0), [[]], {"notes": (f"this host has no GPU driver: {ON_CPU}",)}),
    # UUIDs, and their beginnings.
    ({}, masked("GPU-cccc,MIG-1234", 3, gpus=known_gpus(*UUIDS,
                instances=((), ("MIG-1234", "MIG-5678")))), alone(0, 1),
     {"ids": [["GPU-cccc"], ["MIG-1234"]]}),
    ({}, masked("GPU-ffff", 3), alone(0), {}),
    ({"devices": "1"}, masked("GPU-cccc-3,GPU-aaaa-1", 3), alone(1),
     {"ids": [["GPU-aaaa-1"]]}),
    ({"devices": "GPU-cc"}, some_facts(3, gpus=known_gpus(*UUIDS)), alone(2), {}),
    ({"devices": "GPU-aabb-2"}, masked("2,1", 3, gpus=known_gpus(*UUIDS)), alone(1), {}),
    ({"devices": "GPU-aaaa-1"}, masked("GPU-cccc,GPU-aaaa", 3, gpus=known_gpus(*UUIDS)),
     alone(1), {}),
    # Processes are counted or named.
    *(({"nproc_per_node": count}, some_facts(4), alone(*expected), {}) for count, expected in (
        (None, range(4)), ("auto", range(4)), ("gpu", range(4)), (2, (0, 1)), ("2", (0, 1)),
        (4, range(4)))),
    ({"nproc_per_node": "cpu"}, some_facts(4), [[]] * 6, {}),
    # Named devices are divided among them; one alone has all that are visible.
    ({"devices": "0-3", "nproc_per_node": 2}, some_facts(4), [[0, 1], [2, 3]], {}),
    ({"devices": "0,1", "nproc_per_node": 1}, some_facts(4), [[0, 1]], {}),
    *(({"devices": devices, "nproc_per_node": 1}, masked("4,5"), [[0, 1]],
       {"ids": [["4", "5"]]}) for devices in (None, "4,5")),
    ({"nproc_per_node": 5, "oversubscribe": True}, some_facts(2), alone(0, 1, 0, 1, 0), {}),
    # GPUs come before other kinds, a backend that the devices can use is used.
    ({}, TWO_KINDS, alone(0, 1), {"kind": "gpu"}),
    ({"device_kind": "npu"}, TWO_KINDS, alone(0), {"kind": "npu"}),
    *(({"backend": backend}, some_facts(gpus), alone(*range(gpus)), {"backend": backend})
      for backend, gpus in (("nccl", 2), ("heter", 2), ("flagcx", 1))),
    ({"backend": "gloo"}, some_facts(4), [[]], {}),
    ({"backend": "gloo", "nproc_per_node": 2}, some_facts(4), [[], []], {}),
    ({"backend": "gloo", "devices": "0,1"}, some_facts(4), alone(0, 1),
     {"backend": "gloo",
      "notes": ("Paddle trains on the CPU with gloo, even with GPUs named.",)}),
    # Each process has an instance of a GPU that is divided. Beside instances, CUDA counts whole
    # GPUs otherwise: they are named by their UUIDs.
    ({}, DIVIDED, alone(0, 1, 2, 3, 4),
     {"ids": [["MIG-1"], ["MIG-2"], [UUIDS[1]], ["MIG-3"], ["MIG-4"]], "has_own_masks": True}),
    *(({"devices": named}, DIVIDED._replace(environ=environ), alone(*places),
       {"ids": [[name] for name in expected], "has_own_masks": expected != [UUIDS[1]]})
      for named, environ, places, expected in (
          ("0", {}, (0, 1), ["MIG-1", "MIG-2"]), ("1", {}, (2,), [UUIDS[1]]),
          ("2", {}, (3, 4), ["MIG-3", "MIG-4"]), ("GPU-cccc", {}, (3, 4), ["MIG-3", "MIG-4"]),
          ("0", {CUDA: "2,0"}, (2, 3), ["MIG-1", "MIG-2"]), ("MIG-3", {}, (3,), ["MIG-3"]),
          ("MIG-1,MIG-3", {}, (0, 3), ["MIG-1", "MIG-3"]),
          ("1", {CUDA: "MIG-1,MIG-3"}, (1,), ["MIG-3"]),
          ("all", {CUDA: "MIG-1,MIG-2"}, (0, 1), ["MIG-1", "MIG-2"]),
          ("all", {CUDA: f"{UUIDS[0]},MIG-1"}, (0, 1), ["MIG-1", "MIG-2"]))),
    ({"devices": "MIG-1,1,MIG-3"}, DIVIDED, alone(0, 2, 3), {"notes": ()}),
    ({"nproc_per_node": 1}, DIVIDED, alone(0), {"ids": [["MIG-1"]]}),
    # AMD's GPUs have a mask of their own.
    ({}, ROCM, alone(0), {"ids": [["1"]]}),
    ({}, ROCM._replace(is_rocm=False), alone(0, 1), {"ids": [["0"], ["1"]]}),
    # Any kind of plug-in follows the same rule.
    *((fields, plugged(foo=3), alone(0, 1, 2), {"kind": "foo", "backend": "xccl"})
      for fields in ({}, {"backend": "xccl"})),
    # Paddle has counted what its mask leaves, and numbers it anew; or the plug-in does not read it.
    *(({}, plugged({"FOO_VISIBLE_DEVICES": mask}, foo=count), alone(*places),
       {"ids": [[name] for name in names]}) for mask, count, names, places in (
          ("1,3", 2, ("1", "3"), (0, 1)), ("all", 2, ("0", "1"), (0, 1)),
          (" uuid-a , uuid-b ", 2, ("uuid-a", "uuid-b"), (0, 1)),
          ("0,2,-1,3", 2, ("0", "2"), (0, 1)),
          ("1,3", 4, ("1", "3"), (1, 3)), ("5-7", 8, ("5", "6", "7"), (5, 6, 7)))),
    *(({"devices": named, "device_kind": "foo"},
       plugged({"FOO_VISIBLE_DEVICES": mask}, foo=2), alone(1), {})
      for named, mask in (("7", "4,7"), ("DRS-2b", "DRS-1a,DRS-2b"), ("DRS-2", "DRS-1a,DRS-2b"))),
    # Places behind a vendor's mask are taken as by Paddle's launcher.
    *(({"devices": named, "device_kind": "npu"},
       plugged({"ASCEND_RT_VISIBLE_DEVICES": "4,5"}, npu=2), alone(*places), {})
      for named, places in (("0,1", (0, 1)), ("1", (1,)), ("5,4", (1, 0)))),
    # Paddle prefers plug-ins to GPUs.
    ({}, PREFERRED, alone(0, 1), {"kind": "mlu"}),
    (chosen("gpu"), PREFERRED, alone(*range(8)), {"kind": "gpu"}),
    ({"nproc_per_node": "gpu"}, PREFERRED, alone(*range(8)), {"kind": "gpu"}),
    ({"devices": "0", **ON_GPU}, PREFERRED, alone(0), {"kind": "gpu"}),
    # GPUs are the devices of a plug-in where there is no GPU.
    ({"devices": "0,1", **ON_GPU}, plugged(mlu=2), alone(0, 1),
     {"kind": "mlu"}),
    # Other kinds have masks and backends of their own.
    *(({"devices": "3", "device_kind": kind},
       some_facts(device_counts={kind: 4}, environ={mask: "2,3", CUDA: ""}), alone(1),
       {"kind": kind, "backend": backend}) for kind, mask, backend in (
          ("npu", "ASCEND_RT_VISIBLE_DEVICES", "xccl"), ("npu", "NPU_VISIBLE_DEVICES", "xccl"),
          ("xpu", "XPU_VISIBLE_DEVICES", "bkcl"), ("xpu", "XPULINK_VISIBLE_DEVICES", "bkcl"))),
    # A plug-in's mask that hides all means the CPU.
    *((fields, plugged({"FOO_VISIBLE_DEVICES": mask}, foo=count)._replace(absent={"foo": "none"}),
       ON_CPU_ALONE, {"kind": "cpu", "says": f"FOO_VISIBLE_DEVICES={mask} hides all FOOs: "})
      for fields in ({}, chosen("foo", "$PADDLE_XCCL_BACKEND")) for mask, count in (
          ("", 0), ("-1", 0), ("none", 0), ("[0]", 0), ("", 4), ("-1,2", 4), ("void", 4),
          ("NoDevFiles", 4))),
    # Signs of unusable devices are reported.
    ({}, some_facts(absent={"npu": "this host has 8 NPUs, and no plug-in"}), [[]],
     {"kind": "cpu", "notes": (f"this host has 8 NPUs, and no plug-in: {ON_CPU}",)}),
]
NO_NPUS = some_facts(absent={"npu": "Paddle has no plug-in for NPUs"})
SDAAS = NO_NPUS._replace(paddle_counts={"sdaa": 2}, has_plugins=True)
NO_PLUGIN = (
    "--device_kind=npu (from $PADDLE_XCCL_BACKEND) requests devices, but Paddle has no plug-in for "
    "NPUs"
)
COUNT = "give a number from 1, or one of auto, gpu, cpu"
# Of the user, or of the host.
REFUSED: list[tuple[Mapping[str, Any], Facts, type[FleetrunError], str]] = [
    *(({"devices": named}, some_facts(8), UsageError, message) for named, message in (
        ("", "an empty word is not a device"), ("0,", "an empty word is not a device"),
        ("3-1", "3-1 is not a device"), ("0-99999999999", "is not a device"),
        ("x", "x is not a device"), ("-1", "-1 is not a device"), ("0-", "0- is not a device"),
        ("²", "² is not a device"), ("0 1", "0 1 is not a device"), ("0,0", "names 0 twice"),
        ("all,0", "names 0 twice"), ("0-2,1", "names 1 twice"))),
    ({"devices": "0,9", "settings": from_variable("devices", "0,9", "PADDLE_DEVICES")},
     some_facts(8), EnvironmentFault,
     "--devices=0,9 (from $PADDLE_DEVICES): this host has 8 GPUs, 0-7; 9 is not there."),
    ({"devices": "1", **ON_GPU}, some_facts(1), EnvironmentFault,
     "this host has 1 GPU, number 0; 1 is not there."),
    ({"devices": "0,1", **ON_GPU}, masked("4,5"), EnvironmentFault,
     f"--gpus=0,1: {CUDA} does not contain 0; it allows 4, 5."),
    # CUDA reads only the 4 of 4-7.
    *(({}, masked(mask), EnvironmentFault, message) for mask, message in (
        ("0,8", "names 8: this host has 8 GPUs, 0-7"), ("1,1", "names 1 twice"),
        ("4-7", "4-7 is not a number, and drivers interpret it differently; list the numbers"),
        ("0,1;2", "1;2 is not a number"), ("\uff10,1", "\uff10 is not a number"))),
    ({}, masked("GPU-ffff", 3, gpus=known_gpus(*UUIDS)), EnvironmentFault,
     "names GPU-ffff, which this host does not have"),
    ({"devices": "2"}, masked("GPU-cccc-3,GPU-aaaa-1", 3), EnvironmentFault,
     "does not contain 2; it allows GPU-cccc-3"),
    ({"devices": "GPU-aa"}, some_facts(3, gpus=known_gpus(*UUIDS)), UsageError,
     "GPU-aa matches several devices: 0, 1"),
    ({"devices": "GPU-aa"}, some_facts(2), EnvironmentFault,
     "this host has 2 GPUs, 0-1; GPU-aa is not there"),
    ({"devices": "GPU-aa"}, masked("0,1", 2), EnvironmentFault, f"{CUDA} does not contain GPU-aa"),
    ({"devices": "0", **ON_GPU}, some_facts(), EnvironmentFault,
     "--gpus=0 requests devices, but this host has no"),
    ({"devices": "0", **ON_GPU, "dry_run": "table"}, some_facts(), EnvironmentFault,
     "; FLEETRUN_ASSUME_DEVICES=gpu:8 plans as if"),
    ({"devices": "1", "device_kind": "spae", "settings": (Setting("spares", "0", "default"),)},
     some_facts(), UsageError, "no such option: --spaes; did you mean --spares?"),
    ({"nproc_per_node": "gpu"}, some_facts(), EnvironmentFault,
     "--nproc_per_node=gpu requests devices"),
    ({"devices": "0"}, masked(""), EnvironmentFault, "--devices=0 requests devices, but"),
    ({"devices": "0"}, masked(""), EnvironmentFault, "hides all 8 GPUs"),
    *(({"nproc_per_node": count}, some_facts(4), UsageError, COUNT)
      for count in (0, -1, "two", "0", "-1", "²", "1.5", "")),
    ({"nproc_per_node": "gpu"}, some_facts(device_counts={"npu": 4}), EnvironmentFault,
     "no GPU driver"),
    ({"nproc_per_node": "cpu", "devices": "0"}, some_facts(4), UsageError,
     "names devices, and --nproc_per_node=cpu requests none"),
    ({"devices": "0-2", "nproc_per_node": 2}, some_facts(4), UsageError,
     "3 GPUs cannot be divided evenly among 2 processes"),
    ({"nproc_per_node": 4}, some_facts(2), UsageError,
     "4 processes, 2 devices; add --oversubscribe"),
    ({"devices": "3", "nproc_per_node": 2}, some_facts(4), UsageError,
     "2 processes, 1 device; add --oversubscribe"),
    *(({"backend": backend}, some_facts(gpus), EnvironmentFault,
       f"--backend={backend}: training here runs on")
      for backend, gpus in (("nccl", 0), ("bkcl", 2), ("xccl", 2))),
    ({"backend": "foo"}, some_facts(2), UsageError, "--backend=foo: give one of auto, nccl"),
    ({"devices": "MIG-"}, DIVIDED, UsageError,
     "MIG- matches several devices: MIG-1, MIG-2, MIG-3"),
    ({"devices": "0", "nproc_per_node": 1}, DIVIDED, UsageError,
     "a process sees only one MIG instance; give --nproc_per_node=2."),
    ({}, DIVIDED._replace(environ={CUDA: "MIG-9"}), EnvironmentFault,
     "names MIG-9, which this host does not have"),
    ({"devices": "0", "device_kind": "foo"}, plugged({"FOO_VISIBLE_DEVICES": "4,7"}, foo=2),
     EnvironmentFault, "FOO_VISIBLE_DEVICES does not contain 0; it allows 4"),
    *(({}, plugged({"FOO_VISIBLE_DEVICES": mask}, foo=count), EnvironmentFault,
       f"names {number}, but Paddle sees {count} through") for mask, count, number in (
        ("0,9", 1, "2 devices"), ("4-7", 1, "4 devices"), ("4,9", 8, "2 devices"))),
    ({}, plugged({"FOO_VISIBLE_DEVICES": "[0,1]"}, foo=8), EnvironmentFault, "names no device"),
    ({"devices": "0", **chosen("gpu")}, plugged(mlu=2), EnvironmentFault,
     "this host has no GPU driver"),
    (chosen("npu", "$PADDLE_XCCL_BACKEND"), NO_NPUS, EnvironmentFault,
     f"{NO_PLUGIN}; leave the option out to train on the CPU."),
    *((fields, SDAAS, EnvironmentFault, "leave the option out to train on SDAAs")
      for fields in ({"devices": "0", "device_kind": "npu"}, chosen("npu"))),
    # An option is called as it was written beside the kind of a variable.
    ({"devices": "9", "device_kind": "gcu", "settings": (
        Setting("device_kind", "gcu", "$PADDLE_XCCL_BACKEND"),
        Setting("gcus", "9", "command line"))}, plugged(gcu=2), EnvironmentFault,
     "--gcus=9: this host has 2 GCUs"),
]
# fmt: on


@pytest.mark.parametrize(("fields", "facts", "expected", "also"), SHARED)
def test_devices_are_shared_out(
    fields: Mapping[str, Any], facts: Facts, expected: list[list[int]], also: Mapping[str, Any]
) -> None:
    shares = share(a_request(**fields), facts)
    assert indexes(shares) == expected
    for name, value in also.items():
        match name:
            case "ids":
                assert ids(shares) == value
            case "says":
                assert value in " ".join(shares.notes)
            case _:
                assert getattr(shares, name) == value


@pytest.mark.parametrize(("fields", "facts", "kind", "sentence"), REFUSED)
def test_what_cannot_be_shared_out_is_one_sentence(
    fields: Mapping[str, Any], facts: Facts, kind: type[FleetrunError], sentence: str
) -> None:
    with pytest.raises(kind, match=re.escape(sentence)) as refused:
        share(a_request(**fields), facts)
    assert type(refused.value) is kind
    is_whole = str(refused.value).startswith(sentence)
    assert is_whole or not sentence.startswith("--") or "asks" in sentence


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
        shares = share(request, facts)
    except FleetrunError as error:
        assert str(error).endswith(".")  # noqa: PT017 - not the only outcome
        return
    visible = list(range(count)) if mask is None else mask
    flat = [device for group in shares.groups for device in group]
    assert all(str(visible[device.ordinal]) == device.id for device in flat)
    assert len({len(group) for group in shares.groups}) == 1
    assert oversubscribe or len(set(flat)) == len(flat)
    if isinstance(nproc, int):
        assert len(shares.groups) == nproc
    assert (shares.kind == "cpu") == (not flat) == (shares.backend == "gloo")
    if wanted is not None:
        assert {device.id for device in flat} <= set(map(str, wanted))
