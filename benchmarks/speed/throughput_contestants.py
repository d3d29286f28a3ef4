"""transformers and llmpq as contestants of `throughput`, with the models and prompts.

    python -m benchmarks.speed.throughput_contestants NAME CASE MODEL

CASE is a `Case` as JSON. Every contestant loads, then generates for each pass that it is sent.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.lab import Prompts, serve
from benchmarks.speed.families import FAMILIES, VOCABULARY, configuration
from planner.model.finding import model_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NEW_TOKENS = 64
MODELS = ("llama", "opt")
SMOLLM2 = "smollm2"
OTHER_MODELS = ("llama-3.2-1b", SMOLLM2)
"""One in the shape of a model that is built in, and SmolLM2-135M-Instruct as it is."""
WORKLOADS = ("equal", "mixed", "shared")
HEAD_TOKENS = 500
"""Of every prompt of the workload `shared`, the same for all prompts of a pass."""


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
        longest, count = (48, 8) if self.tiny else (64 if self.head_tokens else 512, 64)
        lengths = np.random.default_rng(0).integers(16, longest + 1, count)
        return (lengths + self.head_tokens).tolist()

    @property
    def head_tokens(self) -> int:
        """Tokens with which all prompts of a pass begin."""
        if self.workload != "shared":
            return 0
        return HEAD_TOKENS // 5 if self.tiny else HEAD_TOKENS

    def prompts(self, turn: int) -> Prompts:
        """Random token ids: no two passes share a prefix, and all contestants get the same."""
        draw = np.random.default_rng([turn, 0])
        head = draw.integers(3, VOCABULARY, self.head_tokens).tolist()
        rest = [length - self.head_tokens for length in self.lengths()]
        return [head + draw.integers(3, VOCABULARY, length).tolist() for length in rest]

    def write_model(self, folder: Path) -> None:
        """Save bfloat16 weights, with tied embeddings."""
        import torch
        from transformers import AutoModelForCausalLM

        if self.model == SMOLLM2:
            from benchmarks.quantization.models import smollm2

            model = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.bfloat16)
        else:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(self._config(), dtype=torch.bfloat16)
        model.save_pretrained(folder)

    def _config(self) -> PretrainedConfig:
        from transformers import AutoConfig

        if self.model in FAMILIES:
            return configuration(self.model, self.tiny)
        if self.tiny:
            return configuration("llama", tiny=True)
        found = model_config(self.model)
        return AutoConfig.for_model(**found)


def write_gguf(folder: Path) -> Path:
    """Write the model as llama.cpp takes it, bfloat16, without a tokenizer."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM

    from tests.quant.checkpoint.gguf import written

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return written.write_gguf(
        model,
        folder.with_name("bf16.gguf"),
        written.as_type(gguf.GGMLQuantizationType.BF16),
        {"tokenizer.ggml.model": "no_vocab", "llama.vocab_size": model.config.vocab_size},
    )


CORES = 2
TRANSFORMERS = {"transformers, SDPA": "sdpa", "transformers, eager": "eager"}
"""Its ways of attention: which one is faster depends on the prompts."""
TRANSFORMERS_BATCH = 32
CLUSTER = """name: cpu
nodes:
  - {{name: host, accelerators: {{CPU: {stages}}}, threads: {threads}, memory_gib: 6}}
"""
OURS: dict[str, tuple[int, tuple[int, ...]]] = {
    "llmpq, 16 bit, one stage of two threads": (1, (16,)),
    "llmpq, 16 bit, two stages of one thread": (2, (16,)),
    "llmpq as planned, 4, 8 and 16 bit allowed, one stage": (1, (4, 8, 16)),
    "llmpq as planned, 4, 8 and 16 bit allowed, two stages": (2, (4, 8, 16)),
}
"""Stages, and bitwidths that the planner may choose from."""
WHOLE = ", every prompt whole"
"""Ends the names of ours that share no heads."""


def serve_transformers(folder: Path, new_tokens: int, attention: str) -> None:
    """`generate` on left-padded batches, prompts of like length together."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(CORES)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation=attention
    ).eval()

    def run(prompts: Prompts) -> int:
        tokens = 0
        ordered = sorted(prompts, key=len)
        for first in range(0, len(ordered), TRANSFORMERS_BATCH):
            batch = ordered[first : first + TRANSFORMERS_BATCH]
            width = max(map(len, batch))
            ids = torch.tensor([[0] * (width - len(row)) + row for row in batch])
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
            out = model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                pad_token_id=0,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
            )
            tokens += (out.shape[1] - width) * len(batch)
        return tokens

    serve(run)


def serve_ours(
    folder: Path, case: Case, stages: int, bits: Sequence[int], shares_heads: bool
) -> None:
    """Plan for the case's workload, load the stages once, and keep them."""
    from actors.messages import Request, Sampling
    from actors.stage_group import GroupOptions, StageGroup
    from llmpq import Cluster, Workload
    from llmpq.remote.session import ray_session

    lengths, new_tokens = case.lengths(), case.new_tokens
    specification = folder.with_name(f"cpu_{stages}.yaml")
    specification.write_text(CLUSTER.format(stages=stages, threads=CORES // stages))
    workload = Workload(
        global_batch=len(lengths), prompt_length=max(lengths), new_tokens=new_tokens
    )
    plan = Cluster.from_yaml(specification).plan(
        folder,
        workload,
        theta=0.0,
        bits=list(bits),
        shared_tokens=case.head_tokens * shares_heads,
    )
    sampling, options = Sampling(ignore_eos=True), GroupOptions(shares_heads=shares_heads)
    with ray_session("local"), StageGroup(plan.spec, str(folder), options) as group:

        def run(prompts: Prompts) -> int:
            requests = [
                Request(f"row-{i}", tuple(ids), new_tokens, sampling)
                for i, ids in enumerate(prompts)
            ]
            return sum(len(f.token_ids) for found in group.generate(requests) for f in found)

        sizes = plan.spec.micro_batches
        used = sorted({bit for stage in plan.stages for bit in stage.bitwidths})
        serve(
            run,
            f"{'+'.join(str(len(s.layers)) for s in plan.stages)} layers at "
            f"{'/'.join(map(str, used))} bit, micro-batches {sizes.prefill}/{sizes.decode}",
        )


def main() -> None:
    """Serve as the contestant of the given name."""
    name, case, folder = sys.argv[1], Case(**json.loads(sys.argv[2])), Path(sys.argv[3])
    if name in TRANSFORMERS:
        serve_transformers(folder, case.new_tokens, TRANSFORMERS[name])
    else:
        serve_ours(folder, case, *OURS[name.removesuffix(WHOLE)], not name.endswith(WHOLE))


if __name__ == "__main__":
    main()
