"""The served metrics: every known figure, by the names in the dashboard."""

from __future__ import annotations

import json
import re
from pathlib import Path

from runfolders import a_record, a_run

from fleetrun.sinks.metrics import openmetrics

ROOT = Path(__file__).parents[3]


def samples() -> dict[str, list[tuple[dict[str, str], float]]]:
    values: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in openmetrics.families(a_run(), a_record()):
        for sample in family.samples:
            values.setdefault(sample.name, []).append((sample.labels, sample.value))
    return values


def test_gpus_and_ranks_are_told_apart_by_labels() -> None:
    served = samples()
    [(labels, value)] = served["fleetrun_gpu_use_ratio"]
    assert value == 0.87
    assert labels == {
        "job": "job",
        "host": "h",
        "gpu": "0",
        "uuid": "GPU-a",
        "name": "H",
        "ranks": "0",
    }
    assert [value for _, value in served["fleetrun_gpu_power_watts"]] == [412.5]
    assert [labels["rank"] for labels, _ in served["fleetrun_rank_step"]] == ["0"]
    # The step of rank 1 is unknown.
    assert [labels["rank"] for labels, _ in served["fleetrun_rank_threads"]] == ["0", "1"]


def test_the_dashboard_asks_for_what_is_served() -> None:
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text(encoding="utf-8"))
    asked = set()
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            names = re.findall(r"fleetrun_\w+", target["expr"])
            assert names
            asked |= set(names)
    served = set(samples())
    assert asked <= served
    assert len(asked) >= 10
