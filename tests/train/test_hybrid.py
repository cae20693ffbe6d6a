"""Hybrid-parallel jobs (fleet.init with hybrid_configs) against one process with all the data.

Those that Paddle's builds for CPUs refuse run on the device under test, whose witness counts what
each group sends.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import devices
import pytest
import yaml
from training import PYTHONS, ROOT, evidence, made_once, train

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import TypeAlias

    Alone: TypeAlias = Callable[..., str]

pytestmark = pytest.mark.train

AXES = ("dp", "mp", "pp", "sharding", "sep")
MERGED = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
STRATEGIES: dict[str, dict[str, Any] | None] = {
    "none": None,
    "merged": MERGED,
    "small": {"fuse_grad_size_in_num": 3, "nccl_comm_num": 2},
    **{
        name: yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())["strategy"]
        for name in ("recommended", "comm_fusion", "overlap")
    },
}
# Name: the layout, and what rank 0 sends without a strategy for gradients (and norms) in each
# update, to the group of its first axis among dp, sharding and sep.
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "dp": ({"dp": 2}, {"all_reduce": 1}),
    "sep": ({"sep": 2}, {"all_reduce": 1}),
    "sharding": ({"sharding": 2}, {"reduce": 8, "all_reduce": 2}),
    "sharding of 4": ({"sharding": 4}, {"reduce": 8, "all_reduce": 2}),
    "fused sharding": (
        {"sharding": 2, "sharding_configs": {"tensor_fusion": True}},
        {"reduce": 2, "all_reduce": 2},
    ),
    "split sharding": (
        {"sharding": 2, "main_grad": True, "sharding_configs": {"split_param": True}},
        {"reduce_scatter": 1, "all_reduce": 2},
    ),
    # Paddle itself overlaps with backward here.
    "overlapping sharding": (
        {"sharding": 2, "main_grad": True, "sharding_configs": {"comm_overlap": True}},
        {"reduce": 2, "all_reduce": 2},
    ),
    "overlapping split sharding": (
        {
            "sharding": 2,
            "main_grad": True,
            "sharding_configs": {"split_param": True, "comm_overlap": True},
        },
        {"reduce_scatter": 1, "all_reduce": 2},
    ),
    "overlapping sharding x pp": (
        {
            "sharding": 2,
            "pp": 2,
            "accumulate": 2,
            "main_grad": True,
            "pp_configs": {"sharding_comm_overlap": True},
        },
        {"reduce": 2, "all_reduce": 2},
    ),
    "stage 2": ({"sharding": 2, "stage": 2}, {"all_reduce": 2}),
    "stage 3": ({"sharding": 2, "stage": 3}, {}),
    "mp": ({"mp": 2}, {}),
    "pp": ({"pp": 2, "accumulate": 2}, {}),
    "dp x sharding": ({"dp": 2, "sharding": 2}, {"all_reduce": 1}),
    "dp x mp": ({"dp": 2, "mp": 2}, {"all_reduce": 1}),
    "dp x pp": ({"dp": 2, "pp": 2, "accumulate": 2}, {"all_reduce": 1}),
    "dp x sep": ({"dp": 2, "sep": 2}, {}),
    "sharding x sep": ({"sharding": 2, "sep": 2}, {}),
    "sep x mp": ({"sep": 2, "mp": 2}, {}),
    "sep x pp": ({"sep": 2, "pp": 2, "accumulate": 2}, {}),
    "dp x stage 2": ({"dp": 2, "sharding": 2, "stage": 2}, {}),
    "dp x stage 3": ({"dp": 2, "sharding": 2, "stage": 3}, {}),
    "dp x sharding x pp": ({"dp": 2, "sharding": 2, "pp": 2, "accumulate": 2}, {}),
    "sharding x mp": ({"sharding": 2, "mp": 2}, {"reduce": 8, "all_reduce": 2}),
    "sharding x pp": ({"sharding": 2, "pp": 2, "accumulate": 2}, {"reduce": 4, "all_reduce": 2}),
    "mp x pp": ({"mp": 2, "pp": 2, "accumulate": 2}, {}),
    "dp x mp x pp": ({"dp": 2, "mp": 2, "pp": 2, "accumulate": 2}, {"all_reduce": 1}),
    "dp x sharding x mp": ({"dp": 2, "sharding": 2, "mp": 2}, {"all_reduce": 1}),
    "sharding x mp x pp": (
        {"sharding": 2, "mp": 2, "pp": 2, "accumulate": 2},
        {"reduce": 4, "all_reduce": 2},
    ),
}
PAGE = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
# What it says for each layout of the communication fields and of gradient_merge.
TOLD = {
    name: cells
    for line in PAGE.partition("\n## Hybrid parallel jobs\n")[2].splitlines()
    if line.startswith("| `") and len(line.split(" | ")) == len(("layout", "fields", "merge"))
    for names, *cells in [line.strip("| ").split(" | ")]
    for name in re.findall("`([^`]+)`", names)
}
NO_MODEL = "no DataParallel averages gradients here: Paddle sums them itself, or nobody does"
# What the table of a launch says for each of these.
SAID = {
    "in backward": ("effective", ""),
    "Paddle's own": ("no_effect", NO_MODEL),
    "nothing to send": ("no_effect", NO_MODEL),
    "merged": ("effective", "2 micro-steps made one update"),
}
# What runs without --long: where (a Paddle on CPUs, or a device), the layout, the strategy.
SHORT = [
    ("2.6.2", "dp x sep", "merged"),
    ("npu", "dp x mp", "small"),
    ("npu", "split sharding", "small"),
]
UPDATES = 3
PYTHON = PYTHONS["3.3.1"]


# Of a layout, what changes the weights of one process with all the data.
ALONE: list[dict[str, int]] = [
    {},
    {"merge": 2},
    {"accumulate": 2},
    {"merge": 2, "accumulate": 2},
    {"infinite": 2},
    {"merge": 2, "infinite": 3},
]


@pytest.fixture
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Return a function that returns the report of one process that has trained a layout's model.

    One process trains those of all layouts, once.
    """

    def trained(layout: dict[str, Any], version: str = "3.3.1") -> str:
        def make(folder: Path) -> list[str]:
            more = {"LAYOUT": json.dumps(ALONE)}
            with devices.on(""):
                (made,) = train(
                    PYTHONS[version], "hybrid.py", folder / "alone", None, nranks=1, more=more
                )
            files = [folder / f"{number}.json" for number in range(len(ALONE))]
            for file, report in zip(files, made, strict=True):
                file.write_text(json.dumps(report))
            return [*map(str, files)]

        kept = {
            name: layout[name] for name in layout if name in ("merge", "accumulate", "infinite")
        }
        return str(made_once(tmp_path_factory, f"hybrid-{version}", make)[ALONE.index(kept)])

    return trained


