"""Tiny random checkpoints of every supported architecture, and pipelines over them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
)

from actors.messages import Request, Sampling
from actors.schedule.scheduler import QueueSizes
from actors.schedule.static import StaticScheduler
from actors.stage.spec import StageSpec
from actors.stage.stage import Stage
from quant.rounding.importance import LayerImportance
from quant.scheme import Processor
from tests.actors.driving import drive
from tests.actors.local_pipeline import LocalPipeline

LAYERS = 5
VOCABULARY = 199
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ROPE = _COMMON | {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
}
_OPT = _COMMON | {
    "hidden_size": 48,
    "ffn_dim": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "word_embed_proj_dim": 48,
}
_WINDOWS = ("sliding", "full", "sliding", "sliding", "full")
_KINDS = ("linear", "full", "linear", "linear", "full")
_DELTA = _ROPE | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": [f"{kind}_attention" for kind in _KINDS],
}

_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 24,
    "norm_topk_prob": True,
}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_ROPE, num_key_value_heads=2),
    "llama-tied": LlamaConfig(**_ROPE, num_key_value_heads=6, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**_ROPE, num_key_value_heads=3),
    "qwen2-sliding": Qwen2Config(
        **_ROPE,
        num_key_value_heads=3,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=2,
    ),
    "qwen3": Qwen3Config(**_ROPE, num_key_value_heads=2, head_dim=16),
    "mistral": MistralConfig(**_ROPE, num_key_value_heads=2, sliding_window=None),
    "mistral-sliding": MistralConfig(**_ROPE, num_key_value_heads=2, sliding_window=7),
    "gpt_neox": GPTNeoXConfig(**_ROPE),
    "gpt_neox-serial": GPTNeoXConfig(**_ROPE, use_parallel_residual=False),
    "opt": OPTConfig(**_OPT),
    "opt-post-norm": OPTConfig(**_OPT | {"word_embed_proj_dim": 24}, do_layer_norm_before=False),
    "bloom": BloomConfig(**_COMMON, hidden_size=48, n_layer=LAYERS, n_head=6),
}

MORE_CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(
        **_ROPE | {"num_attention_heads": 4},
        num_key_value_heads=2,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        mlp_only_layers=[1],
        norm_topk_prob=True,
    ),
    "gpt_oss": GptOssConfig(
        **_ROPE | {"num_attention_heads": 4, "intermediate_size": 32},
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=7,
        num_local_experts=6,
        num_experts_per_tok=2,
    ),
    "smollm3": SmolLM3Config(
        **_ROPE,
        num_key_value_heads=2,
        no_rope_layers=[1, 0, 1, 0, 1],
        tie_word_embeddings=False,
        mlp_bias=True,
    ),
    "granite": GraniteConfig(
        **_ROPE,
        num_key_value_heads=2,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.2,
        logits_scaling=5.0,
    ),
    "phi3": Phi3Config(**_ROPE, num_key_value_heads=3, partial_rotary_factor=0.5, sliding_window=9),
    "glm": GlmConfig(**_ROPE, num_key_value_heads=3, head_dim=16),
    "glm4": Glm4Config(**_ROPE, num_key_value_heads=2, head_dim=12, attention_bias=False),
    "glm4_moe": Glm4MoeConfig(
        **_ROPE | {"num_attention_heads": 4},
        num_key_value_heads=2,
        head_dim=16,
        attention_bias=True,
        use_qk_norm=True,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        first_k_dense_replace=2,
    ),
    "olmo2": Olmo2Config(**_ROPE, num_key_value_heads=2),
    "olmo3": Olmo3Config(
        **_ROPE,
        num_key_value_heads=3,
        sliding_window=6,
        rope_theta=9000.0,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ),
    "gemma2": Gemma2Config(
        **_ROPE,
        num_key_value_heads=2,
        head_dim=12,
        sliding_window=7,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=0.05,
        final_logit_softcapping=2.0,
    ),
    "gemma3": Gemma3TextConfig(
        **_ROPE,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=6,
        sliding_window_pattern=3,
        query_pre_attn_scalar=20,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
    ),
    "gemma4": Gemma4TextConfig(
        **_ROPE,
        num_key_value_heads=3,
        head_dim=12,
        global_head_dim=20,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        sliding_window=6,
        layer_types=[
            f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")
        ],
        final_logit_softcapping=2.0,
        hidden_size_per_layer_input=0,
    ),
    "gemma4-experts": Gemma4TextConfig(
        **_ROPE,
        num_key_value_heads=2,
        head_dim=12,
        global_head_dim=20,
        sliding_window=6,
        layer_types=[f"{kind}_attention" for kind in _WINDOWS],
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=2,
        moe_intermediate_size=32,
    ),
    "ministral": MinistralConfig(
        **_ROPE,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=6,
        layer_types=["full_attention", "sliding_attention"] * 2 + ["sliding_attention"],
    ),
    "ministral3": Ministral3Config(
        **_ROPE,
        num_key_value_heads=2,
        head_dim=16,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.5,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    ),
}
"""Families of whose parts those above have most, so that fewer tests go through them."""

SHARED_CONFIGS: dict[str, PretrainedConfig] = {
    "gemma4-shared": Gemma4TextConfig(
        **_ROPE,
        num_key_value_heads=2,
        head_dim=12,
        global_head_dim=20,
        sliding_window=6,
        layer_types=[f"{kind}_attention" for kind in ("sliding",) * 3 + ("full",) * 2],
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
        num_kv_shared_layers=1,
        use_double_wide_mlp=True,
    ),
}
"""Of layers that read the keys and values of earlier ones."""

EVERY_CONFIG = CONFIGS | MORE_CONFIGS

STATE_CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3_next": Qwen3NextConfig(**_DELTA, **_EXPERTS, mlp_only_layers=[0, 3]),
    "qwen3_5": Qwen3_5TextConfig(**_DELTA),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**_DELTA, **_EXPERTS),
}
"""Families with layers whose requests have a constant state in place of keys and values."""


def save_tiny(folder: Path, config: PretrainedConfig, seed: int = 0, shard: str = "5GB") -> Any:
    """Write a random checkpoint of `config` and return the model that was saved."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
            if name.endswith("A_log"):
                parameter.sub_(5.0)  # as it is made, a state forgets all within a token
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.5)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def stages_of(
    folder: Path,
    bounds: Sequence[int],
    slots: int,
    max_tokens: int,
    bits: int | Sequence[int] = 16,
    dtype: str = "float32",
    processor: Processor = Processor(),  # noqa: B008  (frozen)
    head_on_first: bool = False,
    kv_bits: int = 16,
    parked_tokens: int = 0,
    importance: Sequence[LayerImportance] | None = None,
) -> list[Stage]:
    """Stages in this process; stage j holds layers `bounds[j]` up to `bounds[j + 1]`, of all of
    which `importance` tells.
    """
    specs = specs_of(
        bounds,
        slots,
        max_tokens,
        bits,
        dtype=dtype,
        head_on_first=head_on_first,
        kv_bits=kv_bits,
        parked_tokens=parked_tokens,
    )
    return [
        Stage(
            spec,
            folder,
            torch.device("cpu"),
            processor,
            importance=importance and importance[spec.layers.start : spec.layers.stop],
        )
        for spec in specs
    ]


