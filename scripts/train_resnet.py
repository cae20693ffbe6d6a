#!/usr/bin/env python3
"""Train a small ResNet on scikit-learn's handwritten digits, data-parallel through fleet.

It knows nothing of the launcher: it runs alone (`python train_resnet.py`), under fleetrun, and
under Paddle's own launchers, on CPUs (gloo) or GPUs (NCCL), as a dynamic graph or with `--static`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from pathlib import Path

# Paddle 3 reads this while it is imported; its new program format cannot run static fleet at all.
if "--static" in sys.argv:
    os.environ.setdefault("FLAGS_enable_pir_api", "0")

import numpy as np
import paddle
from paddle import nn
from paddle.distributed import fleet
from paddle.io import DistributedBatchSampler
from paddle.nn import functional
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


class Block(nn.Layer):
    """Two 3x3 convolutions, whose result is multiplied by SCALE at first, and a way around them."""

    def __init__(self, channels_in: int, channels: int, stride: int, scale: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2D(channels_in, channels, 3, stride, padding=1, bias_attr=False)
        self.norm1 = nn.BatchNorm2D(channels)
        self.conv2 = nn.Conv2D(channels, channels, 3, padding=1, bias_attr=False)
        self.norm2 = nn.BatchNorm2D(channels, weight_attr=nn.initializer.Constant(scale))
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2D(channels_in, channels, 1, stride, bias_attr=False),
                nn.BatchNorm2D(channels),
            )

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Add the convolved input to the input."""
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Layer):
    """The CIFAR shape of ResNet, small enough for 8x8 images on a CPU.

    DEPTH blocks of each width: 2 have 47 parameters in 0.7 MB, 8 have 155 in 6 MB.
    """

    def __init__(self, depth: int) -> None:
        super().__init__()
        # A deep network learns from its first steps if each block begins as the way around it.
        widths, scale = ((16, 32, 64), 1.0) if depth < 8 else ((16, 32, 96), 0.0)
        self.stem = nn.Sequential(
            nn.Conv2D(1, widths[0], 3, padding=1, bias_attr=False),
            nn.BatchNorm2D(widths[0]),
            nn.ReLU(),
        )
        blocks, channels = [], widths[0]
        for width in widths:
            for i in range(depth):
                stride = 2 if i == 0 and width > channels else 1
                blocks.append(Block(channels, width, stride, scale))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2D(1), nn.Flatten())
        self.classify = nn.Linear(channels, 10)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Give the ten logits of each image."""
        return self.classify(self.pool(self.blocks(self.stem(x))))


def make_optimizer(name: str, rate: float, parameters: list | None) -> paddle.optimizer.Optimizer:
    """Make the optimizer NAME; PARAMETERS is None for a static graph."""
    kind = {
        "momentum": paddle.optimizer.Momentum,
        "sgd": paddle.optimizer.SGD,
        "adam": paddle.optimizer.Adam,
    }[name]
    return kind(learning_rate=rate, parameters=parameters, weight_decay=1e-4)


class DynamicTrainer:
    """The dynamic graph: a DataParallel model reduces the gradients during backward()."""

    def __init__(self, optimizer: str, rate: float, depth: int) -> None:
        self.net = ResNet(depth)
        self.model: nn.Layer = self.net
        # Paddle 3 takes the model of a lone rank for a pipeline's, and refuses it.
        if fleet.worker_num() > 1:
            # Here rank 0's first weights are given to all ranks.
            self.model = fleet.distributed_model(self.net)
        self.optimizer = fleet.distributed_optimizer(
            make_optimizer(optimizer, rate, self.model.parameters())
        )

    def step(self, images: np.ndarray, labels: np.ndarray) -> float:
        """Learn from this rank's batch and return its loss."""
        self.model.train()
        loss = functional.cross_entropy(
            self.model(paddle.to_tensor(images)), paddle.to_tensor(labels)
        )
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        return float(loss)

    @paddle.no_grad()
    def predict(self, images: np.ndarray) -> np.ndarray:
        """Tell the class of each image, by the bare network: no word to other ranks."""
        self.net.eval()
        return self.net(paddle.to_tensor(images)).numpy().argmax(axis=1)

    def gather(self, array: np.ndarray) -> np.ndarray:
        """Stack the ARRAY of each rank, in rank order."""
        if fleet.worker_num() == 1:
            return array[None]
        parts: list[paddle.Tensor] = []
        paddle.distributed.all_gather(parts, paddle.to_tensor(array))
        return np.stack([part.numpy() for part in parts])

    def weights(self) -> dict[str, np.ndarray]:
        """Copy all parameters and BatchNorm statistics, by name."""
        return {name: tensor.numpy() for name, tensor in self.net.state_dict().items()}

    def statistics(self) -> list[str]:
        """Name what is not learned: BatchNorm's running statistics."""
        return [name for name, tensor in self.net.state_dict().items() if tensor.stop_gradient]

    def assign(self, name: str, value: np.ndarray) -> None:
        """Give one of the weights a new value."""
        self.net.state_dict()[name].set_value(value)

    def save(self, folder: Path) -> None:
        """Write the weights to FOLDER/resnet.pdparams."""
        paddle.save(self.net.state_dict(), str(folder / "resnet.pdparams"))


