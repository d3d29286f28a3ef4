"""Planning for checkpoints that are quantized already."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from llmpq.model_check import checked_shape, stored_note
from llmpq.report.answers import weight_remarks
from planner.cluster.accelerators import find_accelerator
from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from planner.costs.stored_bytes import layer_weight_bytes
from planner.model.finding import model_shape
from planner.model.shape import ModelShape
from planner.model.tensor_shapes import end_tensors, layer_tensors
from planner.options import PlanOptions
from planner.plan.check import check_plan
from planner.plan.parts import PlannedWeights
from planner.plan.spec import PlanSpec
from planner.search.request import PlanningRequest, costs_of
from planner.workload import Workload
from quant.backends.table import backend_name
from quant.checkpoint.stored_config import Scheme, StoredConfig
from quant.common.errors import SpecError
from quant.scheme import BITWIDTHS, FULL_BITS
from tests.planner.plan_alone import find_plan

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
WEIGHTS = 256 * (256 + 128 + 128 + 256) + 3 * 256 * 512
INPUTS = 4 * 256 + 2 * 256 + 512


def shape(folder: Path, own_file: bool = False, **entries: Any) -> ModelShape:
    folder.mkdir(exist_ok=True)
    quantization = GPTQ | entries
    config = LLAMA if own_file else LLAMA | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    if own_file:
        del quantization["quant_method"]
        (folder / "quantize_config.json").write_text(json.dumps(quantization))
    return model_shape(folder)


def packed_bytes(planned: ModelShape, bits: int = 4, accelerator: str = "T4") -> int:
    """Of a layer's linears and their input orders, as planned for the GPU's preferred backend."""
    device = Device(find_accelerator(accelerator), "node", 0, 2**34, 1e10)
    total = layer_weight_bytes(planned, bits, device, "float16")
    return total - 2 * planned.layer_other_parameters


@pytest.mark.parametrize("own_file", [False, True])
def test_bits_are_those_stored(own_file: bool, tmp_path: Path) -> None:
    found = shape(tmp_path, own_file)
    stored = found.stored
    assert stored is not None
    assert replace(stored, schemes=()) == StoredConfig(4, 128, zero_offset=1)
    assert planned_bits(found, tmp_path, 3, 4, 8) == (4, 4)
    assert planned_bits(found, tmp_path, 3, 8) == (8, 8)


def test_plain_checkpoints_keep_the_choice(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    found = model_shape(tmp_path)
    assert found.stored is None
    assert found.fingerprint() == shape(tmp_path).fingerprint()


def test_rules_tell_layers_apart_without_weights(tmp_path: Path) -> None:
    """A module of a layer that has other bits than the same one of another makes it another kind,
    known by the bits of the configuration if it has any, and no other model.
    """
    found = shape(tmp_path, dynamic={r"-:model\.layers\.1\..*": {}})
    assert (found.pattern, stored_by_layer(found)) == ((0, 1), [4, 16])
    assert found.fingerprint() == shape(tmp_path).fingerprint()
    assert found.plain == shape(tmp_path).plain
    assert planned_bits(found, tmp_path, 4, 16)[1] == 16
    some = shape(tmp_path, dynamic={r".*layers\.1\.mlp\..*": {"bits": 8}})
    assert stored_by_layer(some) == [4, 4]
    assert [each.stored_bits for each in some.layer(1).layer_linears] == [None] * 4 + [8] * 3


def stored_by_layer(found: ModelShape) -> list[int]:
    return [each.stored.bits for i in range(found.layers) if (each := found.layer(i)).stored]


def planned_bits(found: ModelShape, folder: Path, *bits: int) -> tuple[int, ...]:
    """Those of each layer of the plan for a T4 that loses least, which is checked."""
    cluster, options = ClusterSpec.from_counts(["T4"], [1]), PlanOptions(bits=bits, theta=1e9)
    plan = find_plan(cluster, found, str(folder), Workload(2, 8, 4), options).plan
    check_plan(plan, found, "it")
    return plan.stages[0].bitwidths


IN_BLOCK = [
    ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    ["self_attn.o_proj"],
    ["mlp.gate_proj", "mlp.up_proj"],
]
DOWN = 256 * 512


def test_modules_that_are_left_out_count_in_full(tmp_path: Path) -> None:
    """`modules_in_block_to_quantize`, which optimum writes for all models, whole or not."""
    every = shape(tmp_path, modules_in_block_to_quantize=[*IN_BLOCK, ["mlp.down_proj"]])
    flat = [f"model.layers.0.{name}" for names in IN_BLOCK for name in names]
    some, same = (shape(tmp_path, modules_in_block_to_quantize=m) for m in (IN_BLOCK, flat))
    assert every.layer_linears == shape(tmp_path).layer_linears
    assert some.layer_linears == same.layer_linears
    assert [linear.stored_bits for linear in some.layer_linears] == [None] * 6 + [16]
    packed = DOWN * 4 // 8 + 4 * DOWN // 128
    assert packed_bytes(some) - packed_bytes(every) == 2 * DOWN - packed


def with_weights(folder: Path, kinds: dict[str, tuple[int, int]], **entries: Any) -> ModelShape:
    """The shape of a model with weights; `kinds`: bits and group of linears by the end of names."""
    plain = shape(folder, **entries)
    tensors = {n: np.zeros(size, np.float16) for n, size in end_tensors(plain).items()}
    tensors["lm_head.weight"] = np.zeros((100, 256), np.float16)
    for index in range(plain.layers):
        for name, size in layer_tensors(plain).items():
            module = f"model.layers.{index}.{name.removesuffix('.weight')}"
            bits, group = next((k for end, k in kinds.items() if module.endswith(end)), (4, 128))
            if bits == 16 or len(size) == 1:
                tensors[f"{module}.weight"] = np.zeros(size, np.float16)
                continue
            rows, columns = size
            tensors[f"{module}.qweight"] = np.zeros((columns * bits // 32, rows), np.int32)
            tensors[f"{module}.qzeros"] = np.zeros((columns // group, rows * bits // 32), np.int32)
            tensors[f"{module}.scales"] = np.ones((columns // group, rows), np.float16)
    save_file(tensors, folder / "model.safetensors")
    return checked_shape(folder)


def test_the_weights_tell_what_rules_have_changed(tmp_path: Path) -> None:
    """Rules of GPTQModel for some modules of every layer: other bits, groups, or none."""
    rules = {r"-:.*down_proj": {}, r".*\.o_proj": {"bits": 8}, r"+:.*up_proj": {"group_size": 32}}
    configured = shape(tmp_path, dynamic=rules)
    kinds = {"down_proj": (16, 0), "o_proj": (8, 128), "up_proj": (4, 32)}
    found = with_weights(tmp_path, kinds, dynamic=rules)
    q, k, v, o, gate, up, down = found.layer_linears
    assert [each.stored_bits for each in (q, k, v, gate, up)] == [None] * 5
    assert (o.stored_bits, down.stored_bits) == (8, 16)
    assert (gate.stored_group, up.stored_group) == (128, 32)
    assert found.layer_linears == configured.layer_linears
    assert planned_bits(found, tmp_path, 3, 4, 8) == (4, 4)


def test_bits_that_none_but_a_few_have_are_not_those_of_a_layer(tmp_path: Path) -> None:
    """The configuration says 4, and rules change all but nothing of that."""
    found = with_weights(tmp_path, {"k_proj": (3, 64), "": (8, 128)}, dynamic={".*": {"bits": 8}})
    assert found.stored is not None
    assert found.stored.bits == 8
    assert [each.stored_bits for each in found.layer_linears] == [None, 3, *[None] * 5]


def test_layers_of_different_bits_are_kinds(tmp_path: Path) -> None:
    """By the weights, of which the configuration says nothing."""
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    mlp = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    kinds = {f"layers.1.{name}": (3, 64) for name in names}
    found = with_weights(tmp_path, kinds | {f"layers.1.{name}": (8, 128) for name in mlp})
    assert stored_by_layer(found) == [4, 8]
    assert planned_bits(found, tmp_path, 3, 4, 8) == (4, 8)
    note = stored_note(found)
    assert note is not None
    assert "1 with 4, 1 with 8 bits), beside linears of 3 bits" in note


def test_what_is_stored_loses_nothing_and_may_always_be_used(tmp_path: Path) -> None:
    """Beside bits near 16: a layer of 3 bits keeps them, and rounded again it loses as any does."""
    folder = tmp_path / "model"
    found = shape(folder, dynamic={r".*layers\.1\..*": {"bits": 3}})
    cluster, options = ClusterSpec.from_counts(["T4"], [1]), PlanOptions()
    request = PlanningRequest(cluster, found, Workload(2, 8, 4), options)
    costs, plain = (costs_of(replace(request, shape=each))[0] for each in (found, found.plain))
    lost = plain.sensitivity > 0
    lost[0, 1] = lost[1, 0] = False
    assert np.array_equal(costs.sensitivity, plain.sensitivity * lost)
    near = replace(costs, usable_bits=(8, 16))
    usable = [[near.is_usable(found.layer(i), bits) for bits in BITWIDTHS] for i in (0, 1)]
    assert usable == [
        [each in (4, 8, 16) for each in BITWIDTHS],
        [each in (3, 8, 16) for each in BITWIDTHS],
    ]
    for bits in (8, 16):  # as of weights that were never quantized, but for nf4
        again, never = (packed_bytes(each.layer(0), bits) for each in (found, found.plain))
        assert again == never


PROFILE = "device,model,h1,h2,prompt_length,context_length,phase,bits,batch_size,ms_per_layer\n"


def test_bits_that_are_known_may_be_chosen_where_none_are_named(tmp_path: Path) -> None:
    """Those of which a profile has prefill and decode, those that are stored, or all."""
    found = shape(tmp_path / "model", bits=5, group_size=32, format="llmpq")
    cluster, workload = ClusterSpec.from_counts(["T4"], [1]), Workload(2, 8, 4)
    request = PlanningRequest(cluster, found, workload, PlanOptions())
    assert request.options.bits == BITWIDTHS
    assert costs_of(request)[0].sensitivity[:, 2].tolist() == [0.0, 0.0]
    path, rows = tmp_path / "times.csv", [PROFILE]
    for bits in (3, 4, 8, 16):
        rows += [f"T4-16GB,any,256,512,64,0,prefill,{bits},2,1.5\n"]
        rows += [f"T4-16GB,any,256,512,1,64,decode,{bits},2,0.5\n"]
    path.write_text("".join([*rows, "T4-16GB,any,256,512,64,0,prefill,6,2,1.5\n"]))
    for cluster, kept, (plain, stored) in (
        (["T4"], (4, 16), ((3, 4, 8, 16), (3, 4, 5, 8, 16))),
        (["T4", "V100"], (5,), ((3, 4, 8, 16), (3, 4, 5, 8, 16))),
        (["V100"], (3, 6), (BITWIDTHS, BITWIDTHS)),
    ):
        devices = ClusterSpec.from_counts(cluster, [1] * len(cluster))
        for own, bits, known in (
            (found, (), stored),
            (found.plain, (), plain),
            (found, kept, kept),
        ):
            options = PlanOptions(bits=bits, profiles=path)
            request = PlanningRequest(devices, own, workload, options)
            assert request.options.bits == known
            device, dtype = devices.devices[0], "float16"
            told = costs_of(request)[0].latency.provenance(device, dtype, known)
            lacks = "without 5 and 6 bit, which llmpq profile would add" in told
            assert lacks == (device.accelerator.name == "T4-16GB" and not {5, 6} & {*known})


def test_one_device_keeps_codes_and_another_computes_in_16_bit() -> None:
    """What does not fit a V100 is kept on a T4, and the plan says so."""
    scheme = Scheme(bits=4, group_size=128, symmetric=False)
    stored = StoredConfig(4, 128, method="awq", schemes=(scheme,))
    found = replace(model_shape("qwen2.5-14b"), stored=stored)
    cluster, options = ClusterSpec.from_counts(["V100-SXM2-32GB", "T4"], [1, 1]), PlanOptions()
    wanted = replace(options, bits=(4, 16))
    plan = find_plan(cluster, found, "x", Workload(16, 1024, 16), wanted).plan
    bits = {stage.kind.name: {*stage.bitwidths} for stage in plan.stages}
    assert bits == {"T4-16GB": {4}, "V100-SXM2-32GB": {16}}
    kept = next(len(stage.layers) for stage in plan.stages if 4 in stage.bitwidths)
    assert plan.weights == PlannedWeights("4 bit (awq)", kept, {})
    assert PlanSpec.from_json(plan.to_json()) == plan
    (said,) = weight_remarks(plan)
    assert said == (
        f"weights are stored as 4 bit (awq): {kept} of 48 layers keep their codes and {48 - kept} "
        "computed in 16 bit lose nothing"
    )
    assert plan.solver.sensitivity == 0
    rounded = {bits: 1 for bits in BITWIDTHS if bits < FULL_BITS}
    lost = replace(plan, weights=PlannedWeights("fp8", 0, rounded | {8: 40}))
    told, remedy = weight_remarks(lost)
    assert "fp8: 40 of 48 layers are rounded to 8 bit, which adds an error of up to 0.9" in told
    assert all(f"1 of 48 layers are rounded to {bits} bit" in told for bits in (6, 5, 4, 3))
    assert "3 bit adds is more than 2.0" in remedy


@pytest.mark.parametrize("method", ["hqq", "exl3"])
def test_other_methods_are_refused_by_name(method: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=f"quantized by the method {method}, which llmpq does not"):
        shape(tmp_path, quant_method=method)


@pytest.mark.parametrize(("group", "held"), [(128, 128), (-1, 128), (256, 128), (64, 64), (32, 32)])
@pytest.mark.parametrize("bits", [3, 4])
def test_groups_count(group: int, held: int, bits: int, tmp_path: Path) -> None:
    """Two 16-bit numbers a group; larger ones are held in parts of the usual size."""
    found = shape(tmp_path, bits=bits, group_size=group)
    assert packed_bytes(found, bits) == WEIGHTS * bits // 8 + 4 * WEIGHTS // held


@pytest.mark.parametrize(("bits", "ordered"), [(3, True), (4, True), (8, False)])
def test_input_orders_count(bits: int, ordered: bool, tmp_path: Path) -> None:
    """32 bits for every input of every linear; 8 bit is quantized once more, in order."""
    plain = packed_bytes(shape(tmp_path, bits=bits), bits)
    found = packed_bytes(shape(tmp_path, bits=bits, desc_act=True), bits)
    assert found - plain == (4 * INPUTS if ordered else 0)


def test_backends_hold_codes(tmp_path: Path) -> None:
    """bitsandbytes' nf4, preferred for 4 bit on a T4, has codes of its own."""
    turing = find_accelerator("T4").processor
    assert backend_name(turing, 4, "float16") == "bnb_nf4"
    assert backend_name(turing, 4, "float16", is_stored=True) != "bnb_nf4"
    cluster = ClusterSpec.from_counts(["T4"], [1])
    options = PlanOptions(bits=(4,))
    plan = find_plan(cluster, shape(tmp_path), "here", Workload(2, 8, 4), options).plan
    assert plan.stages[0].backends[4] == backend_name(turing, 4, "float16", is_stored=True)


def test_formats_of_numbers_leave_the_choice(tmp_path: Path) -> None:
    """FP8 is decoded, and rounded again to any bits; AWQ is planned with the bits that it has."""
    fp8 = shape(tmp_path, quant_method="fp8", weight_block_size=[128, 128])
    assert (fp8.stored, fp8.decoded) == (None, "fp8 in blocks of 128 x 128")
    assert fp8.fingerprint() == shape(tmp_path).fingerprint()
    awq = shape(tmp_path, quant_method="awq", modules_to_not_convert=["down_proj"])
    assert planned_bits(awq, tmp_path, 3, 4, 8) == (4, 4)
    assert [each.stored_bits for each in awq.layer_linears] == [None] * 6 + [16]
    assert packed_bytes(awq) - packed_bytes(shape(tmp_path)) == 2 * DOWN - (
        DOWN * 4 // 8 + 4 * DOWN // 128
    )
