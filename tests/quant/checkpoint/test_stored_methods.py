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


_MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
_AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}


def _mixed(*kinds: str) -> dict[str, Any]:
    layers = {
        f"model.layers.{at}.mlp.up_proj": {"quant_algo": kind} for at, kind in enumerate(kinds)
    }
    return _MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


def _torchao(kind: str, **fields: Any) -> dict[str, Any]:
    data = {name: {"_type": "x", "_data": value} for name, value in fields.items()}
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": data}}}


def _packed(weights: Any) -> dict[str, Any]:
    groups = {"g": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"quant_method": "hqq"}, "quantized by the method hqq, which llmpq does not read"),
        ({"quant_method": "bitsandbytes"}, "load_in_8bit is False and load_in_4bit is False"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": "yes"}, "load_in_4bit is 'yes'"),
        *(
            ({"quant_method": name}, f"by the method {name}, which .* the original 16-bit")
            for name in ("aqlm", "eetq", "exl2", "exl3", "quanto", "quip", "spqr", "vptq", "sinq")
        ),
        ({"quant_method": "higgs"}, r"by the method higgs, .* call dequantize\(\)"),
        ({"quant_method": "quark"}, "by the method quark, .* custom_mode awq or fp8"),
        ({"quant_method": "bitnet"}, "by the method bitnet, .* in bfloat16"),
        ({}, "by the method unnamed"),
        (_MODELOPT | {"quant_algo": None}, "of quant_algo None, which is not read; FP8, "),
        (_MODELOPT | {"quant_algo": ["FP8"]}, r"of quant_algo \['FP8'\]"),
        *(
            (_MODELOPT | {"quant_algo": other}, f"of quant_algo '{other}', which is not read")
            for other in ("NVFP4_AWQ", "NVFP4_SVD", "W4A16_AWQ", "W8A16", "fp8_pb_wo", "mxfp4")
        ),
        (_MODELOPT | {"quant_algo": "MIXED_PRECISION"}, "of quant_algo None"),
        (_mixed("NVFP4", "W4A8_AWQ"), "of quant_algo 'W4A8_AWQ'"),
        (_mixed("NVFP4", "MXFP8"), "of quant_algo 'MXFP8'"),
        (_MODELOPT | {"exclude_modules": "lm_head"}, "exclude_modules is 'lm_head'"),
        (_MODELOPT | {"quantization": [1]}, r"quantization is \[1\]; it must be an object"),
        (_torchao("Int4WeightOnlyConfig") | {"quant_type": "int4_weight_only"}, "4.57 or later"),
        (
            _torchao("Int4WeightOnlyConfig", int4_packing_format="TILE_PACKED_TO_4D"),
            "Int4WeightOnlyConfig packed as TILE_PACKED_TO_4D are not read",
        ),
        (_torchao("NVFP4WeightOnlyConfig"), "NVFP4WeightOnlyConfig are not read; those of Int8W"),
        (_torchao("IntxWeightOnlyConfig", weight_dtype="int5"), "torchao weights have 'int5' bits"),
        (_torchao("IntxWeightOnlyConfig"), "torchao weights have None bits"),
        (_torchao("IntxWeightOnlyConfig", intx_packing_format={}), "packed as {} are not read"),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": []}}}, r"torchao's \[\]"),
        (_torchao("FqnToConfig"), "fqn_to_config is None; it must be an object"),
        (_AUTO_ROUND | {"packing_format": "auto_round:exllamav2"}, "packed as exllamav2 for act"),
        (_AUTO_ROUND | {"act_bits": 8}, "activations of 8 bits"),
        (_AUTO_ROUND | {"bits": 2}, "GPTQ weights have 2 bits"),
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
        (
            _packed({"num_bits": 4}) | {"config_groups": {}},
            "config_groups is {}; .* of 1000 groups",
        ),
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
        (_packed({"num_bits": 6, "type": "float"}), "floats of 6 bits, not 4 or 8"),
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
        ("hf_quant_config.json", {"quantization": {"quant_algo": "W4A16_AWQ"}}, "W4A16_AWQ"),
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


@pytest.mark.parametrize("nested", [True, False])
def test_modelopts_own_file(nested: bool, tmp_path: Path) -> None:
    """Older folders have that alone; they are not read as plain ones."""
    own = {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head", "*.q*"],
    }
    entries = {"producer": {"name": "modelopt"}, "quantization": own} if nested else own
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(entries))
    found = read_stored_config(tmp_path)
    assert found is not None
    assert (found.method, found.keeps_codes) == ("modelopt", False)


