"""Valid input of every kind, small."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from llmpq import Cluster, Workload
from planner.lengths import Lengths
from planner.model.families import FAMILIES
from planner.model.finding import model_shape, shape_from_config
from planner.model.shape import ModelShape
from planner.model.tensor_shapes import end_tensors, layer_tensors
from planner.plan.file import DIGEST
from planner.plan.parts import PlansBeside
from planner.workload import Job
from tests.made_once import made_once
from tests.paths import ROOT
from tests.planner.model.mixed_configs import MIXED

BITS = (3, 4, 8, 16)
_MODEL = str(ROOT / "examples/demo_model")
_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}
_GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "desc_act": False,
    "checkpoint_format": "gptq",
    "pack_dtype": "int32",
    "lm_head": False,
    "dynamic": {"+:.*mlp.*": {"bits": 8}, "-:.*self_attn.*": {}},
}

_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
_STORED: tuple[dict[str, Any], ...] = (
    {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True,
     "modules_to_not_convert": ["visual"]},
    {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16],
     "ignored_layers": ["lm_head"]},
    {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["re:.*head$"],
     "quantization_status": "compressed", "config_groups": {"group_0": {
         "targets": ["Linear"], "weights": _WEIGHTS}}},
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.mlp.gate*"],
     "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
    {"quant_method": "torchao", "modules_to_not_convert": ["lm_head"], "quant_type": {"default": {
        "_type": "FqnToConfig", "_data": {"fqn_to_config": {"re:.*_proj": {
            "_type": "IntxWeightOnlyConfig", "_data": {
                "weight_dtype": {"_type": "torch.dtype", "_data": "int4"},
                "granularity": {"_type": "PerGroup", "_data": {"group_size": 16}}}}}}}}},
    {"quant_method": "auto-round", "bits": 4, "group_size": 16, "sym": True, "act_bits": 16,
     "packing_format": "auto_round:auto_gptq", "extra_config": {"lm_head": {"bits": 16}}},
    {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]},
    {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]},
)  # fmt: skip
_BYTES = {"F8_E4M3": 1, "I8": 1, "U8": 1, "F16": 2, "F32": 4, "I32": 4, "I64": 8}


@cache
def shape() -> ModelShape:
    """The demo model's."""
    return model_shape(_MODEL)


@cache
def cluster_seeds() -> tuple[bytes, ...]:
    """As people write them, and one as JSON, which YAML is too."""
    files = sorted((ROOT / "cluster_specs").glob("*.yaml"))
    values = {
        "name": "c",
        "nodes": [
            {"name": "a", "accelerators": {"T4": 2}, "usable_memory_gib": {"T4": 3.5}},
            {
                "name": "b",
                "accelerators": "V100:1",
                "link_gbyte_per_s": 10,
                "host_memory_gib": 64,
                "host_link_gbyte_per_s": 12,
            },
            {"name": "c", "accelerators": {"CPU": 1}, "memory_gib": 4, "threads": 2},
        ],
        "network": {"internode_gbit_per_s": 100},
        "emulate": {"time_scale": 0.5, "stand_in": "m"},
    }
    return (json.dumps(values).encode(), *(path.read_bytes() for path in files[:4]))


@cache
def plan_seeds() -> tuple[bytes, ...]:
    """One of two emulated devices with modelled times, one of real ones with a forecast, and one of
    a job with a plan for its long rows, beside plans of other numbers in flight.
    """
    return tuple(made_once("plan seeds", ".jsonl", _write_plans).read_bytes().splitlines())


def _write_plans(path: Path) -> None:
    emulated = Cluster.from_yaml(ROOT / "cluster_specs/emulated_t4_v100.yaml")
    real = Cluster.from_yaml(ROOT / "cluster_specs/demo_mixed_cpu.yaml")
    plans = [each.plan(_MODEL, Workload(8, 64, 16), theta=1.0).spec for each in (real, emulated)]
    job = real.plan(_MODEL, Job(20, Lengths((9, 30), (4, 8))), policy="static").spec
    plans.append(replace(job, long_rows=replace(job, beside=PlansBeside())))
    path.write_bytes(b"\n".join(map(_compact, plans)))


