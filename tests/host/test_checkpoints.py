"""The newest complete checkpoint."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from fleetrun.errors import EnvironmentFault
from fleetrun.host import checkpoints
from fleetrun.model import Checkpoints

if TYPE_CHECKING:
    from pathlib import Path

TENSORS = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "__metadata__": {"x": "y"}}


def safetensors(more: int = 0) -> bytes:
    header = json.dumps(TENSORS).encode()
    return len(header).to_bytes(8, "little") + header + bytes(8 + more)


PICKLED = b"\x80\x04K\x01."
INDEX = json.dumps(
    {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
).encode()
TRAINER = {
    "model-1.safetensors": safetensors(),
    "model-2.safetensors": safetensors(),
    "model.safetensors.index.json": INDEX,
    "optimizer.pdopt": PICKLED,
    "rng_state_0.pth": PICKLED,
    "rng_state_1.pth": PICKLED,
    "training_args.bin": PICKLED,
    "trainer_state.json": b"{}",
}
DISTRIBUTED = {
    "0_0.distcp": PICKLED,
    "1_0.distcp": PICKLED,
    "0.metadata": b"\x80\x04\x8c\x0a0_0.distcp\x8c\x0a1_0.distcp.",
}
MODEL = {"config.json": b"{}", "tokenizer_config.json": b"{}"}
SHARDS = {
    "config.json": b"{}",
    "model-00001-of-00002.safetensors": safetensors(),
    "model-00002-of-00002.safetensors": safetensors(),
    "model.safetensors.index.json": b"{}",
}
# As paddle.save writes that attribute.
SAVES_OPTIMIZER = b"\x80\x04}\x94\x8c\x18ignore_save_lr_and_optim\x94\x89s."


def make(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_bytes(text)


@pytest.mark.parametrize(
    ("files", "change", "why"),
    [
        (TRAINER, {}, ""),
        (TRAINER, {"model-2.safetensors": safetensors(-3)}, "model-2.safetensors is cut off"),
        (TRAINER, {"model-2.safetensors": safetensors()[:20]}, "model-2.safetensors is cut off"),
        (TRAINER, {"model-2.safetensors": None}, "model-2.safetensors is missing, which model."),
        (
            TRAINER,
            {"model.safetensors.index.json": INDEX[:9]},
            "model.safetensors.index.json is cut",
        ),
        (TRAINER, {"optimizer.pdopt": PICKLED[:-1]}, "optimizer.pdopt is cut off"),
        (TRAINER, {"optimizer.pdopt": b""}, "optimizer.pdopt is empty"),
        # paddle.save(..., use_binary_format=True) writes no pickle.
        (TRAINER, {"optimizer.pdopt": bytes(20)}, ""),
        (TRAINER, {"trainer_state.json": None}, "trainer_state is missing"),
        (TRAINER, {"rng_state_0.pth": None, "rng_state_1.pth": None}, ""),
        # PaddleFormers 1.2.
        (TRAINER, {"trainer_state.json": None, "trainer_state.bin": PICKLED}, ""),
        (
            TRAINER,
            {"trainer_state.json": None, "trainer_state.bin": PICKLED[:3]},
            "trainer_state.bin is cut off",
        ),
        (DISTRIBUTED, {}, ""),
        (DISTRIBUTED, {"1_0.distcp": None}, "1_0.distcp is missing, which 0.metadata names"),
        (DISTRIBUTED, {"1_0.distcp": PICKLED[:2]}, "1_0.distcp is cut off"),
        (DISTRIBUTED, {"0.metadata": None}, "the .metadata of its parts is missing"),
        ({}, {}, "it is empty"),
        # A model is saved: its settings, its weights, and an index of their parts.
        (MODEL, {}, "the model's weights are missing"),
        (MODEL, {"model_state.pdparams": PICKLED}, ""),
        (MODEL, {"weights.npy": b"x"}, ""),
        (SHARDS, {}, ""),
        (
            SHARDS,
            {"model.safetensors.index.json": None},
            "model.safetensors.index.json is missing",
        ),
        # PaddleFormers writes the optimizer and its scheduler after trainer_state.
        (TRAINER, {"training_args.bin": SAVES_OPTIMIZER}, "scheduler.pdparams is missing"),
        (TRAINER, {"training_args.bin": SAVES_OPTIMIZER.replace(b"\x89", b"\x88")}, ""),
        (TRAINER, {"training_args.bin": SAVES_OPTIMIZER, "scheduler.pdparams": PICKLED}, ""),
    ],
)
def test_a_checkpoint_is_whole_if_all_its_parts_are(
    tmp_path: Path, files: dict[str, bytes], change: dict[str, bytes | None], why: str
) -> None:
    make(tmp_path / "out/checkpoint-9", TRAINER)
    changed = {name: text for name, text in {**files, **change}.items() if text is not None}
    make(tmp_path / "out/checkpoint-10", changed)
    state = checkpoints.find(str(tmp_path / "out"))
    newest, older = (str(tmp_path / f"out/checkpoint-{number}") for number in (10, 9))
    assert state.newest == (older if why else newest)
    assert [path for path, _ in state.partial] == ([newest] if why else [])
    assert all(fault.startswith(why) for _, fault in state.partial)
    # No file is deleted.
    assert sorted(os.listdir(newest)) == sorted(changed)


def test_dumps_logs_and_pipes_with_a_number_are_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "step_3.pdparams").write_bytes(PICKLED)
    (tmp_path / "step_4").write_bytes(PICKLED)
    for name in ("core.4242", "train.log.7", "events.out.tfevents.17.host.8"):
        (tmp_path / name).write_bytes(b"\x7fELF")
    os.mkfifo(tmp_path / "pipe.9")
    newest = tmp_path / "step_3.pdparams"
    assert checkpoints.find(str(tmp_path)) == Checkpoints(str(newest))


def test_files_and_other_names(tmp_path: Path) -> None:
    (tmp_path / "model-7.pdparams").write_bytes(PICKLED)
    (tmp_path / "model-8.pdparams").write_bytes(PICKLED[:3])
    for name in ("tmp-checkpoint-99", ".checkpoint-98", "runs", "checkpoint-97.new"):
        make(tmp_path / name, TRAINER)
    listed = checkpoints.find(str(tmp_path))
    assert listed.newest == str(tmp_path / "model-7.pdparams")
    assert listed.partial == ((str(tmp_path / "model-8.pdparams"), "model-8.pdparams is cut off"),)
    assert checkpoints.find(str(tmp_path / "nowhere")).newest is None


@pytest.mark.parametrize(
    ("listings", "newest", "partial"),
    [
        # A folder that the hosts share, and folders of their own.
        ([{"step-2": "", "step-3": "empty"}] * 2, "step-2", {"step-3": "empty on host0"}),
        (
            [{"step-2": "", "step-10": ""}, {"step-2": ""}],
            "step-2",
            {"step-10": "it is not there on host1"},
        ),
        ([{"step-2": ""}, {}], None, {"step-2": "it is not there on host1"}),
        ([{}, {}], None, {}),
    ],
)
def test_hosts_agree_on_the_newest_that_is_whole_on_all(
    tmp_path: Path, listings: list[dict[str, str]], newest: str | None, partial: dict[str, str]
) -> None:
    make(tmp_path / "step-2", {"model.pdparams": PICKLED})
    told = [(f"host{place}", tuple(listing.items())) for place, listing in enumerate(listings)]
    agreed = checkpoints.agreed(str(tmp_path), told)
    assert agreed.newest == (None if newest is None else str(tmp_path / newest))
    assert dict(agreed.partial) == {str(tmp_path / name): why for name, why in partial.items()}
    assert checkpoints.listed(str(tmp_path)) == (("step-2", ""),)


def test_a_host_that_came_since_without_the_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="from which the other hosts resume"):
        checkpoints.agreed(str(tmp_path), [("host0", (("step-2", ""),))])
