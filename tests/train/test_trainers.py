"""The Trainers of PaddleNLP and PaddleFormers from PyPI, each in an environment of its own."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import devices
import pytest
from checkout import environ
from commandline import FLEETRUN, fleetrun
from training import MODELS, PYTHONS
from waiting import TRAINING_S

pytestmark = [pytest.mark.train, pytest.mark.long]


class Library(NamedTuple):
    """A library, its Paddle, and the pins that make its packages of that time fit together."""

    paddle: str
    packages: tuple[str, ...]
    words: tuple[str, ...]


LIBRARIES = {
    "paddleformers": Library(
        "3.3.1",
        ("paddleformers==1.2.0", "numpy<2", "pyarrow<22", "pandas<3"),
        # Its default, split parameters, needs 16 bits; its clipping fails without sharding.
        (
            *("--amp_master_grad=False", "--split_param=False", "--max_grad_norm=0"),
            # Its other format needs a GPU to load.
            "--save_checkpoint_format=unified_checkpoint",
            "--load_checkpoint_format=unified_checkpoint",
        ),
    ),
    "paddlenlp": Library(
        "2.6.2",
        (
            *("paddlenlp==2.8.1", "huggingface_hub<0.26", "datasets==2.20.0", "pyarrow<17"),
            *("pandas<2.3", "aistudio-sdk<0.3", "protobuf>=4.21,<5", "numpy<2", "setuptools<81"),
            *("scipy<1.13", "scikit-learn<1.5"),
        ),
        (),
    ),
}
# Paddle 2.6.2 has symbols of zlib that Python's zlib would find in the middle of its work.
ZLIB = 'import zlib; zlib.decompress(zlib.compress(b""))\n'


# Each environment takes minutes and a gigabyte: checkouts share them.
CACHE = Path.home() / ".cache" / "fleetrun-tests"


@pytest.fixture(scope="session", params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> str:
    """Return the name of a library whose environment is set up; skip where PyPI lacks it."""
    name = str(request.param)
    of = LIBRARIES[name]
    folder = CACHE / name
    folder.mkdir(parents=True, exist_ok=True)
    stamp = folder / "stamp"
    base = PYTHONS[of.paddle]
    wanted = "\n".join((str(base.resolve()), of.paddle, *of.packages))
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != wanted:
            subprocess.run([base, "-m", "venv", "--clear", folder], check=True)
            pip = [python(name), "-m", "pip", "install", "-q", f"paddlepaddle=={of.paddle}"]
            done = subprocess.run([*pip, *of.packages], capture_output=True, text=True, check=False)
            if done.returncode:
                why = done.stderr.strip().splitlines()[-1]
                pytest.skip(f"{name} cannot be installed: {why}")
            (packages,) = folder.glob("lib/python3.*/site-packages")
            (packages / "zlib-first.pth").write_text(ZLIB)
            stamp.write_text(wanted)
    return name


def python(name: str) -> str:
    return str(CACHE / name / "bin" / "python")


def words(name: str, *more: str) -> list[str]:
    """Return the script and its words: eight updates of a tiny model."""
    return [
        *(str(MODELS / "trainer.py"), f"--library={name}"),
        *("--output_dir=out", "--device=cpu", "--max_steps=8", "--per_device_train_batch_size=4"),
        *("--logging_steps=2", "--learning_rate=1e-3", "--save_steps=100", "--disable_tqdm=True"),
        *("--report_to=none", *LIBRARIES[name].words, *more),
    ]


def launched(name: str, folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return trained(*argv, folder=folder, FLEETRUN_PYTHON=python(name), OMP_NUM_THREADS="1")


def trained(*argv: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `fleetrun WORDS` with a longer timeout than elsewhere."""
    return subprocess.run(
        [*FLEETRUN, *argv],
        cwd=folder,
        env=environ(**variables),
        capture_output=True,
        text=True,
        timeout=TRAINING_S,
        check=False,
    )


def weights(text: str) -> str:
    return str(re.findall(r"^weights (\S+)", text, re.MULTILINE)[-1])


