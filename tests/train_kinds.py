"""Launches of train/models/kinds.py, which trains models of many kinds one after the other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from device_strategies import merged_steps
from training import PYTHONS, made_once, run

if TYPE_CHECKING:
    from device_strategies import Document

MODELS = Path(__file__).parent / "train" / "models"
SCRIPT = MODELS / "kinds.py"
# Several actions within an update, or on gradients by hand, mean something else if updates are
# merged without the script's knowledge.
NOT_MERGED = {
    *("early", "skipped", "by_hand", "mixed"),
}
# What Paddle's own reducer refuses: outputs of which a loss uses a part, and layers that a nested
# backward recomputes.
REFUSED_BY_PADDLE = {"twofold", "reentrant"}
_NEEDS_OURS = ("bf16_allreduce", "use_hierarchical_allreduce", "gradient_merge")


class Launch(NamedTuple):
    """What the ranks of one launch reported, and what it printed."""

    reports: list[dict[str, Any]]
    output: str


def launch(
    python: Path,
    folder: Path,
    *words: str | Path,
    strategy: str = "",
    nranks: int = 2,
    accumulate: int = 4,
    is_strict: bool = True,
    exit_code: int = 0,
) -> Launch:
    """Train on NRANKS with the YAML STRATEGY; WORDS are the script's.

    IS_STRICT: what has no effect fails the launch. EXIT_CODE: the expected one.
    """
    # This uses Paddle's own reducer; but fleet's gloo groups, which Paddle connects through one
    # store, stay apart: otherwise a dozen of them in one process hardly ever connect.
    asked: list[str | Path] = ["--check_ranks=-1"]
    if strategy:
        (folder / "strategy.yaml").write_text(strategy, encoding="utf-8")
        asked = ["--strategy", folder / "strategy.yaml", *["--strategy_strict"] * is_strict]
    argv = ["-m", "fleetrun", f"--nproc_per_node={nranks}", *asked, SCRIPT]
    done = run(
        python,
        [*argv, f"--accumulate={accumulate}", *words],
        folder,
        OUTPUT=str(folder / "report"),
    )
    assert done.returncode == exit_code, done.stdout
    if exit_code:
        return Launch([], done.stdout)
    reports = [json.loads((folder / f"report.{rank}").read_text()) for rank in range(nranks)]
    return Launch(reports, done.stdout)


def names() -> list[str]:
    """Return the kinds that one process can also train alone, in a fixed order."""
    kinds = ["in_turns"]
    for part in ("architectures", "loops"):
        text = (MODELS / f"{part}.py").read_text(encoding="utf-8")
        models, _, listed = text.partition("KINDS.update(")
        kinds += map(str.lower, re.findall(r"@trained\(.*\)\nclass (\w+)", models))
        kinds += re.findall(r"\w+", listed.partition(" in (")[2])
    return kinds


def assert_as_alone(
    alone: dict[str, Any], ranks: list[dict[str, Any]], kinds: list[str], exactness: float = 2e-6
) -> None:
    """Compare KINDS on all RANKS with the results of one process ALONE with all batches."""
    for name in kinds:
        expected = alone[f"alone {name}"]
        for rank, report in enumerate(ranks):
            assert report[name]["weights"] == pytest.approx(expected["weights"], abs=exactness), (
                name
            )
            assert report[name]["weights"] == ranks[0][name]["weights"], (rank, name)
            if "own" in expected:
                assert report[name]["own"] == pytest.approx(expected["own"][rank], abs=exactness), (
                    name
                )


# And the kinds that one process trains the same way.
ON_PLUGINS = [
    *names(),
    *("transformer", "recomputed", "reentrant", "tied", "straight", "strided", "frozen"),
    *("refrozen", "thawed", "penalty", "accumulated", "groups", "paired"),
]
_FOR_TWO_RANKS = {"in_turns", "each_rank"}


def alone(factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what one process on the CPU reports of all kinds ON_PLUGINS, without a strategy."""
    words = ("--kinds=groups", f"--alone={','.join(ON_PLUGINS)}")

    def train(folder: Path) -> Any:
        return launch(PYTHONS["3.3.1"], folder, *words, nranks=1).reports[0]

    trained: dict[str, Any] = made_once(factory, "alone", train)
    return trained


def is_paddles(document: Document) -> bool:
    """Whether Paddle's own reducer averages small gradients with the strategy DOCUMENT."""
    asked = document["strategy"]
    is_ours = asked.get("nccl_comm_num") == 2 or any(
        asked.get(name) is True for name in _NEEDS_OURS
    )
    return not is_ours


def on_plugins(document: Document, nranks: int) -> list[str]:
    """Return the kinds that NRANKS devices of plug-ins can train with the strategy DOCUMENT."""
    left_out = NOT_MERGED if merged_steps(document) > 1 else set()
    left_out = left_out | (_FOR_TWO_RANKS if nranks > 2 else set())
    if is_paddles(document):
        left_out |= REFUSED_BY_PADDLE
    return [name for name in ON_PLUGINS if name not in left_out]