def specs_of(
    bounds: Sequence[int],
    slots: int,
    max_tokens: int,
    bits: int | Sequence[int] = 16,
    **others: Any,
) -> list[StageSpec]:
    """The specifications of `stages_of`, in float32 unless `others` say so."""
    spans = [range(a, b) for a, b in pairwise(bounds)]
    all_bits = [bits] * bounds[-1] if isinstance(bits, int) else list(bits)
    return [
        StageSpec(
            index=j,
            stages=len(spans),
            layers=span,
            bitwidths=tuple(all_bits[i] for i in span),
            slots=slots,
            max_tokens=max_tokens,
            **{"dtype": "float32", "kv_tokens": slots * max_tokens} | others,
        )
        for j, span in enumerate(spans)
    ]


def random_prompts(lengths: Sequence[int], seed: int = 7) -> list[tuple[int, ...]]:
    """Prompts of the given lengths without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randint(3, VOCABULARY, (n,), generator=generator).tolist()) for n in lengths
    ]


def generate(
    stages: Sequence[Stage],
    prompts: Sequence[tuple[int, ...]],
    new_tokens: int | Sequence[int],
    prefill: int,
    decode: int,
    sampling: Sampling | Sequence[Sampling] = Sampling(),  # noqa: B008  (frozen)
) -> list[list[int]]:
    """New tokens of every prompt through the stages, in the order of the prompts."""
    counts = [new_tokens] * len(prompts) if isinstance(new_tokens, int) else list(new_tokens)
    each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else sampling
    requests = [
        Request(str(i), *row) for i, row in enumerate(zip(prompts, counts, each, strict=True))
    ]
    results: dict[str, list[int]] = {}
    spec = stages[0].spec
    sizes = QueueSizes(spec.slots, prefill, decode, spec.max_tokens)
    scheduler = StaticScheduler(sizes, len(stages))
    scheduler.add(requests)
    for finished in drive(scheduler, LocalPipeline(stages)):
        results |= {f.custom_id: list(f.token_ids) for f in finished}
    return [results[str(i)] for i in range(len(prompts))]


_answers: dict[str, list[int]] = {}
"""The longest greedy answer so far, by all that it depends on: many tests ask the same."""


def reference(
    model: Any, prompt: tuple[int, ...], new_tokens: int, ignore_eos: bool = False, **options: Any
) -> list[int]:
    """What transformers' `generate` adds to one unpadded prompt; greedy unless `options` say so."""
    options = ({"eos_token_id": None} if ignore_eos else {}) | {"do_sample": False} | options
    if options["do_sample"]:
        return _generated(model, prompt, new_tokens, options)
    asked = f"{_content(model)} {prompt} {sorted(options.items())}"
    known = _answers.get(asked)
    if known is None or known[0] < new_tokens:
        known = _answers[asked] = [new_tokens, *_generated(model, prompt, new_tokens, options)]
    return known[1 : 1 + new_tokens]


def _content(model: Any) -> str:
    """A digest of all numbers of `model`, and what else its answers depend on."""
    digest = hashlib.sha256(type(model).__name__.encode())
    for values in (model.config, model.generation_config):
        digest.update(values.to_json_string().encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _generated(
    model: Any, prompt: tuple[int, ...], new_tokens: int, options: dict[str, Any]
) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        pad_token_id=0,
        **options,
    )
    return list(out[0, len(prompt) :].tolist())
