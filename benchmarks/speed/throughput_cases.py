"""The models and prompts of `benchmarks.speed.throughput`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.turns import Prompts

VOCABULARY = 32000
NEW_TOKENS = 64
MODELS = ("llama", "opt")
WORKLOADS = ("equal", "mixed")


@dataclass(frozen=True)
class Case:
    """A random model and prompts for it; `tiny` is for trying the commands."""

    model: str
    workload: str
    tiny: bool = False

    @property
    def name(self) -> str:
        """The name of the case in rows of results."""
        return f"{'tiny ' if self.tiny else ''}{self.model} {self.workload}"

    @property
    def new_tokens(self) -> int:
        """Tokens that are generated for every prompt."""
        return 4 if self.tiny else NEW_TOKENS

    def lengths(self) -> list[int]:
        """Tokens of each prompt, the same in every pass."""
        if self.workload == "equal":
            return [16] * 4 if self.tiny else [128] * 32
        longest, count = (48, 8) if self.tiny else (512, 64)
        return np.random.default_rng(0).integers(16, longest + 1, count).tolist()

    def prompts(self, turn: int) -> Prompts:
        """Random token ids: no two passes share a prefix, and all contestants get the same."""
        draw = np.random.default_rng([turn, 0])
        return [draw.integers(3, VOCABULARY, length).tolist() for length in self.lengths()]

    def write_model(self, folder: Path) -> int:
        """Save random bfloat16 weights with tied embeddings; their number."""
        import torch
        from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig

        torch.manual_seed(0)
        hidden, heads, layers = (128, 2, 2) if self.tiny else (1024, 16, 12)
        shared = {"vocab_size": VOCABULARY, "hidden_size": hidden, "num_attention_heads": heads}
        config = (
            LlamaConfig(
                **shared,
                intermediate_size=hidden * 9 // 4,
                num_hidden_layers=layers,
                tie_word_embeddings=True,
            )
            if self.model == "llama"
            else OPTConfig(
                **shared,
                ffn_dim=4 * hidden,
                num_hidden_layers=layers - 1,
                word_embed_proj_dim=hidden,
            )
        )
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        return sum(parameter.numel() for parameter in model.parameters())
