"""Checkpoints written with GPTQ: what is in them, and that stages compute what they stand for."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    BloomConfig,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
)

from actors.stage.layer_stream import LayerStream, stream_layers
from llmpq import Cluster, Workload
from llmpq.cli.measure.checkpoints import quantize_main
from llmpq.cli.measure.quality import indicator_main
from llmpq.model_check import checked_shape
from llmpq.quality.quantize import Quantization, quantize_checkpoint, shared_inputs
from planner.costs.stored_bytes import layer_weight_bytes
from planner.model.finding import model_shape
from planner.model.tensor_parallel import shape_of_ranks
from quant.checkpoint.reader import Checkpoint
from quant.common.errors import CheckpointError, InputError, PlanMismatchError, SpecError
from quant.loading.emulated_kernels import Compute, LayerScheme
from quant.loading.loader import module_nbytes
from quant.rounding.canonical import dequantize
from quant.rounding.gptq_format import to_canonical
from quant.scheme import GptqOptions, Processor
from tests.actors.configs import VOCABULARY
from tests.actors.models import (
    generate,
    random_prompts,
    references,
    save_tiny,
    specs_of,
    stages_of,
)
from tests.actors.thread_ranks import load_ranks
from tests.llmpq.commands import exit_code

pytestmark = pytest.mark.usefixtures("short_measurement")
PLAIN_CPU = Processor(instruction_sets=frozenset())
"""Without kernels that round activations."""

PLAIN, SYMMETRIC, NARROW = GptqOptions(), GptqOptions(symmetric=True), GptqOptions(narrow=True)
IN_FLOAT32 = Compute(torch.device("cpu"), torch.float32, PLAIN_CPU)
BITS = (3, 16, 4, 8, 4)
_SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 128}
_ROPE = _SIZES | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": len(BITS),
    "num_attention_heads": 4,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_ROPE, num_key_value_heads=2, attention_bias=True),
    "gpt_neox": GPTNeoXConfig(**_ROPE),
    "opt": OPTConfig(
        **_SIZES, hidden_size=64, ffn_dim=96, num_hidden_layers=len(BITS), num_attention_heads=4,
        word_embed_proj_dim=32,
    ),
    "phi3": Phi3Config(**_ROPE, num_key_value_heads=2, pad_token_id=0, eos_token_id=2),
    "bloom": BloomConfig(vocab_size=VOCABULARY, hidden_size=64, n_layer=len(BITS), n_head=4),
}  # fmt: skip


def tokens(sequences: int = 6, length: int = 40) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, VOCABULARY, (sequences, length), generator=generator)


def make(
    source: Path, target: Path, bits: tuple[int, ...] = BITS, options: GptqOptions = PLAIN
) -> Checkpoint:
    wanted = Quantization(bits, tokens(), IN_FLOAT32, options)
    quantize_checkpoint(source, target, wanted)
    return Checkpoint(target)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with a model and what was made of it, `model` and `made`, and the model."""
    folder = tmp_path_factory.mktemp("llama")
    model = save_tiny(folder / "model", CONFIGS["llama"])
    make(folder / "model", folder / "made")
    return folder, model


def calibrated(bits: tuple[int, ...] = BITS) -> Quantization:
    return Quantization(bits, tokens(), IN_FLOAT32, GptqOptions())


