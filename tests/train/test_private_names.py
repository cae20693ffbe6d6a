"""Trainings with a Paddle that lacks a private name."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

import ports
import pytest
from training import MODELS, PYTHONS, ROOT
from waiting import TRAINING_S

from fleetrun.inject.paddle_api.private_names import (
    LOSSES,
    NAMES,
    SERVERS,
    STATIC,
    STATIC_CPU,
    STRATEGY,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

# What the strategies of this test do not need.
UNASKED = {LOSSES, SERVERS}
ONLY_STATIC = {STATIC, STATIC_CPU}


def cases(kind: str) -> list[dict[str, Any]]:
    """Return a case for a name of each capability, after one with all and one without fleetrun."""
    is_static = kind == "static"
    wanted: list[dict[str, Any]] = [{"name": None}]
    seen = set()
    for place, name in enumerate(NAMES):
        if is_static is not bool(ONLY_STATIC & set(name.capabilities)):
            continue
        if name.capabilities in seen:
            continue
        seen.add(name.capabilities)
        wanted.append({"name": place})
    trained = [{"name": None, "is_armed": False}]
    trained += [{**case, "is_armed": True} for case in wanted]
    return [
        {**case, "is_static": is_static, "environ": environ(1 + (not is_static))}
        for case in trained
    ]


def environ(ranks: int) -> list[dict[str, str]]:
    """Return the variables of each of RANKS."""
    master, *ends = (f"127.0.0.1:{port}" for port in ports.free(ranks + 1))
    return [
        {
            "PADDLE_MASTER": master,
            "PADDLE_TRAINERS_NUM": str(ranks),
            "PADDLE_TRAINER_ENDPOINTS": ",".join(ends),
            "PADDLE_DISTRI_BACKEND": "gloo",
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_CURRENT_ENDPOINT": end,
        }
        for rank, end in enumerate(ends)
    ]


@pytest.mark.parametrize(("version", "kind"), [("3.3.1", "dynamic"), ("2.6.2", "static")])
def test_a_paddle_without_a_name_trains_as_it_does_without_fleetrun(
    version: str, kind: str, tmp_path: Path
) -> None:
    asked = cases(kind)
    (tmp_path / "cases").write_text(json.dumps(asked))
    subprocess.run(
        [
            PYTHONS[version],
            "-W",
            "ignore",
            MODELS / "without.py",
            tmp_path / "cases",
            tmp_path / "results",
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "FLAGS_enable_pir_api": "0",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        cwd=tmp_path,
        timeout=TRAINING_S,
        check=True,
    )
    document = json.loads((tmp_path / "results").read_text())
    plain, merged = (result["numbers"][0] for result in document[:2])
    assert plain != pytest.approx(merged, abs=1e-3)
    table = {field["name"]: field["status"] for field in document[1]["proof"]["fields"]}
    assert table["gradient_merge"] == "effective"
    wrong = []
    trained = 0
    for case, result in zip(asked[2:], document[2:], strict=True):
        trained += not any(result["codes"])
        is_asked = not set(NAMES[case["name"]].capabilities) <= UNASKED
        why = fault(result, plain, merged, is_asked=is_asked, is_static=kind == "static")
        if why:
            wrong.append(f"{NAMES[case['name']]}: {why}\n{result['said'][-2000:]}")
    assert not wrong, "\n\n".join(wrong)
    # Paddle itself needs most of the names to train.
    assert trained


def fault(
    result: dict[str, Any],
    plain: list[float],
    merged: list[float],
    *,
    is_asked: bool,
    is_static: bool,
) -> str:
    """Return the error in the RESULT of a case, or ""; PLAIN and MERGED are the right weights."""
    if any(result["codes"]):
        return "" if any(result["alone"]) else "Paddle trains without this name, fleetrun does not"
    first, *others = result["numbers"]
    if any(numbers != first for numbers in others):
        return "the ranks differ"
    heads = ("lacks something here that fleetrun needs", "differs from the versions")
    notes = [note for note in result["proof"]["notes"] if any(head in note for head in heads)]
    if bool(notes) is not is_asked or any(
        not any(text in note for name in NAMES for text in name.capabilities) for note in notes
    ):
        return f"the notes are {notes}"
    fields = {field["name"]: field for field in result["proof"]["fields"]}
    # Where updates cannot be counted, there is no row.
    merging = fields.get("gradient_merge", {"status": "", "reason": "in this Paddle "})
    is_merged = merging["status"] == "effective"
    if not is_merged and not merging["reason"].startswith("in this Paddle "):
        return f"the table says {fields}"
    if is_static and not any(STRATEGY in note for note in notes):
        # Paddle merges by itself; where programs cannot be read, nothing has counted that.
        is_merged = True
    expected = merged if is_merged else plain
    return "" if first == pytest.approx(expected, abs=1e-5) else f"{first} is not {expected}"
