"""Parts of linears of GPTQ checkpoints, as ranks of a stage load them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quant.checkpoint.codes import GroupCodes
from quant.checkpoint.reader import Checkpoint
from quant.checkpoint.stored_tensors import SINGLE_FILE
from quant.common.errors import CheckpointError
from quant.linear import LayerForm, QuantizedLinear
from quant.loading.loader import linear_as_stored
from quant.rounding.encoding import gptq_tensors
from quant.rounding.gptq import gptq
from quant.scheme import AFFINE_BITS, COLUMNS, ROWS, Cut, GptqOptions, Processor

MODULE = "model.layers.0.mlp.down_proj"
SHAPE = (32, 256)
CUTS = (
    Cut(ROWS, 0, 12, 32),
    Cut(ROWS, 13, 32, 32),
    Cut(COLUMNS, 0, 128, 256),
    Cut(COLUMNS, 96, 256, 256),  # through a group
)


def saved(folder: Path, bits: int, act_order: bool = False) -> Checkpoint:
    """A checkpoint of one linear in groups of 64, in a random order with `act_order`."""
    draws = torch.Generator().manual_seed(bits)
    groups = torch.arange(256, dtype=torch.int32) // 64
    weight = GroupCodes(
        codes=torch.randint(2**bits, SHAPE, generator=draws, dtype=torch.uint8),
        scale=(torch.rand(32, 4, generator=draws) * 0.02 + 0.001).half(),
        zero=torch.randint(1, 2**bits, (32, 4), generator=draws, dtype=torch.uint8),
        group_of_column=groups[torch.randperm(256, generator=draws)] if act_order else groups,
        bits=bits,
    )
    tensors = gptq_tensors(weight, zero_offset=1)
    save_file({f"{MODULE}.{part}": each for part, each in tensors.items()}, folder / SINGLE_FILE)
    entries = {"quant_method": "gptq", "bits": bits, "group_size": 64, "desc_act": act_order}
    (folder / "config.json").write_text(json.dumps({"quantization_config": entries}))
    return Checkpoint(folder)


def saved_narrow(folder: Path, bits: int) -> Checkpoint:
    """The same of narrow groups."""
    weight = 0.1 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(bits))
    weight *= torch.logspace(-2, 2, 32)[:, None]
    made = gptq(weight, torch.eye(256), bits, GptqOptions(narrow=True))
    tensors = gptq_tensors(made, zero_offset=0)
    assert tensors["narrow"].shape == (32, 1 + 256 // 32, 2)
    save_file({f"{MODULE}.{part}": each for part, each in tensors.items()}, folder / SINGLE_FILE)
    entries = {"quant_method": "gptq", "bits": bits, "group_size": 32, "format": "llmpq"}
    (folder / "config.json").write_text(json.dumps({"quantization_config": entries}))
    assert torch.equal(Checkpoint(folder).read(f"{MODULE}.weight"), made.dequantize())
    return Checkpoint(folder)


def form(bits: int) -> LayerForm:
    processor = Processor(instruction_sets=frozenset())
    return LayerForm(bits, processor, torch.float32, torch.device("cpu"))


def weight_of(checkpoint: Checkpoint, bits: int, cut: Cut | None = None) -> torch.Tensor:
    """The weight `[out, in]` that the loaded linear multiplies with."""
    linear = linear_as_stored(checkpoint, MODULE, SHAPE, form(bits), cut)
    assert isinstance(linear, QuantizedLinear)
    return linear(torch.eye(linear.in_features)).t()


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_part_has_the_weights_of_the_whole(bits: int, cut: Cut, tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, bits)
    whole = weight_of(checkpoint, bits)
    assert torch.equal(weight_of(checkpoint, bits, cut), whole[cut.index])


@pytest.mark.parametrize("bits", AFFINE_BITS)
@pytest.mark.parametrize("cut", [*CUTS, Cut(COLUMNS, 80, 208, 256)], ids=str)
def test_a_part_has_the_narrow_groups_of_the_whole(bits: int, cut: Cut, tmp_path: Path) -> None:
    checkpoint = saved_narrow(tmp_path, bits)
    whole = weight_of(checkpoint, bits)
    assert torch.equal(whole, checkpoint.read(f"{MODULE}.weight"))
    assert torch.equal(weight_of(checkpoint, bits, cut), whole[cut.index])


def test_narrow_groups_are_held_in_a_byte_each(tmp_path: Path) -> None:
    linear = linear_as_stored(saved_narrow(tmp_path, 4), MODULE, SHAPE, form(4))
    assert linear.packed.nbytes == 32 * (256 // 2 + 2 * (1 + 256 // 32))


@pytest.mark.parametrize("shape", [(32, 8, 2), (32, 9, 1), (31, 9, 2)])
def test_narrow_groups_of_other_shapes_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    saved_narrow(tmp_path, 4)
    tensors = load_file(tmp_path / SINGLE_FILE)
    tensors[f"{MODULE}.narrow"] = torch.ones(shape, dtype=torch.uint8)
    save_file(tensors, tmp_path / SINGLE_FILE)
    with pytest.raises(CheckpointError, match=r"down_proj\.(narrow|qweight) is .* but"):
        weight_of(Checkpoint(tmp_path), 4)


@pytest.mark.parametrize("cut", CUTS[:2], ids=str)
def test_rows_are_cut_where_columns_have_an_order(cut: Cut, tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, 4, act_order=True)
    whole = weight_of(checkpoint, 4)
    assert torch.equal(weight_of(checkpoint, 4, cut), whole[cut.index])


def test_columns_of_groups_that_lie_apart_are_refused(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, 4, act_order=True)
    with pytest.raises(CheckpointError, match=r"256 columns lie apart.*128 of them; quantize"):
        linear_as_stored(checkpoint, MODULE, SHAPE, form(4), CUTS[2])