KINDS = {
    "pretrain": (),
    "accumulated": ("--gradient_accumulation_steps=2",),
    "recomputed": ("--recompute=True",),
    "lora": ("--lora",),
    "evaluated": ("--do_eval=True", "--evaluation_strategy=steps", "--eval_steps=3"),
    "sharded": ("--sharding=stage1",),
}
_LAYERS = ("--recompute_granularity=full", "--recompute_method=uniform", "--recompute_num_layers=1")
RENAMED = {"paddleformers": {"--recompute=True": _LAYERS}}


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_with_a_strategy_trains_as_plain_paddle(
    library: str, kind: str, tmp_path: Path
) -> None:
    renamed = RENAMED.get(library, {})
    more = [word for option in KINDS[kind] for word in renamed.get(option, (option,))]
    options = ["--strategy=recommended", "--nproc_per_node=2", "--updates=4"]
    done = launched(library, tmp_path, "verify", *options, *words(library, *more, "--max_steps=64"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Equal: the weights and losses are those of plain Paddle" in done.stdout


@pytest.mark.parametrize(
    ("option", "word"),
    [
        # With this the Trainer marks complete checkpoints.
        ("--env=FLAG_LLM_PDC=1", "--save_steps=3"),
        ("--resume_from=out", "--resume_from_checkpoint={checkpoint}"),
    ],
)
def test_a_killed_trainer_resumes_from_its_last_whole_checkpoint(
    library: str, option: str, word: str, tmp_path: Path
) -> None:
    options = ["--max_restart=1", "--nproc_per_node=2", option, "--strategy=recommended"]
    endings = []
    for name, kill_at in (("undisturbed", 0), ("killed", 7)):
        folder = tmp_path / name
        folder.mkdir()
        if kill_at:
            # A Trainer that was killed while it saved leaves this.
            partial = folder / "out" / "checkpoint-7"
            partial.mkdir(parents=True)
            (partial / "training_args.bin").write_bytes(b"\x80")
        script = words(library, "--save_steps=3", word, f"--kill_at={kill_at}")
        done = launched(library, folder, *options, *script)
        assert done.returncode == 0, done.stdout + done.stderr
        endings.append(weights(done.stdout))
        begins = re.findall(r"^begins with (?:\S*/)?(\S+)", done.stdout, re.MULTILINE)
        assert begins == (["None", "checkpoint-6"] if kill_at else ["None"])
    assert endings[0] == endings[1]


CONFIG = """
train_dataset_type: messages
eval_dataset_type: messages
train_dataset_path: ./train.jsonl
train_dataset_prob: "1.0"
eval_dataset_path: ./train.jsonl
eval_dataset_prob: "1.0"
max_seq_len: 64
packing: false
model_name_or_path: ./model
convert_from_hf: true
_attn_implementation: eager
stage: SFT
fine_tuning: full
do_train: true
per_device_train_batch_size: 2
max_steps: 6
logging_steps: 1
learning_rate: 1.0e-3
save_strategy: "no"
output_dir: ./out
device: npu
sharding: ""
split_param: false
amp_master_grad: false
max_grad_norm: 0
bf16: false
fp16_opt_level: O1
compute_type: float32
disable_tqdm: true
load_via_cpu: false
continue_training: false
"""


@pytest.mark.parametrize("library", ["paddleformers"], indirect=True)
def test_the_real_cli_launches_by_fleetrun(library: str, tmp_path: Path) -> None:
    own = Path(python(library)).parent
    path = f"{own}:{os.environ['PATH']}"
    subprocess.run([python(library), MODELS / "sentences.py"], cwd=tmp_path, check=True)
    (tmp_path / "sft.yaml").write_text(CONFIG)
    train = ("paddleformers-cli", "train", "sft.yaml")
    # On a host without GPUs the CLI writes `--gpus --master ...`.
    done = fleetrun("exec", *train, folder=tmp_path, PATH=path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2, done.stdout
    assert "when they find no device on this host" in done.stderr
    done = fleetrun("exec", *train, folder=tmp_path, PATH=path, CUDA_VISIBLE_DEVICES="0,1")
    assert done.returncode == 3, done.stdout
    assert "--gpus=0,1 requests devices, but this host has no GPU driver" in done.stderr
    with devices.on("npu"):
        variables = {**devices.variables(own / "python"), "ASCEND_RT_VISIBLE_DEVICES": "0,1"}
    words = ("exec", "--strategy=recommended", *train)
    done = trained(*words, folder=tmp_path, PATH=path, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "21 gradients in 1 allreduce" in done.stderr
    assert "6 steps (exit code 0)" in done.stderr
    proof = ("verify", "--strategy=recommended", "--updates=4", "exec", *train)
    done = trained(*proof, folder=tmp_path, PATH=path, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Equal: the weights and losses are those of plain Paddle" in done.stdout