class StaticTrainer:
    """The static graph: fleet's optimizer writes the gradients' all_reduce into the program."""

    def __init__(self, optimizer: str, rate: float, depth: int) -> None:
        self.main, startup = paddle.static.Program(), paddle.static.Program()
        with paddle.static.program_guard(self.main, startup):
            images = paddle.static.data("images", [None, 1, 8, 8])
            labels = paddle.static.data("labels", [None], "int64")
            self.net = ResNet(depth)
            self.logits = self.net(images)
            self.loss = functional.cross_entropy(self.logits, labels)
            self.test = self.main.clone(for_test=True)
            fleet.distributed_optimizer(make_optimizer(optimizer, rate, None)).minimize(
                self.loss, startup
            )
        self.executor = paddle.static.Executor()
        self.executor.run(startup)
        self.gathers: dict[tuple, tuple] = {}

    def step(self, images: np.ndarray, labels: np.ndarray) -> float:
        """Learn from this rank's batch and return its loss."""
        feed = {"images": images, "labels": labels}
        return float(self.executor.run(self.main, feed=feed, fetch_list=[self.loss])[0])

    def predict(self, images: np.ndarray) -> np.ndarray:
        """Tell the class of each image."""
        feed = {"images": images, "labels": np.zeros(len(images), "int64")}
        logits = self.executor.run(self.test, feed=feed, fetch_list=[self.logits.name])[0]
        return logits.argmax(axis=1)

    def gather(self, array: np.ndarray) -> np.ndarray:
        """Stack the ARRAY of each rank, in rank order."""
        if fleet.worker_num() == 1:
            return array[None]
        key = str(array.dtype), array.shape
        if key not in self.gathers:
            program, parts = paddle.static.Program(), []
            with paddle.static.program_guard(program, paddle.static.Program()):
                tensor = paddle.static.data("array", array.shape, key[0])
                paddle.distributed.all_gather(parts, tensor)
            self.gathers[key] = program, parts
        program, parts = self.gathers[key]
        return np.stack(self.executor.run(program, feed={"array": array}, fetch_list=parts))

    def weights(self) -> dict[str, np.ndarray]:
        """Copy all parameters and BatchNorm statistics, by name."""
        scope = paddle.static.global_scope()
        return {
            name: np.array(scope.find_var(variable.name).get_tensor())
            for name, variable in self.net.state_dict().items()
        }

    statistics = DynamicTrainer.statistics

    def assign(self, name: str, value: np.ndarray) -> None:
        """Give one of the weights a new value."""
        variable = paddle.static.global_scope().find_var(self.net.state_dict()[name].name)
        variable.get_tensor().set(value, self.executor.place)

    def save(self, folder: Path) -> None:
        """Write the weights to FOLDER/resnet.pdparams."""
        paddle.save(self.weights(), str(folder / "resnet.pdparams"))


Trainer = DynamicTrainer | StaticTrainer


def average_statistics(trainer: Trainer) -> None:
    """Make BatchNorm's running statistics the mean over all ranks.

    Each rank collects them from its own images, so data parallelism leaves them different; with
    this, all ranks evaluate one and the same network.
    """
    if fleet.worker_num() == 1:
        return
    weights, names = trainer.weights(), trainer.statistics()
    mean = trainer.gather(np.concatenate([weights[name] for name in names])).mean(axis=0)
    ends = np.cumsum([weights[name].size for name in names])
    for name, part in zip(names, np.split(mean, ends[:-1]), strict=True):
        trainer.assign(name, part)


