"""A tiny model and the Trainer of its suite. Model and data are made here, nothing is downloaded.

`--library`, `--lora` and `--kill_at` are this script's; all others are the Trainer's.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
from typing import Any

import numpy as np
import paddle as paddle_

paddle: Any = paddle_
parser = argparse.ArgumentParser()
parser.add_argument("--library")
parser.add_argument("--lora", action="store_true")
parser.add_argument("--kill_at", type=int, default=0)
given, words = parser.parse_known_args()
trainers: Any = importlib.import_module(f"{given.library}.trainer")
models: Any = importlib.import_module(f"{given.library}.transformers")
WORDS, LENGTH, ROWS = 48, 16, 64


def made(arguments: Any) -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": LENGTH, "vocab_size": WORDS}
    config = models.LlamaConfig(**sizes, num_key_value_heads=4, use_cache=False)
    # These kernels are for GPUs.
    config.use_flash_attention = config.fuse_rms_norm = config.use_fused_head_and_loss_fn = False
    config._attn_implementation = "eager"
    # On a CPU, Paddle 2.6.2 has only this recompute.
    config.recompute_use_reentrant = True
    for field in ("recompute_granularity", "recompute_method", "recompute_num_layers"):
        setattr(config, field, getattr(arguments, field, None) or getattr(config, field, None))
    return models.LlamaForCausalLM(config)


class Rows(paddle.io.Dataset):  # type: ignore[misc, unused-ignore]
    """Sentences of numbers."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = np.random.RandomState(self.seed * 1000 + index).randint(1, WORDS, LENGTH)
        return {"input_ids": row, "labels": np.roll(row, -1)}


def together(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        key: paddle.to_tensor(np.stack([row[key] for row in rows]).astype("int64"))
        for key in rows[0]
    }


class Killer(trainers.TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Kills rank 1 of the first attempt, as the kernel does when memory runs out."""

    def on_step_end(self, _arguments: Any, state: Any, _control: Any, **_more: Any) -> None:
        is_first = os.environ.get("PADDLE_RESTART_COUNT", "0") == "0"
        if state.global_step == given.kill_at and is_first and paddle.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    reader = trainers.PdArgumentParser(trainers.TrainingArguments)
    (arguments,) = reader.parse_args_into_dataclasses(words)
    paddle.set_device(arguments.device)
    # PaddleFormers calls it between micro-steps, and Paddle refuses that on a CPU.
    paddle.device.synchronize = lambda *_: None
    trainers.set_seed(arguments.seed)
    model = made(arguments)
    if given.lora:
        peft: Any = importlib.import_module(f"{given.library}.peft")
        targets = [".*q_proj.*", ".*v_proj.*"]
        model = peft.LoRAModel(model, peft.LoRAConfig(target_modules=targets, r=4, lora_alpha=8))
        model.mark_only_lora_as_trainable()
    if getattr(arguments, "recompute", False) and hasattr(model, "recompute_enable"):
        model.recompute_enable()
    trainer = trainers.Trainer(
        model=model,
        args=arguments,
        train_dataset=Rows(1),
        eval_dataset=Rows(2),
        data_collator=together,
        callbacks=[Killer()],
    )
    folder, last = arguments.output_dir, arguments.resume_from_checkpoint
    if "FLAG_LLM_PDC" in os.environ and os.path.isdir(folder):
        last = trainers.get_last_checkpoint(folder)
    print(f"begins with {last}", flush=True)
    trainer.train(resume_from_checkpoint=last)
    total = sum(float(parameter.astype("float64").abs().sum()) for parameter in model.parameters())
    print(f"weights {total:.9f}", flush=True)


main()