def patch(model: Any, made: Checkpoint, bits: tuple[int, ...]) -> None:
    """Give transformers' model the weights that `made` stands for."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and made.has(f"{name}.qweight"):
            codes = made.read_codes(name, tuple(module.weight.shape))
            weight = codes.dequantize()
            number = int(next(part for part in name.split(".") if part.isdigit()))
            if bits[number] == 8:  # as the kernels' own 8 bit holds it
                weight = dequantize(to_canonical(codes).canonical)
            with torch.no_grad():
                module.weight.copy_(weight)


def stored_bits(made: Checkpoint, layers_name: str) -> list[int]:
    """Of each layer, by what its weights are stored as; 16 where these are plain."""
    found = []
    for index in range(len(BITS)):
        modules = [
            name.removesuffix(".weight") for name in made.names_below(f"{layers_name}.{index}")
        ]
        coded = [each for each in map(made.coded, modules) if each is not None]
        widths = {each.linear.bits for each in coded if each.linear is not None}
        found.append(widths.pop() if widths else 16)
        assert not widths, "one bitwidth in a layer"
    return found


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, PLAIN) for family in CONFIGS),
        *(("llama", options) for options in (SYMMETRIC, NARROW)),
        *(
            pytest.param(name, options, marks=pytest.mark.rare)
            for name in CONFIGS
            for options in (SYMMETRIC, NARROW)
            if name != "llama"
        ),
    ],
    ids=str,
)
def test_stages_compute_what_the_checkpoint_stands_for(
    family: str, options: GptqOptions, tmp_path: Path
) -> None:
    model = save_tiny(tmp_path / "model", CONFIGS[family])
    made = make(tmp_path / "model", tmp_path / "made", options=options)
    layers_name = LayerStream(tmp_path / "model", IN_FLOAT32).layers_name
    assert stored_bits(made, layers_name) == list(BITS)
    patch(model, made, BITS)
    token_ids = tokens(2, 30)
    stream = LayerStream(tmp_path / "made", IN_FLOAT32)
    *_, last = stream_layers(stream, token_ids, [LayerScheme(bits) for bits in BITS])
    tail = stream.tail()
    logits = tail.logits(tail.normed(last.hidden))
    with torch.no_grad():
        expected = model(input_ids=token_ids, use_cache=False).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [NARROW, pytest.param(PLAIN, marks=pytest.mark.rare)], ids=str)
def test_bytes_of_stored_groups_are_those_of_plans(options: GptqOptions, tmp_path: Path) -> None:
    """Where codes are kept, also by ranks, and where they are rounded again to other bits."""
    save_tiny(tmp_path / "model", CONFIGS["llama"])
    folder = make(tmp_path / "model", tmp_path / "made", options=options).folder
    shape, host = model_shape(folder), SimpleNamespace(processor=PLAIN_CPU)
    for bits, degree in ((BITS, 1), ((4, 16, 3, 3, 8), 1), (BITS, 2)):
        (spec,) = specs_of((0, len(BITS)), 1, 8, bits)
        for rank, stage in enumerate(load_ranks(spec, degree, folder, processor=PLAIN_CPU)):
            own = shape_of_ranks(shape, degree, range(rank, rank + 1)) if degree > 1 else shape
            layers = stage._model.get_decoder().layers
            for index, layer in enumerate(layers):
                planned = layer_weight_bytes(own.layer(index), bits[index], host, "float32")
                assert module_nbytes(layer) == planned, (bits, degree, index)


def test_tokens_are_those_of_the_library(llama: tuple[Path, Any]) -> None:
    folder, model = llama[0] / "made", deepcopy(llama[1])
    patch(model, Checkpoint(folder), BITS)
    prompts = random_prompts((5, 9, 14))
    stages = stages_of(folder, (0, 2, 5), 3, 24, bits=BITS, processor=PLAIN_CPU)
    assert generate(stages, prompts, 8, 2, 3) == references(model, prompts, 8)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", ["q_proj k_proj v_proj", "o_proj", "gate_proj up_proj", "down_proj"]),
        ("opt", ["q_proj k_proj v_proj", "out_proj", "fc1", "fc2"]),
        ("gpt_neox", ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]),
    ],
)
def test_linears_are_taken_in_the_order_in_which_they_run(
    family: str, expected: list[str], tmp_path: Path
) -> None:
    save_tiny(tmp_path, CONFIGS[family])
    layer = next(stream_layers(LayerStream(tmp_path, IN_FLOAT32), tokens()))
    found = shared_inputs(layer)
    assert [" ".join(name.rpartition(".")[2] for name in names) for names in found] == expected


def test_calibrated_weights_move_outputs_less_than_rounded_ones(tmp_path: Path) -> None:
    """Over the whole model, on text that it was not calibrated on."""
    save_tiny(tmp_path / "model", CONFIGS["llama"])
    bits = (3,) * 5
    make(tmp_path / "model", tmp_path / "made", bits, NARROW)
    other = torch.randint(3, VOCABULARY, (4, 40), generator=torch.Generator().manual_seed(9))

    def last_hidden(folder: Path, scheme: LayerScheme) -> Tensor:
        stream = LayerStream(folder, IN_FLOAT32)
        *_, layer = stream_layers(stream, other, [scheme] * 5)
        return layer.hidden

    exact = last_hidden(tmp_path / "model", LayerScheme())
    nearest, calibrated = (
        float((last_hidden(tmp_path / folder, scheme) - exact).norm())
        for folder, scheme in (
            ("model", LayerScheme(3, rounding="nearest")),
            ("made", LayerScheme(3)),
        )
    )
    assert calibrated < 0.9 * nearest


def test_what_is_not_quantized_is_copied_under_the_librarys_names(tmp_path: Path) -> None:
    """The OPT family's checkpoints lack the `model.` that its modules have."""
    save_tiny(tmp_path / "model", CONFIGS["opt"])
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    save_file({name.removeprefix("model."): t for name, t in tensors.items()}, path)
    made = make(tmp_path / "model", tmp_path / "made")
    coded = {name for name in made.names() if made.coded(name.removesuffix(".weight"))}
    kept = [name for name in made.names() if name in tensors and name not in coded]
    assert all(torch.equal(made.read(name), tensors[name]) for name in kept)
    quantized = {name.removesuffix("weight") for name in coded}
    assert set(tensors) - set(kept) == {f"{name}weight" for name in quantized}


