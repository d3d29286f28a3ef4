"""Writes a random model in the form of Qwen3.5-35B-A3B, with eight small layers, and rows for it:
12 prompts of token ids, and one that no model of its vocabulary can answer.

    python examples/tiny_experts.py tiny
    llmpq plan --model ./tiny --cluster cluster_specs/emulated_hosts.yaml --dtype float32 \
        --bits 16 --s 16 --n 8 --global_bz 12 -o plan.json
    llmpq run --plan plan.json --input tiny/rows.jsonl --output results.jsonl
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3_5MoeTextConfig

VOCABULARY, NEW_TOKENS = 199, 8


def write(folder: Path) -> Any:
    """The model that was written."""
    kinds = ("linear", "linear", "linear", "full") * 2
    config = Qwen3_5MoeTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=len(kinds),
        layer_types=[f"{kind}_attention" for kind in kinds],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        max_position_embeddings=64,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    draw = random.Random(0)
    prompts = [[draw.randrange(3, VOCABULARY) for _ in range(4 + i)] for i in range(12)]
    with (folder / "rows.jsonl").open("w") as file:
        for i, prompt in enumerate([*prompts, [VOCABULARY]]):
            row = {"custom_id": str(i), "prompt": prompt, "max_new_tokens": NEW_TOKENS}
            file.write(json.dumps(row) + "\n")
    return model


if __name__ == "__main__":
    write(Path(sys.argv[1]))