def _cases() -> list[Any]:
    return [
        pytest.param(*case, marks=() if case in SHORT else pytest.mark.long)
        for name, (layout, _) in LAYOUTS.items()
        for place in ("npu", *PYTHONS)
        # Paddle has neither these kernels nor these collectives on CPUs.
        if place == "npu" or not ({"mp", "pp", "stage", "sharding_configs"} & {*layout})
        for strategy in STRATEGIES
        for case in [(place, name, strategy)]
    ]


@pytest.mark.parametrize(("place", "name", "strategy"), _cases())
def test_a_hybrid_job_trains_as_one_process(
    place: str, name: str, strategy: str, alone: Alone, tmp_path: Path
) -> None:
    layout, sent = LAYOUTS[name]
    asked = resolved(STRATEGIES[strategy])
    expected = TOLD[name][strategy == "merged"]
    if expected == "merged":
        layout = {**layout, "merge": 2}
    version = "3.3.1" if place == "npu" else place
    python = PYTHONS[version]
    witness = tmp_path / "witness"
    witness.mkdir()
    nranks = math.prod(layout.get(axis, 1) for axis in AXES)
    on_device = devices.on("npu", witness=witness, count=max(nranks, 4))
    more = {**_told(layout), "ALONE": alone(layout, version)}
    with on_device if place == "npu" else devices.on(""):
        if expected == "refused":
            with pytest.raises(AssertionError, match=r"gradient_merge: .* this cannot be merged"):
                train(python, "hybrid.py", tmp_path / "ours", asked, nranks=nranks, more=more)
            return
        ranks = train(python, "hybrid.py", tmp_path / "ours", asked, nranks=nranks, more=more)
    for report in ranks:
        assert report["apart"] < 2e-6
        assert report["moved"] > 1e-2
    if not asked:
        assert_sent(sent, ranks[0]["group"], witness, place)
        return
    proofs = [evidence(tmp_path / "ours", rank) for rank in range(nranks)]
    assert [proof["failures"] for proof in proofs] == [[]] * nranks
    assert [report["updates"] for report in ranks] == [UPDATES] * nranks
    status, words = SAID[expected]
    for fields in (proof["fields"] for proof in proofs):
        assert any(words in field["reason"] + field["evidence"] for field in fields), fields
        for field in fields:
            # Except where Paddle applies it, or it makes no difference.
            is_paddles = field["evidence"].startswith("by Paddle's own")
            assert is_paddles or field["status"] in (status, "no_difference"), field
    if expected == "merged":
        # One communication per round.
        assert_sent(sent, ranks[0]["group"], witness, place, is_most=True)