def _compact(plan: Any) -> bytes:
    """With at most two points a curve: those of the planner are long, and all alike."""
    stages = tuple(
        replace(stage, modelled=_short(stage.modelled)) if stage.modelled else stage
        for stage in plan.stages
    )
    text: str = replace(plan, stages=stages).to_json()
    content = json.loads(text)
    del content[DIGEST]  # by which every damage would be refused
    return json.dumps(content).encode()


def _short(modelled: Any) -> Any:
    def cut(curves: Any) -> Any:
        return tuple(
            replace(each, lengths=each.lengths[:2], seconds=each.seconds[:2]) for each in curves[:2]
        )

    return replace(modelled, prefill=cut(modelled.prefill), decode=cut(modelled.decode))


def line_seeds() -> tuple[bytes, ...]:
    """Plain and OpenAI Batch lines."""
    body = {
        "model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}],
        "frequency_penalty": 0.5, "presence_penalty": -1, "logit_bias": {"50": -100, "7": 1.5},
    }  # fmt: skip
    neutral = {
        "n": 1, "logprobs": False, "tools": [], "response_format": {"type": "text"}, "user": "me",
    }  # fmt: skip
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}],
        }
    ]
    rows: tuple[dict[str, Any], ...] = (
        {"custom_id": "a/../b", "prompt": "Hello", "temperature": 0.5, "top_k": 4, "seed": 7},
        {"custom_id": "b", "prompt": [1, 2, 3], "sampling": {"stop": ["."], "min_p": 0.9}},
        {"prompt": "no id", "ignore_eos": True, "n": 1, "repetition_penalty": 1.5},
        {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body},
        {"custom_id": "d", "body": {**neutral, "messages": parts}},
        {
            "prompt": "e",
            "options": {"num_predict": 3.0, "num_ctx": 9},
            "parameters": {"do_sample": True, "min_new_tokens": 1},
            "stop_token_ids": [5, 6.0],
            "system": "",
        },
        {
            "messages": parts,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "documents": [{"text": "t"}],
            "chat_template_kwargs": {"enable_thinking": False, "x": [1]},
        },
    )
    return tuple(json.dumps(row).encode() for row in rows)


def text_seeds() -> tuple[bytes, ...]:
    """Documents as text and as token ids."""
    return (b'{"text": "one"}\n{"prompt": [1, 2, 3]}\n',)


@cache
def parquet_seed() -> tuple[bytes, ...]:
    """Rows with text, structs and JSON text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"custom_id": "a", "prompt": "Hello", "messages": None, "sampling": '{"seed": 3}'},
        {
            "custom_id": "b",
            "prompt": None,
            "messages": '[{"role": "user", "content": "Hi"}]',
            "sampling": None,
        },
    ]
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return (sink.getvalue(),)


def profile_seeds() -> tuple[bytes, ...]:
    """The paper's columns, and all of ours."""
    short = (
        "device,model,h1,h2,prompt_length,context_length,phase,bits,batch_size,ms_per_layer\n"
        "T4,opt-125m,768,3072,128,0,prefill,4,2,1.5\nV100,x,64,128,1,17,decode,16,1,0.25\n"
    )
    full = (
        short.splitlines()[0] + ",backend,backend_version,dtype,threads,linear_parameters,"
        "query_width,kv_width,spread,repetitions\n"
        "CPU,m,64,128,16,0,prefill,8,2,0.5,torch_8bit,2.13,float32,2,49152,64,32,0.1,9\n"
    )
    return (short.encode(), full.encode())


