#!/usr/bin/env python3
"""Train a click-through model with parameter servers: sparse tables there, gradients from here.

The data are real, the clicks are made of them: scikit-learn's 1,797 handwritten digits are each
shown ten candidates, and the candidate that was really written is the one that is "clicked". So
one impression in ten is a click, and its features are what click logs have: variable-length lists
of sparse ids (inked pixels, the candidate, and their crosses).

It knows nothing of the launcher: it reads its role from the environment, as `fleetrun
--server_num 2 --worker_num 2 train_ctr.py` and Paddle's own launchers set it. Servers serve until
the launcher stops them; that is how Paddle does it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import paddle
from paddle.distributed import fleet

PIXELS, GRAYS, CANDIDATES = 64, 17, 10
# Crosses of pixel and candidate know four shades: most of them are seen too rarely for more.
SHADES = 4
# Impressions on which a trainer measures its own loss; all of them would take longer than learning.
SAMPLE = 2000


class Impressions(NamedTuple):
    """Images and the digits that were written; each image stands for ten impressions."""

    images: np.ndarray
    digits: np.ndarray

    @property
    def clicks(self) -> np.ndarray:
        """Say for each impression whether it was clicked."""
        return (self.digits[:, None] == np.arange(CANDIDATES)).ravel().astype("float32")

    def part(self, index: int, parts: int) -> Impressions:
        """Take every PARTS-th image from INDEX on: no image is in two parts."""
        return Impressions(self.images[index::parts], self.digits[index::parts])

    def first(self, count: int) -> Impressions:
        """Take the first COUNT impressions."""
        return Impressions(self.images[: count // CANDIDATES], self.digits[: count // CANDIDATES])

    def features(self) -> list[tuple[np.ndarray, np.ndarray, int]]:
        """Give each impression's sparse ids: pixels, crosses with the candidate, the candidate."""
        slots = []
        for image in self.images:
            inked = np.flatnonzero(image)
            pixels = inked * GRAYS + image[inked]
            shaded = inked * SHADES + shades(image[inked])
            slots += [
                (pixels, shaded * CANDIDATES + candidate, candidate)
                for candidate in range(CANDIDATES)
            ]
        return slots

    def write(self, path: Path) -> None:
        """Write what Paddle's datasets read: for each slot the number of its values, and them."""
        lines = []
        for (pixels, crosses, candidate), click in zip(self.features(), self.clicks, strict=True):
            slots = (pixels, crosses, [candidate], [int(click)])
            lines.append(" ".join(f"{len(slot)} {' '.join(map(str, slot))}" for slot in slots))
        path.write_text("\n".join(lines) + "\n", encoding="ascii")


def shades(grays: np.ndarray) -> np.ndarray:
    """Round 0..16 to one of SHADES."""
    return np.minimum(grays * SHADES // (GRAYS - 1), SHADES - 1)


def load() -> tuple[Impressions, Impressions]:
    """Return the impressions to learn from, and a fifth of the images held out."""
    # Servers do without.
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = data.images.reshape(-1, PIXELS).astype("int64")[order]
    digits = data.target[order]
    cut = len(digits) * 4 // 5
    return Impressions(images[:cut], digits[:cut]), Impressions(images[cut:], digits[cut:])


def auc(scores: np.ndarray, clicks: np.ndarray) -> float:
    """Say how often a clicked impression scores above another; ties count half."""
    _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]
    positive = int(clicks.sum())
    negative = len(clicks) - positive
    return float((ranks[clicks > 0].sum() - positive * (positive + 1) / 2) / positive / negative)


def log_loss(scores: np.ndarray, clicks: np.ndarray) -> float:
    """Return the mean cross entropy of SCORES, which are probabilities."""
    sure = np.clip(scores, 1e-7, 1 - 1e-7)
    return float(-np.mean(clicks * np.log(sure) + (1 - clicks) * np.log(1 - sure)))


def best_single_feature(train: Impressions, test: Impressions) -> float:
    """Return the AUC of past click rates by the one cross that told most in TRAIN."""
    shade, wanted = shades(train.images), np.eye(CANDIDATES)[train.digits]
    clicks, seen = np.zeros((PIXELS, SHADES, CANDIDATES)), np.zeros((PIXELS, SHADES, 1))
    for pixel in range(PIXELS):
        np.add.at(clicks[pixel], shade[:, pixel], wanted)
        np.add.at(seen[pixel], shade[:, pixel], 1)
    rates = clicks / np.maximum(seen, 1)

    def score(part: Impressions, pixel: int) -> float:
        return auc(rates[pixel][shades(part.images[:, pixel])].ravel(), part.clicks)

    return score(test, max(range(PIXELS), key=lambda pixel: score(train, pixel)))


class Model:
    """A wide and deep model: what the crosses say, and what pixels and candidate say together."""

    def __init__(self, width: int) -> None:
        self.slots = [
            paddle.static.data(name, [None, 1], "int64", lod_level=1)
            for name in ("pixels", "crosses", "candidate")
        ]
        self.click = paddle.static.data("click", [None, 1], "float32")
        pixels, crosses, candidate = self.slots
        image = self.look_up("pixel_table", pixels, PIXELS * GRAYS, width)
        shown = self.look_up("candidate_table", candidate, CANDIDATES, width)
        wide = self.look_up("cross_table", crosses, PIXELS * SHADES * CANDIDATES, 1)
        hidden = paddle.concat([image, shown, image * shown], axis=1)
        hidden = paddle.static.nn.fc(hidden, 2 * width, activation="relu")
        logit = paddle.static.nn.fc(hidden, 1) + wide
        self.chance = paddle.nn.functional.sigmoid(logit)
        self.loss = paddle.nn.functional.binary_cross_entropy_with_logits(logit, self.click)

    @staticmethod
    def look_up(table: str, ids: paddle.static.Variable, rows: int, width: int) -> paddle.Tensor:
        """Sum each impression's rows of a sparse TABLE; fleet moves the table to the servers."""
        # Not `sparse_embedding`: that one has no copy here, which geo mode trains.
        embedding = paddle.static.nn.embedding(
            ids,
            [rows, width],
            is_sparse=True,
            param_attr=paddle.ParamAttr(table, paddle.nn.initializer.Uniform(-0.05, 0.05)),
        )
        return paddle.static.nn.sequence_lod.sequence_pool(
            paddle.reshape(embedding, [-1, width]), "sum"
        )


