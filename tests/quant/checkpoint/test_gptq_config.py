"""Fields of a checkpoint's quantization that are read, and those that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quant.checkpoint.gptq_config import parse_gptq_config, read_gptq_config
from quant.common.errors import SpecError


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, "quantized by the method awq, which llmpq does not"),
        ({"quant_method": "bitsandbytes"}, "by the method bitsandbytes"),
        ({"quant_method": "fp8"}, "by the method fp8"),
        ({}, "by the method unnamed"),
        ({"quant_method": "gptq", "bits": 2}, "have 2 bits; there are kernels for 3, 4, 8"),
        ({"quant_method": "gptq", "bits": "4"}, "have '4' bits"),
        ({"quant_method": "gptq"}, "have None bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64.0}, "group_size is 64.0"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_p"}, "in format gptq_p"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "in format marlin"),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"}, "of int16 words"),
        ({"quant_method": "gptq", "bits": 4, "lm_head": True}, "LM head is quantized"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": [1]}, r"dynamic is \[1\]"),
        (
            {"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": "q_proj"},
            "modules_in_block_to_quantize is 'q_proj'; it must be a list of names",
        ),
        ({"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": [[1]]}, r"\[\[1\]\]"),
        ([], "must be an object"),
    ],
)
def test_configurations_that_cannot_be_read(entries: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_gptq_config(entries, "/models/x")


@pytest.mark.parametrize(
    ("file", "entries", "message"),
    [
        (
            "quant_config.json",
            {"w_bit": 4, "version": "GEMM"},
            r"quant_config\.json: .* method awq",
        ),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "the method modelopt"),
        ("config.json", {"compression_config": {"format": "x"}}, "the method compressed-tensors"),
    ],
)
def test_other_methods_say_so_elsewhere(
    file: str, entries: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text(json.dumps(entries))
    with pytest.raises(SpecError, match=message):
        read_gptq_config(tmp_path)


def test_auto_gptqs_own_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert read_gptq_config(tmp_path) is None
    entries = {"bits": 4, "group_size": -1, "desc_act": True, "sym": True, "damp_percent": 0.01}
    (tmp_path / "quantize_config.json").write_text(json.dumps(entries))
    found = read_gptq_config(tmp_path)
    assert found is not None
    assert (found.bits, found.group_size, found.desc_act, found.zero_offset) == (4, -1, True, 1)
    (tmp_path / "quantize_config.json").write_text("{")
    with pytest.raises(SpecError, match=r"quantize_config\.json cannot be read as JSON"):
        read_gptq_config(tmp_path)


@pytest.mark.parametrize(
    ("rules", "mixed"),
    [
        ({}, False),
        (None, False),
        ({"-:lm_head": {}}, False),
        ({r"+:model\.layers\.3\..*": {"group_size": 32}}, False),
        ({r"+:model\.layers\.3\..*": {"bits": 8}}, True),
        ({r".*\.layers\.3\..*": {"bits": 8}}, True),
        ({r"-:model\.layers\.3\..*": {}}, True),
    ],
)
def test_rules_by_module(rules: Any, mixed: bool) -> None:
    entries = {"quant_method": "gptq", "bits": 4, "dynamic": rules}
    assert parse_gptq_config(entries, "x").mixed is mixed