@cache
def omega_seeds() -> tuple[bytes, ...]:
    """Ours, the nested form, the bare one, and an `.npy`."""
    layers = shape().layers
    rows = [[0.3 / (1 + i), 0.2 / (1 + i), 0.1 / (1 + i), 0.0] for i in range(layers)]
    point = {"bitwidths": [4] * layers, "perplexity": 12.5, "error": 0.1}
    ours = {
        "bits": list(BITS),
        "model_fingerprint": shape().fingerprint(),
        "matrix": rows,
        "provenance": {"method": "variance", "rounding": "nearest", "calibration_tokens": 4096},
        "points": [point, {**point, "perplexity": 11.0, "bitwidths": [8] * layers}],
    }
    named = [dict(zip(map(str, BITS), row, strict=True)) for row in rows]
    nested = {str(i): row for i, row in enumerate(named)}
    array = io.BytesIO()
    np.save(array, np.array(rows))
    documents = (ours, nested, rows)
    return (*(json.dumps(each).encode() for each in documents), array.getvalue())


@cache
def config_seeds() -> tuple[bytes, ...]:
    """One of each family, and a quantized one."""
    opt = {
        "model_type": "opt", "hidden_size": 64, "num_attention_heads": 4, "ffn_dim": 128,
        "num_hidden_layers": 2, "vocab_size": 100, "max_position_embeddings": 128,
        "word_embed_proj_dim": 32, "do_layer_norm_before": True, "enable_bias": True,
    }  # fmt: skip
    bloom = {"model_type": "bloom", "n_embed": 64, "n_head": 4, "n_layer": 2, "vocab_size": 100}
    qwen = {
        **_LLAMA, "model_type": "qwen3", "head_dim": 16, "sliding_window": 64,
        "use_sliding_window": True, "max_window_layers": 0, "attention_bias": False,
    }  # fmt: skip
    stored = {**_LLAMA, "quantization_config": _GPTQ}
    neox = {**_LLAMA, "model_type": "gpt_neox"}
    mistral = {**_LLAMA, "model_type": "mistral", "sliding_window": 32}
    few = {"num_hidden_layers": 2, "full_attention_interval": 2, "hidden_size": 32}
    mixed = (MIXED[name] | few for name in ("qwen3_next-dense", "qwen3_5_moe_text", "gpt_oss"))
    listed = (_LLAMA, opt, bloom, qwen, stored, neox, mistral, *mixed)
    return tuple(json.dumps(each).encode() for each in listed)


FOLDER_BYTES = 1 << 18
"""Bytes of the weights of `folder_seeds`, which are all zeros."""


@cache
def folder_seeds() -> tuple[bytes, ...]:
    """The files of a model of each family: configurations, and the header of its weights."""
    plain = [_folder_seed(json.loads(seed)) for seed in config_seeds() if b"gptq" not in seed]
    return (*plain, *(_folder_seed(dict(_LLAMA), settings) for settings in _STORED))