class Predictor:
    """Predicts with what the servers know now."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.program = paddle.static.normalize_program(
            model.loss.block.program, model.slots, [model.chance]
        )

    def __call__(self, impressions: Impressions, batch: int = 600) -> np.ndarray:
        """Return the chance of a click for each impression."""
        features = impressions.features()
        # A new one each time: `train_from_dataset` takes the ground from under an earlier one.
        executor = paddle.static.Executor()
        parts = [
            executor.run(
                self.program,
                feed=self.feed(features[at : at + batch]),
                fetch_list=[self.model.chance],
            )[0]
            for at in range(0, len(features), batch)
        ]
        return np.concatenate(parts).ravel()

    def feed(self, features: list[tuple[np.ndarray, np.ndarray, int]]) -> dict:
        """Put FEATURES, slot by slot, into tensors that know where each impression begins."""
        fed = {}
        for slot, column in zip(self.model.slots, zip(*features, strict=True), strict=True):
            ids = [np.atleast_1d(impression) for impression in column]
            values = np.concatenate(ids).astype("int64").reshape(-1, 1)
            lengths = [len(impression) for impression in ids]
            fed[slot.name] = paddle.base.create_lod_tensor(values, [lengths], paddle.CPUPlace())
        return fed


def train(model: Model, options: argparse.Namespace) -> None:
    """Learn from this trainer's share of the impressions; the servers join what all learn."""
    executor = paddle.static.Executor()
    executor.run(paddle.static.default_startup_program())
    fleet.init_worker()
    rank, trainers = fleet.worker_index(), fleet.worker_num()
    everything, held_out = load()
    mine = everything.part(rank, trainers)
    sample = mine.first(SAMPLE)
    predict = Predictor(model)

    def tell(epoch: int, speed: str = "") -> None:
        loss = log_loss(predict(sample), sample.clicks)
        where = f"trainer {rank}/{trainers} epoch {epoch}/{options.epochs}"
        print(f"{where}: loss {loss:.4f}{speed}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "impressions")
        mine.write(file)
        dataset = paddle.distributed.InMemoryDataset()
        dataset.init(
            batch_size=options.batch_size,
            thread_num=1,
            pipe_command="cat",
            use_var=[*model.slots, model.click],
        )
        dataset.set_filelist([str(file)])
        dataset.load_into_memory()
        tell(0)
        for epoch in range(1, options.epochs + 1):
            dataset.local_shuffle()
            began = time.perf_counter()
            executor.train_from_dataset(model.loss.block.program, dataset)
            rate = len(mine.clicks) / (time.perf_counter() - began)
            tell(epoch, f", {rate:.0f} impressions/s")

    # What the slowest trainer learned counts too.
    fleet.barrier_worker()
    scores, clicks = predict(held_out), held_out.clicks
    base = np.full_like(clicks, everything.clicks.mean())
    print(
        f"trainer {rank}/{trainers} held-out AUC {auc(scores, clicks):.4f}, "
        f"baseline {best_single_feature(everything, held_out):.4f} (best single feature); "
        f"log loss {log_loss(scores, clicks):.4f}, "
        f"baseline {log_loss(base, clicks):.4f} (base rate); {len(clicks)} impressions",
        flush=True,
    )
    # Nobody may leave while another still asks: the trainers talk to each other, too.
    fleet.barrier_worker()
    fleet.stop_worker()


def refusal() -> str | None:
    """Say in a sentence why this cannot work here, or nothing."""
    if not hasattr(paddle.base.core, "DistFleetWrapper"):
        return (
            f"train_ctr.py: this Paddle ({paddle.__version__}) was built without the parameter "
            "server core; use paddlepaddle 2.6.2, which has it: pip install paddlepaddle==2.6.2"
        )
    if not os.environ.get("TRAINING_ROLE"):
        return (
            "train_ctr.py: nobody says whether this is a server or a trainer; start it with "
            "`fleetrun --server_num 2 --worker_num 2 train_ctr.py`."
        )
    return None


def main() -> None:
    """Read the command line, then be what the environment says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=128, help="impressions a step")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--width", type=int, default=8, help="numbers in an embedding")
    parser.add_argument(
        "--k_steps",
        type=int,
        help="geo mode: learn locally, exchange what was learned every so many steps; 0, or "
        "nothing said: asynchronous, gradients go to the servers at each step",
    )
    options = parser.parse_args()
    why = refusal()
    if why:
        sys.exit(why)

    paddle.enable_static()
    paddle.seed(1)
    fleet.init(is_collective=False)
    model = Model(options.width)
    strategy = fleet.DistributedStrategy()
    # Synchronous training (a_sync = False) crashes in Paddle 2.6.2.
    strategy.a_sync = True
    if options.k_steps is not None:
        strategy.a_sync_configs = {"k_steps": options.k_steps}
    optimizer = paddle.optimizer.Adam(learning_rate=options.lr)
    fleet.distributed_optimizer(optimizer, strategy).minimize(model.loss)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
    else:
        train(model, options)


if __name__ == "__main__":
    main()
