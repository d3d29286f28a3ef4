"""Quantized weights against what the libraries of their formats make of them, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from quant.checkpoint.coded_weights import weight_tensors
from quant.checkpoint.reader import Checkpoint
from quant.common.errors import CheckpointError
from quant.rounding.canonical import dequantize
from quant.rounding.gptq_format import to_canonical
from tests.quant.stored_formats import (
    BLOCK,
    FORMATS,
    affine,
    awq_parts,
    awq_words,
    by_library,
    fp8,
    meant,
    of_table,
    scales_of,
)

MODULE = "model.layers.0.mlp.up_proj"
ROWS, COLUMNS = 48, 64


def random_weight(rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)) * 0.1


def save(folder: Path, parts: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Checkpoint:
    tensors = {f"{MODULE}.{part}": each.contiguous() for part, each in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    return Checkpoint(folder)


AWQ = FORMATS["awq"][0]


def test_awq_packs_words_as_autoawq_does() -> None:
    """Codes (5 in + 3 out) mod 16: the first words that AutoAWQ's `WQLinear_GEMM` has of them."""
    codes = (torch.arange(16)[:, None] * 5 + torch.arange(16) * 3) % 16
    assert awq_words(codes)[:2].tolist() == AUTOAWQ


AUTOAWQ = [[1603480672, -686054168], [-1528270411, 744552765]]


@pytest.mark.parametrize("group", [4, 32, 64])
def test_awq_codes_are_kept(group: int, tmp_path: Path) -> None:
    codes, _, zero = affine(random_weight(), group)
    scale = torch.rand(zero.shape, generator=torch.Generator().manual_seed(1)).half().float()
    checkpoint = save(tmp_path, awq_parts(codes, scale, zero), AWQ | {"group_size": group})
    expected = meant(codes, scale, zero)
    assert checkpoint.keeps_codes
    found = checkpoint.read_codes(MODULE, (ROWS, COLUMNS))
    assert torch.equal(found.codes.int(), codes)
    assert torch.equal(found.zero.int(), zero)
    assert torch.equal(checkpoint.read(f"{MODULE}.weight"), expected.float())
    some = checkpoint.read_codes(MODULE, (ROWS, COLUMNS), slice(8, 24))
    assert torch.equal(some.dequantize(), expected.float()[8:24])
    canonical = to_canonical(found).canonical
    assert canonical.bits == 4
    torch.testing.assert_close(dequantize(canonical).double(), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16])
def test_fp8_blocks_are_decoded_as_transformers_does(scales: torch.dtype, tmp_path: Path) -> None:
    parts = dict(fp8(random_weight())[0])
    parts["weight_scale_inv"] = parts["weight_scale_inv"].to(scales)
    checkpoint = save(tmp_path, parts, FORMATS["fp8"][0])
    expected = Fp8Dequantize(None)._dequantize_one(
        parts["weight"], parts["weight_scale_inv"], torch.float32
    )
    assert not checkpoint.keeps_codes
    assert torch.equal(checkpoint.read(f"{MODULE}.weight"), expected)
    assert checkpoint.names() == [f"{MODULE}.weight"]
    (stored,) = weight_tensors(tmp_path).values()
    assert stored.shape == checkpoint.shape_of(f"{MODULE}.weight") == (ROWS, COLUMNS)
    assert stored.linear is None


def test_blocks_at_the_edge_are_smaller(tmp_path: Path) -> None:
    parts, expected = fp8(random_weight(ROWS - 5, COLUMNS - 9))
    checkpoint = save(tmp_path, parts, FORMATS["fp8"][0])
    assert torch.equal(checkpoint.read(f"{MODULE}.weight"), expected)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_tables_are_decoded_as_bitsandbytes_does(kind: str, nested: bool, tmp_path: Path) -> None:
    """The last block of a row of blocks is smaller."""
    parts, expected = of_table(random_weight(40, 61 + 1), kind, nested)
    checkpoint = save(tmp_path, parts, FORMATS["nf4"][0])
    assert checkpoint.names() == [f"{MODULE}.weight"]
    assert torch.equal(checkpoint.read(f"{MODULE}.weight"), expected)


