"""Experts that are read one by one and packed, against transformers' with the weights that the
packed ones stand for, in every form that checkpoints have them in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from quant.backends.kernel_classes import usable_backend
from quant.checkpoint.decoding import decode_fp4, scale_values
from quant.checkpoint.reader import Checkpoint
from quant.common.errors import CheckpointError
from quant.devices import local_processor
from quant.experts import QuantizedExperts, pad_products
from quant.linear import LayerForm
from quant.loading.cache_folder import ShardCache
from quant.loading.layer_load import LayerLoad
from quant.loading.loader import load_layer, module_nbytes
from quant.rounding.importance import InputStatistics, LayerImportance, LinearInputs
from quant.rounding.ways import Rounding
from quant.scheme import FULL_BITS, LinearShape

HIDDEN, WIDTH, EXPERTS, ASKED = 64, 32, 6, 2
CPU = torch.device("cpu")
HERE = local_processor(CPU)
PREFIX = "model.layers.0"
NAME = f"{PREFIX}.mlp.experts"
QWEN = Qwen3MoeConfig(
    hidden_size=HIDDEN,
    moe_intermediate_size=WIDTH,
    num_experts=EXPERTS,
    num_experts_per_tok=ASKED,
    norm_topk_prob=True,
    experts_implementation="eager",
)
OSS = GptOssConfig(
    hidden_size=HIDDEN,
    intermediate_size=WIDTH,
    num_local_experts=EXPERTS,
    num_experts_per_tok=ASKED,
    experts_implementation="eager",
)


class Layer(nn.Module):
    """Nothing of a layer but its experts, their router and a gate that stays as it is."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        block: Any = GptOssMLP if config is OSS else Qwen3MoeSparseMoeBlock
        self.mlp = block(config)
        self.mlp.shared_expert_gate = nn.Linear(HIDDEN, 1, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        out = self.mlp(hidden[None])
        return (out[0] if isinstance(out, tuple) else out)[0]


def empty(config: Any) -> Layer:
    with torch.device("meta"):
        return Layer(config).eval()


def filled(config: Any) -> Layer:
    torch.manual_seed(0)
    layer = Layer(config).eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.2)
    return layer.requires_grad_(False)


