from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from quant.backends.table import rule_for
from quant.checkpoint.reader import Checkpoint
from quant.checkpoint.stored_tensors import SINGLE_FILE
from quant.common.errors import CheckpointError
from quant.devices import local_processor
from quant.linear import LayerForm, QuantizedLinear
from quant.loading.layer_load import LayerLoad
from quant.loading.loader import load_layer, load_tensors, module_nbytes
from quant.rounding.canonical import dequantize, quantize
from quant.scheme import LinearShape

CPU = torch.device("cpu")
HERE = local_processor(CPU)
FAMILIES = ("llama", "opt", "bloom")

Build = Callable[[str], PreTrainedModel]
MetaLayer = Callable[[PreTrainedModel, str], nn.Module]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("base_only", [False, True])
def test_sixteen_bits_is_the_stored_layer(
    family: str,
    base_only: bool,
    tiny_model: Build,
    layer_list: Build,
    meta_layer: MetaLayer,
    tmp_path: Path,
) -> None:
    """Sharded, and saved with or without the base model's prefix."""
    model = tiny_model(family)
    saved = model.base_model if base_only else model
    saved.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    checkpoint = Checkpoint(tmp_path)
    name = f"{layer_list(family)}.1"
    layer = meta_layer(model, name)
    load_layer(LayerLoad(layer, name, LayerForm(16, HERE, torch.float32, CPU)), checkpoint)
    expected = model.get_submodule(name).state_dict()
    assert layer.state_dict().keys() == expected.keys()
    for key, tensor in layer.state_dict().items():
        assert torch.equal(tensor, expected[key])
    assert module_nbytes(layer) == sum(4 * tensor.numel() for tensor in expected.values())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_layer(
    family: str,
    bits: int,
    dtype: torch.dtype,
    tiny_model: Build,
    layer_list: Build,
    meta_layer: MetaLayer,
    tmp_path: Path,
) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    name = f"{layer_list(family)}.1"
    layer = meta_layer(model, name)
    load_layer(LayerLoad(layer, name, LayerForm(bits, HERE, dtype, CPU)), Checkpoint(tmp_path))
    original = model.get_submodule(name)
    planned_bytes = 0
    for path, linear in original.named_modules():
        if not isinstance(linear, nn.Linear):
            continue
        loaded = layer.get_submodule(path)
        assert isinstance(loaded, QuantizedLinear)
        x = torch.randn(4, linear.in_features).to(dtype)
        expected = x.float() @ dequantize(quantize(linear.weight, bits)).t()
        if linear.bias is not None:
            expected += linear.bias
        error = (loaded(x).float() - expected).norm() / expected.norm()
        assert error < 0.03  # activations of 8 bit: 0.009; of bfloat16: 0.004
        shape = LinearShape(linear.in_features, linear.out_features)
        dtype_name = str(dtype).removeprefix("torch.")
        planned_bytes += rule_for(HERE, bits, shape, dtype_name).nbytes(shape, dtype_name)
    kept = sum(parameter.numel() for parameter in original.parameters() if parameter.dim() == 1)
    assert module_nbytes(layer) == planned_bytes + kept * dtype.itemsize
    assert not any(parameter.is_meta for parameter in layer.parameters())
    assert all(parameter.dtype == dtype for parameter in layer.parameters())


def test_tied_head_is_filled_from_the_embedding(tiny_model: Build, tmp_path: Path) -> None:
    model = tiny_model("opt")
    model.save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert "lm_head.weight" not in checkpoint.names()
    head = nn.Linear(64, 96, bias=False, device="meta")
    load_tensors(head, checkpoint, "model.decoder.embed_tokens", torch.float16, CPU)
    assert torch.equal(head.weight, model.lm_head.weight.half())


def test_parts_that_are_not_layers(tiny_model: Build, tmp_path: Path) -> None:
    model = tiny_model("bloom")
    model.save_pretrained(tmp_path)
    norm = nn.LayerNorm(64, device="meta")
    load_tensors(norm, Checkpoint(tmp_path), "transformer.ln_f", torch.float32, CPU)
    assert torch.equal(norm.weight, model.transformer.ln_f.weight)
    assert torch.equal(norm.bias, model.transformer.ln_f.bias)


def test_shared_storage_counts_once() -> None:
    embedding = nn.Embedding(10, 8)
    head = nn.Linear(8, 10, bias=False)
    head.weight = embedding.weight
    assert module_nbytes(nn.ModuleList([embedding, head])) == 10 * 8 * 4


@pytest.fixture
def llama_folder(tiny_model: Build, tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path)
    return tmp_path


