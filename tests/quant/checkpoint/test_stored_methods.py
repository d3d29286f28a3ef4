"""Fields of a checkpoint's quantization that are read, and those that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quant.checkpoint.stored_methods import parse_stored_config, read_stored_config
from quant.common.errors import SpecError

_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def _packed(weights: Any) -> dict[str, Any]:
    groups = {"g": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"quant_method": "hqq"}, "quantized by the method hqq, which llmpq does not read"),
        ({"quant_method": "bitsandbytes"}, "load_in_8bit is False and load_in_4bit is False"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": "yes"}, "load_in_4bit is 'yes'"),
        ({"quant_method": "torchao"}, r"by the method torchao, .* save_pretrained"),
        ({}, "by the method unnamed"),
        ({"quant_method": "gptq", "bits": 2}, "have 2 bits; there are kernels for 3, 4, 8"),
        ({"quant_method": "gptq", "bits": "4"}, "have '4' bits"),
        ({"quant_method": "gptq"}, "have None bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64.0}, "group_size is 64.0"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_p"}, "in format gptq_p"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "in format marlin"),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"}, "of int16 words"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": [1]}, r"dynamic is \[1\]"),
        (
            {"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": "q_proj"},
            "modules_in_block_to_quantize is 'q_proj'; it must be a list of names",
        ),
        ({"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": [[1]]}, r"\[\[1\]\]"),
        ([], "must be an object"),
        (_AWQ | {"bits": 8}, "AWQ weights have 8 bits"),
        (_AWQ | {"group_size": None}, "group_size is None"),
        (_AWQ | {"group_size": "128"}, "group_size is '128'"),
        *(
            (_AWQ | {"version": other}, f"packed for {other}, of which only gemm is read")
            for other in ("gemv", "gemv_fast", "marlin", "exllama")
        ),
        (_AWQ | {"backend": "llm-awq"}, "packed for llm-awq"),
        (_AWQ | {"zero_point": False}, "zero_point is False"),
        (_AWQ | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'"),
        (_FP8 | {"weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        (_FP8 | {"weight_block_size": [128, 0]}, r"weight_block_size is \[128, 0\]"),
        (_FP8 | {"weight_block_size": 128}, "weight_block_size is 128"),
        (_FP8 | {"fmt": "e5m2"}, "fmt 'e5m2' of FP8 weights is not read"),
        (_FP8 | {"expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
        (_FP8 | {"ignored_layers": [1]}, r"ignored_layers is \[1\]"),
        (_packed({"num_bits": 4}) | {"config_groups": {}}, "config_groups is {}"),
        (_packed({"num_bits": 4}) | {"config_groups": {"a": 1}}, "config_groups.a is 1"),
        (_packed({"num_bits": 4}) | {"format": "marlin-24"}, "format 'marlin-24'"),
        (_packed({"num_bits": 4}) | {"format": 5}, "format 5"),
        (
            _packed({"num_bits": 4}) | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "format 'sparse-24-bitmask' are not read",
        ),
        (_packed({"num_bits": 4}) | {"transform_config": {"config_groups": {"u": {}}}}, "turns"),
        (_packed({"num_bits": 4}) | {"quantization_status": "frozen"}, "status is 'frozen'"),
        (_packed({"num_bits": 4}) | {"ignore": ["re:("]}, r"ignore has 're:\(', no pattern"),
        (_packed([1]), r"config_groups.g.weights is \[1\]"),
        (_packed({"num_bits": 5}), "compressed weights have 5 bits"),
        (_packed({"num_bits": "4"}), "are '4' bits"),
        (_packed({"num_bits": 6, "type": "float"}), "floats of 6 bits; 4 and 8 are read"),
        (_packed({"num_bits": 4, "strategy": "group"}), "strategy group has group_size -1"),
        (_packed({"num_bits": 8, "strategy": "channel", "group_size": 8}), "has group_size 8"),
        (_packed({"num_bits": 8, "strategy": "attn_head"}), "strategy 'attn_head'"),
        (_packed({"num_bits": 8, "type": "float", "strategy": "block"}), "block_structure is None"),
    ],
)
def test_configurations_that_cannot_be_read(entries: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_stored_config(entries, "/models/x")


@pytest.mark.parametrize(
    ("file", "entries", "message"),
    [
        ("quant_config.json", {"w_bit": 4}, r"quant_config\.json: q_group_size is None"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "the method modelopt"),
        ("config.json", {"compression_config": {"format": "x"}}, "config_groups is None"),
    ],
)
def test_other_methods_say_so_elsewhere(
    file: str, entries: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text(json.dumps(entries))
    with pytest.raises(SpecError, match=message):
        read_stored_config(tmp_path)


def test_auto_gptqs_own_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert read_stored_config(tmp_path) is None
    entries = {"bits": 4, "group_size": -1, "desc_act": True, "sym": True, "damp_percent": 0.01}
    (tmp_path / "quantize_config.json").write_text(json.dumps(entries))
    found = read_stored_config(tmp_path)
    assert found is not None
    assert (found.bits, found.group_size, found.desc_act, found.zero_offset) == (4, -1, True, 1)
    (tmp_path / "quantize_config.json").write_text("{")
    with pytest.raises(SpecError, match=r"quantize_config\.json cannot be read as JSON"):
        read_stored_config(tmp_path)


@pytest.mark.parametrize(
    ("rules", "stored"),
    [
        ({}, (4, -1)),
        (None, (4, -1)),
        ({"-:lm_head": {}, "lm_head": {"bits": 2}}, (4, -1)),
        ({r"+:model\.layers\.3\..*": {"group_size": 32}}, (4, 32)),
        ({r"+:model\.layers\.3\..*": {"bits": 8}}, (8, -1)),
        ({r".*\.layers\.3\..*": {"bits": 8}, r"-:.*\.layers": {}}, (8, -1)),
        ({r"-:model\.layers\.3\..*": {}, r".*": {"bits": 8}}, (16, -1)),
    ],
)
def test_rules_by_module(rules: Any, stored: tuple[int, int]) -> None:
    entries = {"quant_method": "gptq", "bits": 4, "dynamic": rules}
    found = parse_stored_config(entries, "x").scheme_of("model.layers.3.mlp.up_proj")
    assert found is not None
    assert (found.bits, found.group_size) == stored


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([1], r"dynamic is \[1\]; it must be an object"),
        ({"*": {}}, r"dynamic has 're:\*', no pattern"),
        ({".*": {"bits": 5}}, r"dynamic\.\.\*: its GPTQ weights have 5 bits"),
        ({".*": {"group_size": 0}}, r"dynamic\.\.\*: group_size is 0"),
    ],
)
def test_rules_that_cannot_be(rules: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        parse_stored_config({"quant_method": "gptq", "bits": 4, "dynamic": rules}, "x")


@pytest.mark.parametrize(
    ("entries", "taken", "left"),
    [
        (_AWQ | {"modules_to_not_convert": ["mlp.gate", "self_attn"]}, "mlp.gate_proj", "mlp.gate"),
        (_AWQ | {"modules_to_not_convert": ["self_attn"]}, "mlp.up_proj", "self_attn.q_proj"),
        (_FP8 | {"modules_to_not_convert": ["lm_head"]}, "mlp.up_proj", "lm_head"),
        (_packed({"num_bits": 4}) | {"ignore": ["re:.*gate$"]}, "mlp.gate_proj", "mlp.gate"),
        (_packed({"num_bits": 4}) | {"ignore": ["lm_head"]}, "mlp.up_proj", "lm_head"),
    ],
)
def test_modules_that_are_left_out(entries: dict[str, Any], taken: str, left: str) -> None:
    found = parse_stored_config(entries, "x")
    layer = "" if left == "lm_head" else "model.layers.3."
    assert found.scheme_of(f"model.layers.3.{taken}") is not None
    assert found.scheme_of(f"{layer}{left}") is None


def test_the_first_group_that_has_a_module_as_target_tells() -> None:
    entries = {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "experts": {
                "targets": [r"re:.*experts\..*"],
                "weights": {"num_bits": 4, "strategy": "group", "group_size": 32},
            },
            "activations": {"targets": ["Attention"], "weights": None},
            "rest": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            },
        },
    }
    found = parse_stored_config(entries, "x")
    experts = found.scheme_of("model.layers.0.mlp.experts.1.up_proj")
    rest = found.scheme_of("model.layers.0.self_attn.q_proj")
    assert experts is not None
    assert rest is not None
    assert (experts.bits, experts.group_size, rest.bits) == (4, 32, 16)
    assert (found.bits, found.keeps_codes) == (4, True)


def test_autoawqs_own_file(tmp_path: Path) -> None:
    entries = {"w_bit": 4, "q_group_size": 64, "version": "GEMM", "zero_point": True}
    (tmp_path / "quant_config.json").write_text(json.dumps(entries))
    found = read_stored_config(tmp_path)
    assert found is not None
    assert (found.method, found.bits, found.group_size) == ("awq", 4, 64)