def stored(layer: Layer, form: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint; `form` of the experts: each by itself, or as
    transformers fuses them.
    """
    found = {f"{PREFIX}.{name}": tensor for name, tensor in layer.state_dict().items()}
    if form != "each":
        return {name: tensor.contiguous() for name, tensor in found.items()}
    gate_up, down = (found.pop(f"{NAME}.{part}_proj") for part in ("gate_up", "down"))
    for index in range(EXPERTS):
        gate, up = gate_up[index].chunk(2)
        parts = {"gate": gate, "up": up, "down": down[index]}
        each = {f"{NAME}.{index}.{part}_proj.weight": tensor for part, tensor in parts.items()}
        found |= {name: tensor.contiguous() for name, tensor in each.items()}
    return found


def mxfp4(layer: Layer) -> dict[str, Tensor]:
    """Random codes and scales; `layer` gets the weights that transformers makes of them."""
    found = {f"{PREFIX}.{name}": tensor for name, tensor in layer.state_dict().items()}
    draw = torch.Generator().manual_seed(1)
    for part, rows, columns in (("gate_up", 2 * WIDTH, HIDDEN), ("down", HIDDEN, WIDTH)):
        size = (EXPERTS, rows, columns // 32)
        blocks = torch.randint(256, (*size, 16), dtype=torch.uint8, generator=draw)
        scales = torch.randint(120, 126, size, dtype=torch.uint8, generator=draw)
        del found[f"{NAME}.{part}_proj"]
        found |= {f"{NAME}.{part}_proj_blocks": blocks, f"{NAME}.{part}_proj_scales": scales}
        weight = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
        setattr(layer.mlp.experts, f"{part}_proj", nn.Parameter(weight.float(), False))
    return found


def represented(layer: Layer, form: LayerForm, inputs: Mapping[str, Tensor]) -> Layer:
    """`layer` with the weights that kernels would round to; `inputs`: mean squares of each part."""
    if form.bits == FULL_BITS:
        return layer
    experts: Any = layer.mlp.experts
    turned = bool(getattr(experts, "is_transposed", False))
    for part in ("gate_up_proj", "down_proj"):
        weights = getattr(experts, part)
        for index in range(EXPERTS):
            weight = weights[index].t() if turned else weights[index]
            shape = LinearShape(weight.shape[1], weight.shape[0])
            backend = usable_backend(form.rule_of(shape).name, form.bits, form.dtype, form.device)
            seen = inputs.get(part)
            if seen is not None and seen.dim() == 2:
                seen = seen[index]
            statistics = None if seen is None else InputStatistics(seen, seen.sqrt())
            rounding = Rounding.of_tensor(form.rounding, f"{NAME}.{index}.{part}", statistics)
            meant = backend.represent(weight.contiguous(), rounding)
            weights[index] = meant.t() if turned else meant
    return layer


def load(folder: Path, config: Any, form: LayerForm, **others: Any) -> Layer:
    layer = empty(config)
    cache = others.pop("cache", None)
    quantized = frozenset({"mlp.shared_expert.up_proj"})
    load_layer(
        LayerLoad(layer, PREFIX, form, quantized=quantized, **others), Checkpoint(folder), cache
    )
    return layer


@pytest.mark.parametrize("bits", [16, 8, 6, 4, 3])
@pytest.mark.parametrize("kind", ["each", "fused", "transposed", "mxfp4"])
def test_experts_compute_what_transformers_does_with_their_weights(
    kind: str, bits: int, tmp_path: Path
) -> None:
    config = QWEN if kind in ("each", "fused") else OSS
    layer = filled(config)
    tensors = mxfp4(layer) if kind == "mxfp4" else stored(layer, kind)
    save_file(tensors, tmp_path / "model.safetensors")
    form = LayerForm(bits, HERE, torch.float32, CPU)
    loaded = load(tmp_path, config, form)
    assert isinstance(loaded.mlp.experts, QuantizedExperts)
    assert type(loaded.mlp.shared_expert_gate) is nn.Linear, "a gate stays in the compute type"
    wanted = represented(layer, form, {})
    for tokens in (1, 5, 40):
        hidden = torch.randn(tokens, HIDDEN)
        error = (loaded(hidden) - wanted(hidden)).norm() / wanted(hidden).norm()
        assert error < (0.02 if bits == 8 else 2e-5), tokens  # oneDNN rounds activations too
    rules = [
        form.rule_of(shape).nbytes(shape, "float32")
        for shape in (LinearShape(HIDDEN, 2 * WIDTH), LinearShape(WIDTH, HIDDEN))
    ]
    assert loaded.mlp.experts.nbytes == EXPERTS * sum(rules)
    assert module_nbytes(loaded.mlp.experts) == EXPERTS * sum(rules) + sum(
        parameter.nbytes for parameter in loaded.mlp.experts.parameters()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4, 3])
def test_experts_from_the_cache_are_the_same_experts(
    bits: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(stored(filled(OSS), "fused"), tmp_path / "model.safetensors")
    form = LayerForm(bits, HERE, dtype, CPU)
    without = load(tmp_path, OSS, form)
    written = load(tmp_path, OSS, form, cache=ShardCache(tmp_path / "cache"))
    monkeypatch.setattr(Checkpoint, "read", None)
    found = load(tmp_path, OSS, form, cache=ShardCache(tmp_path / "cache"))
    hidden = torch.randn(9, HIDDEN, dtype=dtype)
    assert torch.equal(written(hidden), without(hidden))
    assert torch.equal(found(hidden), without(hidden))
    assert module_nbytes(found) == module_nbytes(without)
    assert repr(found) == repr(without)


def test_blocks_of_four_bits_are_decoded_as_transformers_does() -> None:
    draw = torch.Generator().manual_seed(2)
    blocks = torch.randint(256, (3, 5, 4, 16), dtype=torch.uint8, generator=draw)
    scales = torch.randint(256, (3, 5, 4), dtype=torch.uint8, generator=draw)
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    found = decode_fp4(blocks, scale_values(scales)).bfloat16()
    assert torch.equal(found.transpose(1, 2).view(torch.int16), wanted.view(torch.int16))


def test_weights_are_rounded_by_what_each_expert_has_seen(tmp_path: Path) -> None:
    layer = filled(QWEN)
    layer.mlp.gate.weight[0] = 0
    layer.mlp.gate.weight[0, 0] = -1e3  # nobody asks this one where the first input is positive
    save_file(stored(layer, "each"), tmp_path / "model.safetensors")
    form = LayerForm(4, HERE, torch.float32, CPU)
    plain = load(tmp_path, QWEN, replace(form, bits=16))
    statistics, hidden = LinearInputs(), torch.randn(50, HIDDEN)
    hidden[:, 0] = hidden[:, 0].abs() + 1
    experts: Any = plain.mlp.experts
    seen: dict[int, list[Tensor]] = {}

    def note(weight: str, rows: Tensor, counts: list[int]) -> None:
        for index, own in enumerate(rows.split(counts) if weight == "down_proj" else ()):
            seen.setdefault(index, []).append(own)

    experts.seen = note
    plain(hidden)
    with statistics.watching({}, {"mlp.experts": experts}):
        for part in hidden.split(17):
            plain(part)
    found = statistics.results()
    own = torch.stack([torch.cat(seen[index]).square().sum(0) for index in range(EXPERTS)])
    counts = torch.tensor([max(1, len(torch.cat(seen[i]))) for i in range(EXPERTS)])[:, None]
    own /= counts
    own = (counts * own + 32 * own.mean(1, keepdim=True)) / (counts + 32)  # as of 32 like columns
    assert not own[0].any()
    assert torch.allclose(found["mlp.experts.down_proj"].mean_square.view(EXPERTS, -1), own)
    hidden_squares = hidden.square().mean(0)
    assert torch.allclose(found["mlp.experts.gate_up_proj"].mean_square, hidden_squares)
    importance = LayerImportance(found, torch.zeros(1, 1))
    rounded = load(tmp_path, QWEN, form, importance=importance)
    inputs = {"gate_up_proj": found["mlp.experts.gate_up_proj"].mean_square}
    inputs["down_proj"] = found["mlp.experts.down_proj"].mean_square.view(EXPERTS, -1)
    wanted = represented(layer, form, inputs)(hidden)
    assert (rounded(hidden) - wanted).norm() < 1e-5 * wanted.norm()
    assert (load(tmp_path, QWEN, form)(hidden) - wanted).norm() > 1e-3 * wanted.norm()


def test_padded_products_do_not_depend_on_who_else_asks(tmp_path: Path) -> None:
    save_file(stored(filled(QWEN), "each"), tmp_path / "model.safetensors")
    loaded = load(tmp_path, QWEN, LayerForm(4, HERE, torch.float32, CPU))
    pad_products(loaded, 32)
    hidden = torch.randn(32, HIDDEN)
    weights, index = torch.rand(32, EXPERTS).topk(ASKED)
    together = loaded.mlp.experts(hidden, index, weights)
    for row in range(0, 32, 5):
        own = slice(row, row + 1)
        alone = loaded.mlp.experts(hidden[own], index[own], weights[own])
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("kind", ["missing", "misshaped", "codes", "not finite"])
def test_unusable_experts_are_named(kind: str, tmp_path: Path) -> None:
    tensors = stored(filled(QWEN), "each")
    name = f"{NAME}.3.up_proj.weight"
    if kind == "missing":
        del tensors[name]
    elif kind == "misshaped":
        tensors[name] = torch.zeros(WIDTH, HIDDEN + 1)
    elif kind == "codes":
        tensors[name] = torch.zeros(WIDTH, HIDDEN, dtype=torch.int8)
    else:
        tensors[name][3, 4] = torch.nan
        name = f"{NAME}.3.gate_up_proj"
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load(tmp_path, QWEN, LayerForm(4, HERE, torch.float32, CPU))