def test_codes_of_llm_int8_are_kept(tmp_path: Path) -> None:
    from bitsandbytes import functional

    codes, largest, _ = functional.int8_vectorwise_quant(random_weight().half())
    parts = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    checkpoint = save(tmp_path, parts, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    canonical = to_canonical(checkpoint.read_codes(MODULE, (ROWS, COLUMNS))).canonical
    assert torch.equal(canonical.codes, codes)
    expected = functional.int8_vectorwise_dequant(codes, largest)
    torch.testing.assert_close(dequantize(canonical), expected)
    assert torch.equal(dequantize(canonical), checkpoint.read(f"{MODULE}.weight"))


def _int(bits: int, strategy: str, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": symmetric, **more}


def _float(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "strategy": strategy, "symmetric": True, **more}


WEIGHTS: dict[str, tuple[dict[str, Any], int | None]] = {
    "int4 groups": (_int(4, "group", group_size=32), 4),
    "int4 groups with zeros": (_int(4, "group", symmetric=False, group_size=16), 4),
    "int4 channels": (_int(4, "channel"), 4),
    "int3 groups": (_int(3, "group", group_size=32), 3),
    "int8 groups": (_int(8, "group", group_size=32), 8),
    "int8 channels": (_int(8, "channel"), 8),
    "int8 channels with zeros": (_int(8, "channel", symmetric=False), 8),
    "int8 tensor": (_int(8, "tensor"), 8),
    "fp8 tensor": (_float(8, "tensor"), None),
    "fp8 channels": (_float(8, "channel"), None),
    "fp8 blocks": (_float(8, "block", block_structure=[BLOCK, BLOCK]), None),
    "mxfp8": (_float(8, "group", group_size=32), None),
    "mxfp4": (_float(4, "group", group_size=32), None),
    "nvfp4": (_float(4, "tensor_group", group_size=16), None),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_what_compressed_tensors_stores(name: str, tmp_path: Path) -> None:
    """W8A8 in rows is kept without another rounding, as are 3 and 4 bit."""
    pytest.importorskip("compressed_tensors")
    (arguments, bits), weight = WEIGHTS[name], random_weight()
    parts, expected = by_library(weight, scales_of(weight, **arguments), **arguments)
    group = {"targets": [r"re:.*up_proj"], "weights": arguments}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {"other": {"targets": ["lm_head"], "weights": _int(8, "tensor")},
                          "own": group},
    }  # fmt: skip
    checkpoint = save(tmp_path, parts, settings)
    found = checkpoint.read(f"{MODULE}.weight")
    assert torch.equal(found.to(expected.dtype), expected)
    coded = checkpoint.coded(MODULE)
    assert (coded.linear.bits if coded is not None and coded.linear is not None else None) == bits
    if bits is not None and name not in ("int8 groups", "int8 channels with zeros"):
        codes = checkpoint.read_codes(MODULE, (ROWS, COLUMNS))
        torch.testing.assert_close(dequantize(to_canonical(codes).canonical), found)


def _as_modelopt(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same weights as NVIDIA's ModelOpt was seen to store them: one scale for all is multiplied
    with, here a power of two.
    """
    found = dict(parts) | {"input_scale": torch.tensor(0.1)}
    if "weight_packed" in found:
        found["weight"] = found.pop("weight_packed")
        found["weight_scale_2"] = (1 / found.pop("weight_global_scale")).view(())
    elif found["weight_scale"].numel() == 1:
        found["weight_scale"] = found["weight_scale"].view(())
    return found


@pytest.mark.parametrize(
    ("name", "kind"),
    [("fp8 tensor", "FP8"), ("fp8 channels", "FP8_PER_CHANNEL_PER_TOKEN"), ("nvfp4", "NVFP4"),
     ("mxfp8", "MXFP8"), ("nvfp4", "MIXED_PRECISION")],
)  # fmt: skip
def test_what_modelopt_stores(name: str, kind: str, tmp_path: Path) -> None:
    """Held once against the library's own tensors too, bit for bit, in folders that it wrote."""
    pytest.importorskip("compressed_tensors")
    arguments = WEIGHTS[name][0]
    scales = scales_of(random_weight(), **arguments)
    parts, expected = by_library(random_weight(), scales, **arguments)
    settings = {
        "quant_method": "modelopt",
        "quant_algo": kind,
        "ignore": ["lm_head", "*.mlp.gate*"],
    }
    if kind == "MIXED_PRECISION":
        settings["quantized_layers"] = {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4"}}
    checkpoint = save(tmp_path, _as_modelopt(parts), settings)
    assert checkpoint.names() == [f"{MODULE}.weight"]
    assert not checkpoint.keeps_codes
    assert torch.equal(checkpoint.read(f"{MODULE}.weight").to(expected.dtype), expected)


def _torchao(kind: str, **data: Any) -> dict[str, Any]:
    own = {name: {"_type": "x", "_data": value} for name, value in data.items()}
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": own}}}


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("group", [16, COLUMNS])
def test_integers_of_torchao_are_kept(bits: int, group: int, tmp_path: Path) -> None:
    """Tensors as the library was seen to write them, and held once against it, bit for bit."""
    codes, scale, zero = affine(random_weight(), group, bits)
    half = 1 << (bits - 1)
    parts = {
        "_weight_qdata": (codes - half).to(torch.int8),
        "_weight_scale": scale.bfloat16(),
        "_weight_zero_point": (zero - half).to(torch.int8),
    }
    data = {"weight_dtype": f"int{bits}", "intx_packing_format": "UNPACKED_TO_INT8"}
    cut = {"axis": 0} if group == COLUMNS else {"group_size": group}
    checkpoint = save(tmp_path, parts, _torchao("IntxWeightOnlyConfig", **data, granularity=cut))
    expected = meant(codes, scale, zero)
    assert checkpoint.names() == [f"{MODULE}.weight"]
    assert torch.equal(checkpoint.read(f"{MODULE}.weight"), expected.float())
    found = checkpoint.read_codes(MODULE, (ROWS, COLUMNS), slice(8, 24))
    assert torch.equal(found.codes.int(), codes[8:24])


def test_numbers_of_torchao_are_decoded(tmp_path: Path) -> None:
    """Plain 4 bit as mslk packs it, whose zeros are numbers, and FP8 in rows."""
    codes, scale, _ = affine(random_weight(), 16)
    zero = torch.randn(ROWS, COLUMNS // 16, generator=torch.Generator().manual_seed(5))
    signed = codes - 8
    parts = {
        "_weight_qdata": (signed[:, ::2] & 15 | signed[:, 1::2] << 4).to(torch.int8),
        "_weight_scale": scale.t().contiguous(),
        "_weight_zero_point": zero.t().contiguous(),
    }
    checkpoint = save(
        tmp_path, parts, _torchao("Int4WeightOnlyConfig", int4_packing_format="PLAIN")
    )
    each = (own.repeat_interleave(16, 1) for own in (scale, zero))
    expected = signed.float() * next(each) + next(each)
    assert torch.equal(checkpoint.read(f"{MODULE}.weight"), expected)
    rows = torch.rand(ROWS, 1, generator=torch.Generator().manual_seed(5))
    numbers = random_weight().to(torch.float8_e4m3fn)
    parts = {"_weight_qdata": numbers, "_weight_scale": rows}
    checkpoint = save(tmp_path, parts, _torchao("Float8WeightOnlyConfig"))
    assert torch.equal(checkpoint.read(f"{MODULE}.weight"), numbers.float() * rows)


@pytest.mark.parametrize("method", ["fbgemm_fp8", "mxfp8"])
def test_other_names_of_fp8(method: str, tmp_path: Path) -> None:
    numbers, largest = random_weight().to(torch.float8_e4m3fn), torch.rand(ROWS, 1)
    parts = {"weight": numbers, "weight_scale": largest, "input_scale_ub": torch.ones(1)}
    expected = numbers.float() * largest
    if method == "mxfp8":
        exponents = torch.randint(100, 140, (ROWS, COLUMNS // 32), dtype=torch.uint8)
        parts = {"weight": numbers, "weight_scale_inv": exponents}
        expected = Fp8Dequantize(None)._dequantize_one(numbers, exponents, torch.float32)
    checkpoint = save(tmp_path, parts, {"quant_method": method})
    assert checkpoint.names() == [f"{MODULE}.weight"]
    assert torch.equal(checkpoint.read(f"{MODULE}.weight"), expected)


PACKED = _int(4, "group", symmetric=False, group_size=16)
OWN = {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["Linear"]}}}
DAMAGED: dict[str, tuple[str, dict[str, Tensor | None], str]] = {
    "awq without zeros": ("awq", {"qzeros": None}, r"no tensor .*up_proj\.qzeros"),
    "awq zeros of other outputs": ("awq", {"qzeros": torch.zeros(16, 5).int()}, r"\[16, 6\]"),
    "awq words of another type": ("awq", {"qweight": torch.zeros(64, 6)}, "qweight is F32"),
    "awq scales of no group": ("awq", {"scales": torch.zeros(0, 48).half()}, "above 0"),
    "awq groups that do not divide": (
        "awq",
        {"scales": torch.ones(15, 48).half(), "qzeros": torch.zeros(15, 6).int()},
        "not divided into 15 groups",
    ),
    "awq scales that are no numbers": (
        "awq", {"scales": torch.full((16, 48), torch.inf).half()}, "hold NaN or infinity",
    ),
    "fp8 without its weight": ("fp8", {"weight": None}, r"no tensor .*up_proj\.weight"),
    "fp8 scales of other blocks": (
        "fp8", {"weight_scale_inv": torch.ones(3, 5)}, r"\[3, 4\] by the configuration",
    ),
    "fp8 weights of another type": ("fp8", {"weight": torch.ones(48, 64)}, "weight is F32"),
    "packed without its shape": ("packed", {"weight_shape": None}, r"no tensor .*weight_shape"),
    "packed of another shape": ("packed", {"weight_shape": torch.tensor([48, 60])}, r"\[48, 60\]"),
    "packed without zeros": ("packed", {"weight_zero_point": None}, "weight_zero_point"),
    "packed words of fewer inputs": (
        "packed", {"weight_packed": torch.zeros(48, 7).int()}, "fill other words",
    ),
    "table without its maxima": ("nf4", {"weight.absmax": None}, r"no tensor .*weight\.absmax"),
    "table of other codes": ("nf4", {"weight": torch.zeros(9, 1).byte()}, r"\[1536, 1\]"),
    "table of another size": ("nf4", {"weight.quant_map": torch.zeros(15)}, r"\[15\], but .* \[16"),
    "table of no shape": (
        "nf4", {"weight.quant_state.bitsandbytes__nf4": torch.tensor([123]).byte()}, "are no JSON",
    ),
    "scales of inputs": (
        "awq", {"pre_quant_scale": torch.ones(64)}, "inputs are not multiplied by anything here",
    ),
    "packed floats": ("packed", {"weight_packed": torch.zeros(48, 8)}, "weight_packed is F32"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_tensors_are_named(damage: str, tmp_path: Path) -> None:
    form, changes, message = DAMAGED[damage]
    weight = random_weight()
    if form == "packed":
        settings: Mapping[str, Any] = OWN | {
            "config_groups": {"a": {"targets": ["Linear"], "weights": PACKED}}
        }
        codes, scale, zero = affine(weight, 16)
        from quant.checkpoint.codes import pack_words

        whole = {
            "weight_packed": pack_words(codes, 4),
            "weight_scale": scale,
            "weight_zero_point": pack_words(zero.t(), 4).t(),
            "weight_shape": torch.tensor([ROWS, COLUMNS]),
        }
    else:
        settings, encode, _ = FORMATS[form]
        made = encode(weight)
        assert made is not None
        whole = dict(made[0])
    checkpoint = save(tmp_path, whole, settings)
    checkpoint.read(f"{MODULE}.weight")
    kept = {part: each for part, each in (whole | changes).items() if each is not None}
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path, kept, settings).read(f"{MODULE}.weight")