def change(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Replace a stored tensor, or take it out."""
    tensors = {key: value.clone() for key, value in load_file(folder / SINGLE_FILE).items()}
    del tensors[name]
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, folder / SINGLE_FILE)


@pytest.mark.parametrize(
    ("name", "bits", "value"),
    [
        ("self_attn.q_proj.weight", 4, torch.nan),
        ("self_attn.q_proj.weight", 16, -torch.inf),
        ("fc2.weight", 4, -torch.inf),
        ("fc2.weight", 16, 1e30),
        ("self_attn.q_proj.bias", 4, 1e30),
        ("final_layer_norm.bias", 16, torch.nan),
    ],
)
def test_values_that_are_not_finite(
    name: str, bits: int, value: float, tiny_model: Build, meta_layer: MetaLayer, tmp_path: Path
) -> None:
    """1e30 is none in float16; a single one among the others is found."""
    tiny_model("opt").save_pretrained(tmp_path)
    full_name = f"model.decoder.layers.1.{name}"
    damaged = tiny_model("opt").state_dict()[full_name].clone()
    damaged.view(-1)[-3] = value
    change(tmp_path, full_name, damaged)
    layer = meta_layer(tiny_model("opt"), "model.decoder.layers.1")
    with pytest.raises(CheckpointError, match=rf"tensor {full_name} in {tmp_path}: .*NaN"):
        load_layer(
            LayerLoad(layer, "model.decoder.layers.1", LayerForm(bits, HERE, torch.float16, CPU)),
            Checkpoint(tmp_path),
        )


@pytest.mark.parametrize("name", ["model.embed_tokens", "model.norm", "lm_head"])
def test_parts_that_are_not_finite(name: str, llama_folder: Path, tiny_model: Build) -> None:
    part = tiny_model("llama").get_submodule(name)
    assert isinstance(part.weight, torch.Tensor)
    damaged = part.weight.detach().clone()
    damaged.view(-1)[-1] = torch.inf
    change(llama_folder, f"{name}.weight", damaged)
    with pytest.raises(CheckpointError, match=rf"tensor {name}\.weight in {llama_folder}: .*NaN"):
        load_tensors(part.to("meta"), Checkpoint(llama_folder), name, torch.bfloat16, CPU)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (None, r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"),
        (torch.zeros(64, 160), r"is \[64, 160\] but the model's configuration wants \[160, 64\]"),
        (torch.full((160, 64), torch.nan), r"layers\.1\.mlp\.up_proj\.weight in .*hold NaN"),
        (torch.zeros(160, 64, dtype=torch.int8), r"holds torch\.int8: .*quantized already"),
        (torch.zeros(160, 64).to(torch.float8_e4m3fn), r"float8_e4m3fn: .*quantized already"),
    ],
)
def test_tensors_that_do_not_fit(
    tensor: torch.Tensor | None,
    message: str,
    llama_folder: Path,
    tiny_model: Build,
    meta_layer: MetaLayer,
) -> None:
    change(llama_folder, "model.layers.1.mlp.up_proj.weight", tensor)
    layer = meta_layer(tiny_model("llama"), "model.layers.1")
    with pytest.raises(CheckpointError, match=message):
        load_layer(
            LayerLoad(layer, "model.layers.1", LayerForm(4, HERE, torch.bfloat16, CPU)),
            Checkpoint(llama_folder),
        )


@pytest.mark.parametrize(
    ("left_out", "value", "refused"),
    [
        ("self_attn.q_proj.bias", 1.0, True),
        ("self_attn.q_proj.bias", 0.0, False),  # of auto-gptq, where the model has none
        ("self_attn.q_norm.weight", 1.0, True),
        ("self_attn.rotary_emb.inv_freq", 1.0, False),
    ],
)
def test_what_answers_depend_on_is_never_left_out(
    left_out: str,
    value: float,
    refused: bool,
    llama_folder: Path,
    tiny_model: Build,
    meta_layer: MetaLayer,
) -> None:
    tensors = load_file(llama_folder / SINGLE_FILE)
    tensors[f"model.layers.1.{left_out}"] = torch.full((8,), value)
    save_file(tensors, llama_folder / SINGLE_FILE)

    def load(index: int) -> None:
        name, form = f"model.layers.{index}", LayerForm(16, HERE, torch.float32, CPU)
        layer = meta_layer(tiny_model("llama"), name)
        load_layer(LayerLoad(layer, name, form), Checkpoint(llama_folder))

    load(0)
    if not refused:
        load(1)
        return
    with pytest.raises(
        CheckpointError, match=rf"model\.layers\.1\.{left_out} .*has no place for it"
    ):
        load(1)
