"""Makes a tokenizer of letters, the configuration of a tiny Llama, and conversations."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import (  # type: ignore[import-not-found, unused-ignore]
    Tokenizer,
    models,
    pre_tokenizers,
)
from transformers import (  # type: ignore[import-not-found, unused-ignore]
    PreTrainedTokenizerFast,
)

words = ["<unk>", "<s>", "</s>", "<pad>", *"abcdefghijklmnopqrstuvwxyz0123456789:\n"]
tokenizer = Tokenizer(models.WordLevel(dict(zip(words, range(42), strict=True)), words[0]))
tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
names = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), words[:4], strict=True))
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
fast.chat_template = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}</s>{% endfor %}"
fast.save_pretrained("model")
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 42}
sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128}
kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32"}
ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, "fuse_rms_norm": False}
config = {**kind, **sizes, **ends, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
Path("model/config.json").write_text(json.dumps(config))
lines = [
    json.dumps({"messages": [{"role": "user", "content": f"abc {number}"}, answer]}) + "\n"
    for number in range(64)
    for answer in [{"role": "assistant", "content": f"xyz {number * 7}"}]
]
Path("train.jsonl").write_text("".join(lines))
