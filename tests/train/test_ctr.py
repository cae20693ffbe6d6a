"""The example with parameter servers: real Paddle 2.6, two servers, two trainers."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, NamedTuple

import lab
import pytest
from training import PYTHONS, ROOT, evidence, launch_on, run_marked
from waiting import TRAINING_S

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

SCRIPT = ROOT / "scripts" / "train_ctr.py"
PYTHON = PYTHONS["2.6.2"]
EPOCH = re.compile(r"^trainer (\d)/2 epoch \d+/\d+: loss ([\d.]+)", re.MULTILINE)
END = re.compile(
    r"^trainer (\d)/2 held-out AUC ([\d.]+), baseline ([\d.]+) .*; log loss ([\d.]+), "
    r"baseline ([\d.]+)",
    re.MULTILINE,
)
# Enough to see that it learns, even on a busy machine, where gradients come late.
# With larger steps, late gradients make the chances jump now and then.
EPOCHS = ("--epochs", "3", "--lr", "0.01")
# Now and then a barrier of Paddle's servers (2.6.2, `BarrierTable`) wakes only one of its trainers:
# two handlers of a server waited there although nobody else was to come.
AGAIN = ("--hang_timeout=60", "--max_restart=1")


class Trained(NamedTuple):
    """What a trainer printed about its learning."""

    losses: tuple[float, ...]
    auc: float
    baseline_auc: float
    log_loss: float
    baseline_log_loss: float


def trained(text: str, trainer: int) -> Trained:
    """Read what TRAINER wrote."""
    losses = tuple(float(loss) for rank, loss in EPOCH.findall(text) if rank == str(trainer))
    ends = [end[1:] for end in END.findall(text) if end[0] == str(trainer)]
    assert len(ends) == 1, text
    auc, baseline_auc, log_loss, baseline_log_loss = map(float, ends[0])
    return Trained(losses, auc, baseline_auc, log_loss, baseline_log_loss)


def logs_of(folder: Path, trainers: int) -> list[str]:
    """Return what the last attempt of each of TRAINERS wrote in FOLDER."""
    runs = folder / "log" / "latest"
    # A later attempt's name is longer.
    return [max(runs.glob(f"workerlog.{rank}*")).read_text() for rank in range(trainers)]


def assert_learned(texts: list[str]) -> None:
    """Check that the trainers' TEXTS tell of a training that worked."""
    trainers = [trained(text, trainer) for trainer, text in enumerate(texts)]
    # A late trainer starts with what the other has learned: only the first begins at the top.
    worst = max(trainer.losses[-1] for trainer in trainers)
    assert worst < 0.5 * max(trainer.losses[0] for trainer in trainers)
    for trainer in trainers:
        assert trainer.auc > 0.95
        assert trainer.baseline_auc < 0.85
        assert trainer.log_loss < 0.6 * trainer.baseline_log_loss


def geo(folder: Path) -> tuple[str, ...]:
    """Return the options for a strategy, written into FOLDER, that must be in effect."""
    path = folder / "geo.yaml"
    path.write_text("strategy:\n  a_sync_configs:\n    k_steps: 20\n")
    return f"--strategy={path}", "--strategy_strict"


def assert_geo(folder: Path, trainer: int, log: str) -> None:
    """Check that the strategy was in effect in TRAINER, which wrote LOG, launched in FOLDER."""
    # Paddle prints this when it starts the communicator.
    assert "'communicator_max_merge_var_num': '20'" in log
    (field,) = evidence(folder / "log" / "latest", trainer)["fields"]
    assert (field["status"], field["in_effect"]) == ("effective", {"k_steps": 20})


@pytest.mark.multinode
@pytest.mark.skipif(bool(lab.missing()), reason=lab.missing() or "")
def test_on_two_hosts_a_strategy_makes_servers_and_trainers_exchange_every_20_steps(
    tmp_path: Path,
) -> None:
    both = f"{lab.SUBNET}.1,{lab.SUBNET}.2"
    options = (f"--servers={both}", f"--workers={both}", *AGAIN, *geo(tmp_path))
    words = (*options, str(SCRIPT), *EPOCHS)
    with lab.hosts(2, tmp_path) as hosts:
        launchers = [launch_on(host, *words, version="2.6.2") for host in hosts]
        codes = [launcher.wait(TRAINING_S) for launcher in launchers]
        assert codes == [0, 0], "\n".join((host.folder / "output").read_text() for host in hosts)
        logs = [log for host in hosts for log in logs_of(host.folder, 1)]
        assert_learned(logs)
        for trainer, host in enumerate(hosts):
            assert_geo(host.folder, trainer, logs[trainer])
        assert not any(host.processes() for host in hosts)


@pytest.mark.parametrize(
    ("python", "variables", "says"),
    [
        (
            sys.executable,
            {"TRAINING_ROLE": "TRAINER", "PYTHONWARNINGS": "ignore"},
            "was built without the parameter server core; use paddlepaddle 2.6.2",
        ),
        (PYTHON, {}, "fleetrun --server_num 2 --worker_num 2"),
    ],
    ids=["without servers", "alone"],
)
def test_what_cannot_train_says_what_it_needs(
    python: Path, variables: dict[str, str], says: str, tmp_path: Path
) -> None:
    done, _ = run_marked(python, [SCRIPT], tmp_path, **variables)
    assert done.returncode == 1
    assert says in done.stdout
    assert "Traceback" not in done.stdout