def evaluate(trainer: Trainer, images: np.ndarray, labels: np.ndarray) -> float:
    """Accuracy over all images: each rank looks at its own share, then the counts are added.

    The shares are not padded (one may be longer), so each image counts exactly once; nothing is
    sent between ranks until all have finished.
    """
    rank, ranks = fleet.worker_index(), fleet.worker_num()
    images, labels = images[rank::ranks], labels[rank::ranks]
    right = 0
    for i in range(0, len(labels), 128):
        right += int((trainer.predict(images[i : i + 128]) == labels[i : i + 128]).sum())
    total_right, total_seen = trainer.gather(np.array([right, len(labels)])).sum(axis=0)
    return float(total_right / total_seen)


def compare_weights(trainer: Trainer) -> None:
    """Say the sha256 of this rank's weights, and on rank 0 whether all ranks have the same."""
    rank, ranks = fleet.worker_index(), fleet.worker_num()
    digest = hashlib.sha256()
    for array in trainer.weights().values():
        digest.update(np.ascontiguousarray(array).tobytes())
    print(f"rank {rank}: weights sha256 {digest.hexdigest()}", flush=True)
    digests = trainer.gather(np.frombuffer(digest.digest(), "int64").copy())
    different = [i for i in range(ranks) if (digests[i] != digests[0]).any()]
    if different:
        sys.exit(f"The weights of rank 0 are not those of rank {', '.join(map(str, different))}.")
    if rank == 0 and ranks > 1:
        print(f"all {ranks} ranks hold identical weights", flush=True)


def make_trainer(options: argparse.Namespace) -> Trainer:
    """Make the trainer that --static chooses, or say in one sentence why this Paddle cannot."""
    if not options.static:
        return DynamicTrainer(options.optimizer, options.lr, options.depth)
    try:
        return StaticTrainer(options.optimizer, options.lr, options.depth)
    except ValueError as error:
        if paddle.device.is_compiled_with_cuda() or fleet.worker_num() == 1:
            raise
        sys.exit(
            f"--static with {fleet.worker_num()} ranks needs a GPU build of Paddle: the CPU build "
            f"{paddle.__version__} cannot connect the ranks of a static graph ({error}). "
            "Train without --static, or with one rank."
        )


def train(options: argparse.Namespace) -> None:
    """Train, evaluate after each epoch, and compare the ranks at the end."""
    if options.static:
        paddle.enable_static()
    fleet.init(is_collective=True)
    rank, ranks = fleet.worker_index(), fleet.worker_num()
    # Every rank starts elsewhere on purpose: the first weights that count are rank 0's.
    paddle.seed(options.seed + rank)

    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32").reshape(-1, 1, 8, 8)
    images, test_images, labels, test_labels = train_test_split(
        images, labels.astype("int64"), test_size=0.2, random_state=options.seed, stratify=labels
    )
    # Pads the shuffled order with a few images seen twice, so that all ranks have equally many
    # steps of equal size: a rank with one step less would leave the others waiting for its
    # gradients for ever.
    batches = DistributedBatchSampler(
        range(len(labels)), options.batch_size, num_replicas=ranks, rank=rank, shuffle=True
    )
    trainer = make_trainer(options)
    if rank == 0:
        print(
            f"Paddle {paddle.__version__} on {paddle.device.get_device()}, {ranks} rank(s), "
            f"{'static' if options.static else 'dynamic'} graph: {len(labels)} images to learn, "
            f"{len(test_labels)} to test, {len(batches)} steps an epoch",
            flush=True,
        )
    for epoch in range(1, options.epochs + 1):
        batches.set_epoch(options.seed + epoch)
        began = time.perf_counter()
        losses = [trainer.step(images[batch], labels[batch]) for batch in batches]
        seconds = time.perf_counter() - began
        average_statistics(trainer)
        loss = trainer.gather(np.array([np.mean(losses)])).mean()
        accuracy = evaluate(trainer, test_images, test_labels)
        if rank == 0:
            print(
                f"epoch {epoch}/{options.epochs}: loss {loss:.4f}, test accuracy {accuracy:.4f}, "
                f"{batches.total_size / seconds:.0f} images/s",
                flush=True,
            )
    compare_weights(trainer)
    if options.save and rank == 0:
        options.save.mkdir(parents=True, exist_ok=True)
        trainer.save(options.save)
        print(f"saved {options.save / 'resnet.pdparams'}", flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch_size", type=int, default=32, help="images a step on each rank")
    parser.add_argument("--depth", type=int, default=2, help="blocks of each width")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--optimizer", choices=["momentum", "sgd", "adam"], default="momentum")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--static", action="store_true", help="a static graph")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write the weights there")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