@pytest.mark.parametrize("version", ["3.3.1", pytest.param("2.6.2", marks=pytest.mark.long)])
def test_gradients_that_a_trainer_averages_itself_are_merged(
    version: str, alone: Alone, tmp_path: Path
) -> None:
    layout = {"dp": 2, "merge": 2, "by_hand": True}
    more = {**_told(layout), "ALONE": alone(layout, version)}
    ranks = train(PYTHONS[version], "hybrid.py", tmp_path / "ours", MERGED, nranks=2, more=more)
    assert [report["updates"] for report in ranks] == [UPDATES] * 2
    for report in ranks:
        assert report["apart"] < 2e-6
    assert all(
        field["status"] == "effective"
        for rank in range(2)
        for field in evidence(tmp_path / "ours", rank)["fields"]
    )


def test_gradients_that_paddle_takes_out_of_its_buffers_end_the_job(tmp_path: Path) -> None:
    layout = {**LAYOUTS["split sharding"][0], "main_grad": False}
    text = "is not in the buffer that Paddle sends.*Keep gradients in main_grad"
    with devices.on("npu"), pytest.raises(AssertionError, match=text):
        train(PYTHON, "hybrid.py", tmp_path / "ours", {}, more=_told(layout))


def resolved(asked: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the strategy that the launcher resolves ASKED to on one host."""
    on_one_host = {"nccl_comm_num": 1, "use_hierarchical_allreduce": False}
    return asked and {
        key: on_one_host.get(key, value) if value == "auto" else value
        for key, value in asked.items()
    }


def _told(layout: dict[str, Any]) -> dict[str, str]:
    return {"LAYOUT": json.dumps(layout)}


def assert_sent(
    sent: dict[str, int], group: list[int], witness: Path, place: str, *, is_most: bool = False
) -> None:
    """Compare what rank 0 has SENT in each update to GROUP with what the device's witness saw.

    If IS_MOST, it may be less.
    """
    if place != "npu" or not sent:
        return
    seen: dict[str, set[int]] = {}
    for rank in group:
        for call in devices.witnessed(witness, rank):
            seen.setdefault(call.group, set()).add(rank)
    counted = Counter(
        call.operation
        for call in devices.witnessed(witness, group[0])
        if call.dtype == "float32" and call.ranks == len(group) and seen[call.group] == {*group}
    )
    for key, number in sent.items():
        least = UPDATES if is_most else number * UPDATES
        assert least <= counted[key] <= number * UPDATES, counted


@pytest.mark.parametrize(
    ("layout", "strategy"),
    [
        ({**LAYOUTS["fused sharding"][0], "infinite": 2}, "small"),
        ({"dp": 2, "merge": 2, "infinite": 3}, "merged"),
    ],
)
def test_all_ranks_skip_an_update_with_infinite_gradients(
    layout: dict[str, Any], strategy: str, alone: Alone, tmp_path: Path
) -> None:
    # The second update is skipped.
    more = {**_told(layout), "ALONE": alone(layout)}
    with devices.on("npu"):
        ranks = train(PYTHON, "hybrid.py", tmp_path / "ours", STRATEGIES[strategy], more=more)
    for rank, report in enumerate(ranks):
        assert report["apart"] < 2e-6
        assert report["updates"] == UPDATES - 1
        assert evidence(tmp_path / "ours", rank)["counts"]["skipped"] == 1


# Name: the layout, the settings, and their reported outcome.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "without what they need": (
        {"mp": 2},
        {"pp_configs.overlap_p2p_comm": True},
        "no_effect",
        "pp_configs.overlap_p2p_comm needs a pp_degree of 2 or more",
    ),
    "the script's": (
        {"mp": 2, "mp_configs": {"sync_param": False}},
        {"mp_configs.sync_param": True, "mp_configs.sync_grad": True},
        "script",
        "mp_configs.sync_param False, mp_configs.sync_grad True",
    ),
    # This one runs on 2.6.2, which lacks mp's kernels for CPUs.
    "of a newer Paddle": (
        {"dp": 2},
        {"dp_degree": 2, "mp_configs.recompute_allgather": True, "split_norm_comm": True},
        "effective",
        "this Paddle has no mp_configs.recompute_allgather; this Paddle has no split_norm_comm",
    ),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_of_hybrid_configs_take_effect_or_say_why_not(
    case: str, alone: Alone, tmp_path: Path
) -> None:
    layout, asked, status, words = SETTINGS[case]
    version = "2.6.2" if "dp" in layout else "3.3.1"
    python, more = PYTHONS[version], {**_told(layout), "ALONE": alone(layout, version)}
    with devices.on("" if "dp" in layout else "npu"):
        folder = tmp_path / "ours"
        ranks = train(python, "hybrid.py", folder, {"hybrid_configs": asked}, nranks=2, more=more)
    assert max(report["apart"] for report in ranks) < 2e-6
    (field,) = evidence(tmp_path / "ours")["fields"]
    assert field["status"] == status, field
    assert words in field["reason"] + field["evidence"]
    own = [key for key in field["in_effect"] or () if key.endswith("degree") and key not in asked]
    # All ranks list them in the same order.
    assert own == [f"{axis}_degree" for axis in AXES if f"{axis}_degree" in own]