def test_modules_of_torchaos_configurations() -> None:
    def of(bits: int, size: int | None) -> dict[str, Any]:
        cut: Any = {"_type": "PerAxis", "_data": {"axis": 0}}
        if size is not None:
            cut = {"_type": "PerGroup", "_data": {"group_size": size}}
        word = {"_type": "torch.dtype", "_data": f"int{bits}"}
        return {
            "_type": "IntxWeightOnlyConfig",
            "_data": {"weight_dtype": word, "granularity": cut},
        }

    entries = _torchao("FqnToConfig")
    entries["quant_type"]["default"]["_data"]["fqn_to_config"] = {
        "_default": of(4, 32),
        r"re:.*\.down_proj": of(3, 64),
        "model.embed_tokens": of(8, None),
        "lm_head": None,
    }
    found = parse_stored_config(entries, "x")
    assert (found.method, found.bits, found.group_size) == ("torchao", 4, 32)
    names = ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "model.embed_tokens")
    schemes = [found.scheme_of(name) for name in names]
    assert [each and (each.bits, each.group_size) for each in schemes] == [
        (4, 32),
        (3, 64),
        (8, -1),
    ]


@pytest.mark.parametrize(
    ("layout", "method", "offset"),
    [("gptq", "gptq", 1), ("auto_gptq", "gptq", 1), ("gptqmodel", "gptq", 0), ("awq", "awq", 0)],
)
def test_what_auto_round_packs(layout: str, method: str, offset: int) -> None:
    """Held once against its packers, bit for bit."""
    extra = {"a.q": {"bits": 16}, "a.k": {"bits": 8}}
    settings = {"packing_format": f"auto_round:{layout}", "extra_config": extra}
    found = parse_stored_config(_AUTO_ROUND | settings, "x")
    schemes = [found.scheme_of(f"a.{name}") for name in "vkq"]
    wanted = [4, 8, 16] if method == "gptq" else [4, 4, 4]
    assert [each and each.bits for each in schemes] == wanted
    assert (found.method, found.zero_offset, found.bits) == (method, offset, 4)


@pytest.mark.parametrize(
    ("pattern", "is_ignored"),
    [
        ("(a|a)*b", False),
        ("(a?){30}a{30}", True),
        ("(.*)*x", False),
        ("(?:a{1,90}){9}", True),
        (".*" * 900, True),
    ],
)
def test_patterns_that_take_long_end(pattern: str, is_ignored: bool) -> None:
    """Without a limit they would go on for years: each has its answer, or is refused by name."""
    entries = _packed({"num_bits": 4}) | {"ignore": [f"re:{pattern}"]}
    found, said = None, ""
    try:
        found = parse_stored_config(entries, "x").scheme_of("a" * 5000 + "!")
    except SpecError as error:
        said = str(error)
    assert f"ignore has 're:{pattern[:8]}" in said if said else (found is None) == is_ignored


def test_a_pattern_that_takes_long_is_named() -> None:
    entries = _packed({"num_bits": 4}) | {"ignore": ["re:(x+x+)+y"]}
    found = parse_stored_config(entries, "config.json")
    with pytest.raises(SpecError, match=r"config.json: ignore has 're:\(x.* takes more than 0.1 s"):
        found.scheme_of("x" * 30_000)


def test_very_many_names() -> None:
    names = [f"model.layers.{at}.mlp.gate" for at in range(10**5)]
    found = parse_stored_config(_packed({"num_bits": 4}) | {"ignore": names}, "x")
    assert found.scheme_of(names[-1]) is None
    assert found.scheme_of(f"{names[-1]}_proj") is not None
    with pytest.raises(SpecError, match="1001 patterns; 1000 are taken"):
        parse_stored_config(_packed({"num_bits": 4}) | {"ignore": ["re:a"] * 1001}, "x")