def test_configuration(llama: tuple[Path, Any]) -> None:
    """Most layers' bits, and rules in GPTQModel's order: the first that matches decides."""
    made = llama[0] / "made"
    config = json.loads((made / "config.json").read_text())
    entries = config["quantization_config"]
    assert config["hidden_size"] == 64
    assert entries == json.loads((made / "quantize_config.json").read_text())
    assert (entries["bits"], entries["group_size"]) == (4, 64)
    assert entries["checkpoint_format"] == "gptq_v2"
    rules = entries["dynamic"]
    assert rules[r"-:model\.layers\.1\..*"] == {}
    assert rules[r"+:model\.layers\.3\..*"] == {"bits": 8}
    own_group = r"+:model\.layers\.0\.mlp\.down_proj"
    assert rules[own_group] == {"bits": 3, "group_size": 32}
    assert list(rules).index(own_group) < list(rules).index(r"+:model\.layers\.0\..*")


def test_refusals(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", CONFIGS["llama"])

    def attempt(bits: tuple[int, ...], source: str = "model", target: str = "new") -> None:
        wanted = calibrated(bits)
        quantize_checkpoint(tmp_path / source, tmp_path / target, wanted, overwrite=True)

    with pytest.raises(SpecError, match="3 bitwidths for 5 layers"):
        attempt((4, 4, 4))
    with pytest.raises(SpecError, match="nothing to quantize"):
        attempt((16,) * 5)
    with pytest.raises(InputError, match="is the model itself"):
        attempt(BITS, target="model")
    make(tmp_path / "model", tmp_path / "made")
    with pytest.raises(SpecError, match="is quantized already; give the original"):
        attempt(BITS, source="made")
    odd = LlamaConfig(**_ROPE | {"intermediate_size": 80})
    save_tiny(tmp_path / "odd", odd)
    with pytest.raises(SpecError, match=r"layers\.2\.mlp\.gate_proj of 80 x 64 .*words at 3 bits"):
        attempt((4, 8, 3, 4, 16), source="odd")
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[1, 1] = torch.nan
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.up_proj"):
        attempt(BITS)
    assert not (tmp_path / "new").exists()


def run(tmp_path: Path, *more: str) -> int:
    (tmp_path / "text.jsonl").write_text(json.dumps({"prompt": tokens().flatten().tolist()}))
    shared = ["--model", str(tmp_path / "model"), "-o", str(tmp_path / "made")]
    return quantize_main([*shared, "--sequence_length", "30", *more])


def test_command_with_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "model", CONFIGS["llama"])
    cluster = Cluster.from_counts(["T4"], [1])
    plan = cluster.plan(tmp_path / "model", Workload(2, 8, 4), bits=[4])
    plan.save(tmp_path / "plan.json")
    text = str(tmp_path / "text.jsonl")
    options = ("--strat_file_name", str(tmp_path / "plan.json"), "--calibration", text)
    assert run(tmp_path, *options, "--symmetric", "--no-act-order") == 0
    out = capsys.readouterr().out
    assert "5 layers of 4.00 bits on average, calibrated on 240 tokens" in out
    made = Checkpoint(tmp_path / "made")
    assert stored_bits(made, "model.layers") == [4] * 5
    # whose bits are kept where fewer would lose and more would not fit
    again = cluster.plan(tmp_path / "made", Workload(2, 8, 4), bits=[3, 4], quality="high")
    assert set(again.stages[0].bitwidths) == {4}
    measuring = ["--model", str(tmp_path / "made"), "--calibration", text, "-o", text + ".json"]
    for method in ("error", "variance"):
        assert exit_code(indicator_main, [*measuring, "--method", method]) == 2
        assert "whose --omega_file plans of both take" in capsys.readouterr().err
    # a plan that is calibrated is not run with what was calibrated for another one
    other = cluster.plan(tmp_path / "model", Workload(2, 8, 4), bits=[8], rounding="gptq")
    with pytest.raises(PlanMismatchError, match=r"other bits than the plan gives layer 0, and"):
        next(other.run([[5, 6, 7]], model=str(tmp_path / "made")))


def test_mixed_checkpoints_lose_nothing_where_nothing_may_be_lost(llama: tuple[Path, Any]) -> None:
    made = llama[0] / "made"
    plan = Cluster.from_counts(["T4"], [1]).plan(made, Workload(2, 8, 4), theta=1e9)
    assert plan.spec.rounded_layers(checked_shape(made)) == []
    pairs = zip(plan.stages[0].bitwidths, BITS, strict=True)
    assert all(planned in (16, stored) for planned, stored in pairs)
    assert plan.spec.solver.sensitivity == 0
