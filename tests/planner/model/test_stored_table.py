"""The table of quantized checkpoints in docs/models.md against what the planner says of each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.model.finding import model_shape
from quant.backends.table import rule_for
from quant.checkpoint.stored_config import WHOLE_ROW
from quant.common.errors import SpecError
from quant.scheme import Processor
from tests.planner.model.test_stored_bits import LLAMA

PAGE = Path(__file__).parents[3] / "docs/models.md"
DEVICES = (
    (Processor(), "bfloat16"),
    (Processor((7, 0)), "float16"),
    (Processor((7, 5)), "float16"),
    (Processor((8, 0)), "bfloat16"),
    (Processor((9, 0)), "bfloat16"),
)
COLUMN = (0, 1, 2, 2, 2)
"""That of each device in the table."""

Settings = dict[str, Any]


def _packed(layout: str = "mixed-precision", **weights: Any) -> Settings:
    groups = {"g": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


def _torchao(kind: str, size: int | None = None, **fields: str) -> Settings:
    data: Settings = {name: {"_data": value} for name, value in fields.items()}
    if size is not None:
        data["granularity"] = {"_type": "PerGroup", "_data": {"group_size": size}}
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": data}}}


def _of(base: Settings, key: str, *values: Any) -> list[Settings]:
    return [base | {key: value} for value in values]


GPTQ: Settings = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ: Settings = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
FP8: Settings = {"quant_method": "fp8"}
MODELOPT: Settings = {"quant_method": "modelopt"}
ROUND: Settings = {"quant_method": "auto-round", "bits": 4, "group_size": 128}
GROUPS: Settings = {"strategy": "group", "group_size": 32}
MIXED: Settings = {"quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4"}}}
OTHERS = ("hqq", "exl2", "exl3", "aqlm", "quip", "spqr", "vptq", "quark", "bitnet", "higgs", "eetq",
          "quanto", "sinq", "fp_quant", "nvfp4", "metal")  # fmt: skip

ROWS: dict[tuple[str, str], list[Settings]] = {
    ("GPTQ", "3 and 4 bit"): [
        *_of(GPTQ, "group_size", 128, 32, -1), GPTQ | {"bits": 3}, GPTQ | {"format": "gptq_v2"},
        GPTQ | {"desc_act": True},
    ],
    ("GPTQ", "8 bit"): _of(GPTQ | {"bits": 8}, "group_size", 128, 32),
    ("GPTQ", "Marlin"): [GPTQ | {"is_marlin_format": True}, GPTQ | {"bits": 2}],
    ("AWQ", "4 bit"): _of(AWQ, "group_size", 32, 128),
    ("AWQ", "`gemv`"): [
        *_of(AWQ, "version", "gemv", "gemv_fast", "marlin", "exllama"),
        AWQ | {"backend": "llm-awq"}, AWQ | {"zero_point": False},
    ],
    ("FP8", "E4M3"): [
        FP8, FP8 | {"weight_block_size": [128, 128]},
        *_of({}, "quant_method", "fbgemm_fp8", "mxfp8"),
    ],
    ("compressed-tensors", "`pack-quantized`"): [
        _packed("pack-quantized", num_bits=bits, symmetric=even, **cut)
        for bits in (3, 4) for even in (True, False) for cut in (GROUPS, {"strategy": "channel"})
    ],
    ("compressed-tensors", "`int-quantized`"): [
        _packed(layout, num_bits=8, strategy=strategy)
        for layout in ("int-quantized", "pack-quantized") for strategy in ("channel", "tensor")
    ],
    ("compressed-tensors", "8 bit"): [
        _packed(num_bits=8, **GROUPS), _packed(num_bits=8, strategy="channel", symmetric=False),
    ],
    ("compressed-tensors", "`float-quantized`"): [
        _packed("float-quantized", num_bits=8, type="float", strategy="channel"),
        _packed("naive-quantized", num_bits=8, type="float", strategy="tensor"),
        _packed("mxfp8-quantized", num_bits=8, type="float", **GROUPS),
        _packed("mxfp4-pack-quantized", num_bits=4, type="float", **GROUPS),
        _packed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group",
                group_size=16),
    ],
    ("compressed-tensors", "`sparse-*`"): [
        *(_packed(layout, num_bits=4) for layout in ("sparse-24-bitmask", "marlin-24")),
        *(_packed(num_bits=bits, **GROUPS) for bits in (5, 6, 7)),
        _packed(num_bits=6, type="float", **GROUPS),
        _packed(num_bits=4) | {"transform_config": {"config_groups": {"u": {}}}},
    ],
    ("bitsandbytes", "LLM.int8()"): [{"quant_method": "bitsandbytes", "load_in_8bit": True}],
    ("bitsandbytes", "nf4"): [{"quant_method": "bitsandbytes", "load_in_4bit": True}],
    ("ModelOpt", "FP8"): [
        *_of(MODELOPT, "quant_algo", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MXFP8"),
        MODELOPT | MIXED | {"quant_algo": "MIXED_PRECISION"},
    ],
    ("ModelOpt", "its AWQ"): _of(
        MODELOPT, "quant_algo", "W4A16_AWQ", "NVFP4_AWQ", "NVFP4_SVD", "W8A16", "fp8_pb_wo", "mxfp4"
    ),
    ("torchao", "`Intx"): [
        _torchao(kind, size, weight_dtype=f"int{bits}")
        for kind in ("IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig")
        for size in (32, None) for bits in (3, 4)
    ],
    ("torchao", "8 bit in rows"): [
        _torchao("Int8WeightOnlyConfig"), _torchao("Int8DynamicActivationInt8WeightConfig"),
        _torchao("IntxWeightOnlyConfig", weight_dtype="int8"),
    ],
    ("torchao", "8 bit in groups"): [_torchao("Int8WeightOnlyConfig", 32)],
    ("torchao", "plain 4 bit"): [
        _torchao("Int4WeightOnlyConfig", 128, int4_packing_format="PLAIN"),
        _torchao("Float8WeightOnlyConfig"),
    ],
    ("torchao", "4 bit packed"): [
        _torchao("Int4WeightOnlyConfig", 128, int4_packing_format="TILE_PACKED_TO_4D"),
        _torchao("NVFP4WeightOnlyConfig"), _torchao("MXDynamicActivationMXWeightConfig"),
        _torchao("Float8WeightOnlyConfig", packing_format="SPARSE_CUTLASS"),
    ],
    ("AutoRound", "`packing_format`"): [
        ROUND, ROUND | {"bits": 3}, ROUND | {"packing_format": "auto_round:auto_awq"},
    ],
    ("AutoRound", "other"): [ROUND | {"packing_format": "auto_round"}, ROUND | {"act_bits": 8}],
    ("HQQ", "all"): _of({}, "quant_method", *OTHERS),
    ("MXFP4", "experts"): [{"quant_method": "mxfp4"}],
}  # fmt: skip
"""Settings that each row of the table means, by the beginnings of its first two cells."""


def _table() -> Iterator[tuple[str, str, list[str]]]:
    """Yield format, what is stored and the outcomes of each row."""
    lines = PAGE.read_text("utf-8").partition("| format | what is stored |")[2].splitlines()[2:]
    name = ""
    for line in lines:
        if not line.startswith("|"):
            return
        first, stored, *outcomes = (cell.strip() for cell in line.strip("|").split("|"))
        name = first or name
        yield name, stored, outcomes


TABLE = list(_table())


def _outcome(settings: Settings, processor: Processor, dtype: str, folder: Path) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(LLAMA | {"quantization_config": settings}))
    try:
        shape = model_shape(path)
    except SpecError as error:
        message = str(error)
        says_all = str(path) in message and ("16-bit" in message or "bfloat16" in message)
        return "refused" if says_all else message
    if shape.stored is None:
        assert shape.decoded or settings["quant_method"] == "mxfp4"
        return "decoded"
    rule = rule_for(processor, shape.stored.bits, shape.layer_linears[0], dtype)
    assert rule.name != "bnb_nf4"
    scheme = shape.stored.schemes[-1]
    in_rows = scheme.group_size == WHOLE_ROW and scheme.symmetric
    is_rounded = rule.name.endswith("w8a8") or (shape.stored.bits == 8 and not in_rows)
    return "rounded" if is_rounded else "kept"


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_every_cell_says_what_the_planner_does(row: tuple[str, str], tmp_path: Path) -> None:
    name, stored = row
    (wanted,) = (cells for n, s, cells in TABLE if n.startswith(name) and s.startswith(stored))
    assert len(wanted) == max(COLUMN) + 1
    for settings in ROWS[row]:
        for (processor, dtype), column in zip(DEVICES, COLUMN, strict=True):
            assert _outcome(settings, processor, dtype, tmp_path) == wanted[column], settings


def test_every_row_is_tested() -> None:
    assert len(TABLE) == len(ROWS)
