"""Weights as tools store them quantized, and saved models whose linears are stored so."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Parts = Mapping[str, Tensor]
Encode = Callable[[Tensor], tuple[Parts, Tensor] | None]
"""Gives the tensors of a module in place of its weight, and the weight that they stand for; None
where the tool leaves it as it is.
"""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GROUP, BLOCK = 4, 16


def affine(weight: Tensor, group: int, bits: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Codes `[out, in]`, scales that are powers of two, and zeros `[out, groups]`: products with
    them are exact in every type.
    """
    grouped = weight.unflatten(1, (-1, group))
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    most = 2**bits - 1
    scale = torch.exp2(torch.ceil(torch.log2((high - low) / (most - 1))))
    zero = torch.round(-low / scale)
    codes = torch.round(grouped / scale.unsqueeze(-1)) + zero.unsqueeze(-1)
    return codes.clamp(0, most).flatten(1).int(), scale, zero.int()


def meant(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """What integer codes stand for, in float64."""
    group = codes.shape[1] // scale.shape[1]
    each = codes.unflatten(1, (-1, group)).double() - zero.unsqueeze(-1)
    return (each * scale.double().unsqueeze(-1)).flatten(1)


def awq_words(codes: Tensor) -> Tensor:
    """Words of eight neighbouring codes each, along the last dimension, as AutoAWQ has them."""
    words = torch.zeros(*codes.shape[:-1], codes.shape[-1] // 8, dtype=torch.int64)
    for place, own in enumerate(AWQ_ORDER):
        words += codes[..., own::8].long() << 4 * place
    return words.to(torch.int32)


def awq_parts(codes: Tensor, scale: Tensor, zero: Tensor) -> Parts:
    return {
        "qweight": awq_words(codes.t()),
        "qzeros": awq_words(zero.t()),
        "scales": scale.t().half().contiguous(),
    }


def awq(weight: Tensor) -> tuple[Parts, Tensor] | None:
    if weight.shape[0] % 8:
        return None
    made = affine(weight, GROUP)
    return awq_parts(*made), meant(*made).float()


def gptq(weight: Tensor) -> tuple[Parts, Tensor] | None:
    """As GPTQModel stores 4 bit: codes in words along inputs, zeros less one along outputs."""
    if weight.shape[0] % 8 or weight.shape[1] % 8:
        return None
    codes, scale, zero = affine(weight, GROUP)
    zero = zero.clamp(min=1)

    def words(numbers: Tensor) -> Tensor:
        eight = numbers.unflatten(-1, (-1, 8)).long() << 4 * torch.arange(8)
        return eight.sum(-1).to(torch.int32)

    parts = {
        "qweight": words(codes).t(),
        "qzeros": words(zero.t() - 1),
        "scales": scale.t().half(),
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
    }
    return parts, meant(codes, scale, zero).float()


def modelopt(weight: Tensor) -> tuple[Parts, Tensor] | None:
    """NVFP4 as ModelOpt stores it: as compressed-tensors, with the inverse of the scale for all."""
    if weight.shape[1] % 16:
        return None
    arguments = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    parts, restored = compress(weight, symmetric=True, **arguments)
    own = {"weight": parts["weight_packed"], "weight_scale": parts["weight_scale"]}
    return own | {"weight_scale_2": (1 / parts["weight_global_scale"]).view(())}, restored


def torchao(weight: Tensor) -> tuple[Parts, Tensor]:
    """Integers of 4 bit, one a byte, as torchao stores them."""
    codes, scale, zero = affine(weight, GROUP)
    parts = {"_weight_qdata": codes - 8, "_weight_zero_point": zero - 8}
    own = {name: each.to(torch.int8) for name, each in parts.items()}
    return own | {"_weight_scale": scale}, meant(codes, scale, zero).float()


def expanded(scale: Tensor, shape: torch.Size, block: int = BLOCK) -> Tensor:
    """The scale of each weight; the last blocks may be smaller."""
    whole = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
    return whole[: shape[0], : shape[1]]


def fp8(weight: Tensor) -> tuple[Parts, Tensor]:
    """FP8 with a scale for each block."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    scale = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            spans = (slice(BLOCK * at, BLOCK * (at + 1)) for at in (row, column))
            scale[row, column] = weight[tuple(spans)].abs().max() / 448
    codes = (weight / expanded(scale, weight.shape)).to(torch.float8_e4m3fn)
    parts = {"weight": codes, "weight_scale_inv": scale}
    return parts, codes.float() * expanded(scale, weight.shape)


def compressed(**arguments: Any) -> Encode:
    """As the package compressed-tensors stores weights with these `QuantizationArgs`."""

    def encode(weight: Tensor) -> tuple[Parts, Tensor]:
        return compress(weight, **arguments)

    return encode


def compress(weight: Tensor, **arguments: Any) -> tuple[Parts, Tensor]:
    return by_library(weight, scales_of(weight, **arguments), **arguments)


def scales_of(weight: Tensor, **arguments: Any) -> dict[str, Tensor]:
    """Scales, and zeros where there are, for each tensor, row, block or group of `weight`."""
    bits, strategy = arguments["num_bits"], arguments["strategy"]
    size = arguments.get("group_size") or weight.shape[1]
    largest = weight.unflatten(1, (-1, size)).abs().amax(-1)
    if strategy == "tensor":
        largest = weight.abs().max().view(1)
    elif strategy == "block":
        largest = fp8(weight)[0]["weight_scale_inv"] * 448
    if arguments["type"] == "float":
        scale = largest / (448 if bits == 8 else 6)
        if strategy == "tensor_group":  # NVFP4: scales of FP8, and a power of two for all
            return {"weight_scale": (scale * 4).to(torch.float8_e4m3fn).float(),
                    "weight_global_scale": torch.tensor([4.0])}  # fmt: skip
        return {"weight_scale": torch.exp2(scale.log2().ceil()) if strategy == "group" else scale}
    half = 1 << (bits - 1)
    if arguments["symmetric"]:
        scale = largest / (half - 0.5)
        return {"weight_scale": scale if bits == 8 else scale.half()}
    _, scale, zero = affine(weight, size, bits)
    return {"weight_scale": scale, "weight_zero_point": (zero - half).to(torch.int8)}


def by_library(
    weight: Tensor, scales: Mapping[str, Tensor], **arguments: Any
) -> tuple[Parts, Tensor]:
    """What compressed-tensors stores of a weight, and what it makes of that again."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationScheme

    given: dict[str, Any] = {"targets": ["Linear"], "weights": arguments}
    if arguments["num_bits"] == 8 and "group_size" not in arguments:
        kept = {name: arguments[name] for name in ("num_bits", "type", "symmetric")}
        given["input_activations"] = {**kept, "strategy": "token", "dynamic": True}
    scheme = QuantizationScheme.model_validate(given)
    layout = infer_module_format(torch.nn.Linear, scheme).value
    packer: Any = BaseCompressor.get_value_from_registry(layout)
    parts = packer.compress({"weight": weight, **scales}, scheme)
    return dict(parts), packer.decompress(dict(parts), scheme)["weight"]


def of_table(weight: Tensor, kind: str = "nf4", nested: bool = True) -> tuple[Parts, Tensor]:
    """As bitsandbytes stores weights in 4 bit, and what its code for any device makes of them: that
    for CPUs (0.50.2) is wrong for rows of other than whole blocks.
    """
    from bitsandbytes import functional
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute

    with torch.compiler.set_stance("force_eager"):  # compiling takes seconds for each shape
        packed, state = functional.quantize_4bit(
            weight, blocksize=64, quant_type=kind, compress_statistics=nested
        )
        parts = {f"weight.{name}": each for name, each in state.as_dict(packed=True).items()}
        largest = state.absmax
        if nested:
            largest = functional.dequantize_blockwise(largest, state.state2) + state.offset
        own = (state.code, state.blocksize, weight.shape, torch.float32)
        restored: Tensor = _dequantize_4bit_compute(packed.view(-1), largest, *own)
    return {"weight": packed, **parts}, restored


def _groups(layout: str, **weights: Any) -> dict[str, Any]:
    """The configuration of a checkpoint of compressed-tensors with one scheme."""
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", r"re:.*mlp\.gate$"],
    }


_INT4 = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": GROUP}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}

FORMATS: dict[str, tuple[dict[str, Any], Encode, int]] = {
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm",
         "zero_point": True, "modules_to_not_convert": ["kv_a_proj_with_mqa"]},
        awq, 4,
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "lm_head": True,
         "dynamic": {r"-:.*\.kv_a_proj_with_mqa": {}, "lm_head": {"bits": 4}}},
        gptq, 4,
    ),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, modelopt, 16),
    "torchao": (
        {"quant_method": "torchao", "quant_type": {"default": {
            "_type": "IntxWeightOnlyConfig", "_data": {
                "weight_dtype": {"_data": "int4"},
                "granularity": {"_data": {"group_size": GROUP}}}}}},
        torchao, 4,
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3"},
        fp8, 16,
    ),
    "nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
         "llm_int8_skip_modules": ["lm_head"]},
        of_table, 16,
    ),
    "int4": (_groups("pack-quantized", **_INT4), compressed(**_INT4), 4),
    "int8": (_groups("int-quantized", **_INT8), compressed(**_INT8), 8),
    "float8": (_groups("float-quantized", **_FLOAT8), compressed(**_FLOAT8), 16),
}  # fmt: skip
"""Settings of a checkpoint, how its linears are stored, and the bits that they are planned with."""


def store(folder: Path, name: str) -> Path:
    """Store the linears of a saved model's layers as in `FORMATS`; return a folder with the same
    model, of the plain weights that these stand for.
    """
    settings, encode, _ = FORMATS[name]
    (path,) = folder.glob("*.safetensors")
    config = json.loads((folder / "config.json").read_text())
    coded, plain = load_file(path), load_file(path)
    for full, weight in list(coded.items()):
        is_linear = full.endswith("_proj.weight") or full.endswith("_mqa.weight")
        is_head = full == "lm_head.weight" and "lm_head" in settings
        if not is_head and (".layers." not in full or not is_linear):
            continue
        made = encode(weight)
        if made is not None:
            del coded[full]
            parts, plain[full] = made
            coded |= {f"{full.removesuffix('weight')}{part}": each for part, each in parts.items()}
    save_file({n: t.contiguous() for n, t in coded.items()}, path, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    other = folder / "plain"
    other.mkdir()
    save_file({n: t.contiguous() for n, t in plain.items()}, other / path.name, {"format": "pt"})
    (other / "config.json").write_text(json.dumps(config))
    return other