def _coded(name: str, size: tuple[int, ...], method: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Types and shapes of what stands in place of a weight."""
    if not name.endswith("_proj.weight"):
        return {name: ("F16", size)}
    module, (rows, columns) = name.removesuffix("weight"), size
    groups = columns // 16
    of_method: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
        "awq": {"qweight": ("I32", (columns, rows // 8)), "qzeros": ("I32", (groups, rows // 8)),
                "scales": ("F16", (groups, rows))},
        "auto-round": {"qweight": ("I32", (columns // 8, rows)), "scales": ("F16", (groups, rows)),
                       "qzeros": ("I32", (groups, rows // 8)), "g_idx": ("I32", (columns,))},
        "fp8": {"weight": ("F8_E4M3", size), "weight_scale_inv": ("F32", (-(-rows // 16), groups))},
        "fbgemm_fp8": {"weight": ("F8_E4M3", size), "weight_scale": ("F32", (rows, 1))},
        "bitsandbytes": {"weight": ("I8", size), "SCB": ("F32", (rows,))},
        "compressed-tensors": {
            "weight_packed": ("I32", (rows, columns // 8)), "weight_shape": ("I64", (2,)),
            "weight_scale": ("F16", (rows, groups))},
        "modelopt": {"weight": ("U8", (rows, columns // 2)), "weight_scale_2": ("F32", ()),
                     "weight_scale": ("F8_E4M3", (rows, groups)), "input_scale": ("F32", ())},
        "torchao": {"_weight_qdata": ("I8", size), "_weight_scale": ("F16", (rows, groups)),
                    "_weight_zero_point": ("I8", (rows, groups))},
    }  # fmt: skip
    own = of_method.get(method, {"weight": ("F16", size)})
    return {f"{module}{part}": each for part, each in own.items()}


def _folder_seed(config: dict[str, Any], settings: dict[str, Any] | None = None) -> bytes:
    config |= {"eos_token_id": 2, "pad_token_id": 0, "rope_scaling": None, "rope_theta": 1e4}
    shape = shape_from_config("m", config)
    names = FAMILIES[shape.model_type].architecture
    tensors = dict(end_tensors(shape))
    for index in range(shape.layers):
        own = layer_tensors(shape.layer(index))
        tensors |= {f"{names.layers_path}.{index}.{n}": s for n, s in own.items()}
    head = (shape.vocab_size, shape.word_embedding_size)
    tensors |= {f"{name}.weight": head for name in names.head_names[:1]}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    method = "" if settings is None else str(settings["quant_method"])
    stored = [_coded(name, size, method) for name, size in tensors.items()]
    for name, (dtype, size) in (each for own in stored for each in own.items()):
        stop = start + int(math.prod(size) * _BYTES[dtype])
        header[name] = {"dtype": dtype, "shape": size, "data_offsets": [start, stop]}
        start = stop
    header["padding"] = {"dtype": "U8", "shape": [FOLDER_BYTES - start],
                         "data_offsets": [start, FOLDER_BYTES]}  # fmt: skip
    files = {
        "config.json": config | ({} if settings is None else {"quantization_config": settings}),
        "generation_config.json": {"eos_token_id": [2, 3], "do_sample": False},
        "header": header,
    }
    return json.dumps(files).encode()


def generation_seeds() -> tuple[bytes, ...]:
    """Of a chat model, and of one with much that is not followed."""
    chat = {
        "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1,
        "repetition_penalty": 1.05, "eos_token_id": [2, 7], "stop_strings": ["###"],
    }  # fmt: skip
    other = {
        "bad_words_ids": [[5]], "num_beams": 4, "max_new_tokens": 3, "max_length": 20,
        "temperature": 0.5, "eos_token_id": 2, "typical_p": 0.9,
    }  # fmt: skip
    return tuple(json.dumps(each).encode() for each in (chat, other))


def gptq_seeds() -> tuple[bytes, ...]:
    """With and without rules by module."""
    plain = {name: value for name, value in _GPTQ.items() if name != "dynamic"}
    tables = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
    return tuple(json.dumps(each).encode() for each in (_GPTQ, plain, tables, *_STORED))


@cache
def safetensors_seed() -> bytes:
    """Four small tensors."""
    import torch
    from safetensors.torch import save

    tensors = {
        "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
        "a.bias": torch.ones(3, dtype=torch.float16),
        "b.codes": torch.arange(8, dtype=torch.uint8),
        "empty": torch.empty(0, 5, dtype=torch.bfloat16),
    }
    return bytes(save(tensors, {"format": "pt"}))


def index_seed() -> tuple[bytes, ...]:
    """An index of that file."""
    names = ("a.weight", "a.bias", "b.codes", "empty")
    index = {"metadata": {"total_size": 62}, "weight_map": dict.fromkeys(names, "a.safetensors")}
    return (json.dumps(index).encode(),)


def manifest_seed() -> tuple[bytes, ...]:
    """Of a job that is done."""
    from dataclasses import asdict

    from actors.messages import Sampling
    from llmpq.jobs.store import JobIdentity, Manifest

    made = Manifest.of(JobIdentity("m", "name", Sampling(max_new_tokens=8)), 1, False)
    return (json.dumps(asdict(made)).encode(),)


def result_seed() -> tuple[bytes, ...]:
    """A line of results."""
    from llmpq.jobs.result_lines import line_of
    from llmpq.rows.results import Result

    result = Result("a", "text", (1, 2), "stop")
    return (line_of(result, f"{'0' * 12}-{'1' * 20}"),)
