"""Indicators of layers with experts, against dense models and sums by hand."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, MixtralConfig

from llmpq.cli.measure.quality import indicator_main
from llmpq.quality.indicator import measure_indicators
from llmpq.quality.scoring import Subject, evaluate
from llmpq.quality.text_windows import token_windows
from planner.costs.placing import expert_share
from planner.model.finding import model_shape
from planner.profiles.sensitivity import load_omega
from quant.loading.emulated_kernels import LayerScheme
from quant.rounding.canonical import dequantize, quantize
from quant.rounding.importance import InputStatistics, load_importance
from quant.rounding.indicators import (
    ErrorStatistics,
    HessianStatistics,
    Indicator,
    VarianceStatistics,
    squared_rounding_error,
)
from quant.scheme import VarianceForm
from tests.actors.configs import CONFIGS, EVERY_CONFIG
from tests.actors.models import save_tiny
from tests.llmpq.commands import exit_code
from tests.llmpq.quality.test_indicator import IN_FLOAT32, layers_of, tokens

BITS = (4, 16)
LAYER = 2
LINEARS = 4  # of attention


def nearest(name: str, weight: Tensor, bits: int, inputs: InputStatistics) -> Tensor:
    return dequantize(quantize(weight, bits))


METHODS: dict[str, Indicator] = {
    "variance": partial(VarianceStatistics, VarianceForm("stochastic", "symmetric")),
    "hessian": HessianStatistics,
    "error": partial(ErrorStatistics, nearest),
}


def test_copies_of_one_mlp_lose_what_it_loses(tmp_path: Path) -> None:
    """All tokens ask all experts, by a random router but for the first layer's, which is even."""
    config = CONFIGS["mistral"]
    dense, copies, token_ids = tmp_path / "dense", tmp_path / "copies", tokens()
    weights = dict(save_tiny(dense, config).state_dict())
    sizes = {name: getattr(config, name) for name in config.to_diff_dict() if name != "model_type"}
    sizes |= {"num_local_experts": 3, "num_experts_per_tok": 3, "architectures": None}
    made = AutoModelForCausalLM.from_config(MixtralConfig(**sizes), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            layer = name.partition(".mlp.")[0] + ".mlp"
            if name.endswith("experts.gate_up_proj"):
                both = [weights[f"{layer}.{part}_proj.weight"] for part in ("gate", "up")]
                parameter.copy_(torch.cat(both))
            elif name.endswith("experts.down_proj"):
                parameter.copy_(weights[f"{layer}.down_proj.weight"])
            elif name.endswith("mlp.gate.weight"):
                parameter.copy_(torch.randn_like(parameter) * (".0." not in name))
            else:
                parameter.copy_(weights[name])
    made.save_pretrained(copies)
    (one, _), (several, _) = (
        measure_indicators(folder, token_ids, METHODS, BITS, IN_FLOAT32)
        for folder in (dense, copies)
    )
    one, several = ({m: parts.sum(0) for m, parts in own.items()} for own in (one, several))
    for method in ("variance", "error"):
        np.testing.assert_allclose(several[method], one[method], rtol=1e-4)
    assert several["hessian"][0] == pytest.approx(one["hessian"][0], rel=1e-3)
    # Experts that count more for some tokens than for others have eigenvectors of their own.
    assert (several["hessian"][1:, 0] > one["hessian"][1:, 0]).all()


@pytest.mark.parametrize("family", ["gpt_oss", pytest.param("qwen3_moe", marks=pytest.mark.rare)])
def test_experts_count_for_the_tokens_that_ask_them(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums over the experts of one layer in float64, and one expert a pass where memory is short;
    gate and up of gpt-oss take turns.
    """
    model, token_ids = save_tiny(tmp_path, EVERY_CONFIG[family]), tokens(2, 10)
    monkeypatch.setattr("llmpq.quality.layer_inputs.SQUARES_BYTES", 1)
    found, _ = measure_indicators(tmp_path, token_ids, METHODS, BITS, IN_FLOAT32)
    expected = {method: [0.0, 0.0] for method in METHODS}
    for number, (method, loss) in enumerate(by_hand(layers_of(model)[LAYER], model, token_ids)):
        expected[method][number >= LINEARS * len(METHODS)] += loss
    for method, parts in found.items():
        assert parts[:, LAYER, 0] == pytest.approx(expected[method], rel=2e-3)
        assert not parts[:, LAYER, 1].any()


@pytest.mark.parametrize(("asked", "of"), [(1, 4), (3, 4), (2, 8)])
def test_the_rule_parts_layers_as_the_measurement_does(asked: int, of: int, tmp_path: Path) -> None:
    """Of experts of known error, a sixteenth of their outputs up or down, to five digits, and of
    random weights that are rounded to 4 bit within a tenth; however many experts are asked.
    """
    config = copy.deepcopy(EVERY_CONFIG["qwen3_moe"])
    config.update({"num_experts": of, "num_experts_per_tok": asked})
    save_tiny(tmp_path, config)

    def known(name: str, weight: Tensor, bits: int, inputs: InputStatistics) -> Tensor:
        return weight * (1.25 if len(name) % 2 else 0.75)

    methods: dict[str, Indicator] = {
        "known": partial(ErrorStatistics, known),
        "rounded": METHODS["error"],
    }
    found, _ = measure_indicators(tmp_path, tokens(4, 24), methods, BITS, IN_FLOAT32)
    shape = model_shape(str(tmp_path))
    for name, bound in (("known", 1e-5), ("rounded", 0.1)):
        for layer, (rest, experts) in enumerate(np.moveaxis(found[name][..., 0], 0, 1)):
            share = expert_share(shape.layer(layer))
            assert experts / (rest + experts) == pytest.approx(share, rel=bound)
            assert bool(share) == (shape.layer(layer).experts is not None)


def test_parts_in_nats_are_those_of_the_model_with_one_part_rounded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Experts at 3 bit where all else of the layer has 16, and the other way round; the file says
    which part is whose, and bits of plans go by it.
    """
    folder, text = tmp_path / "model", tmp_path / "text.jsonl"
    save_tiny(folder, EVERY_CONFIG["qwen3_moe"])
    ids = tokens(4, 24).flatten().tolist()
    text.write_text(json.dumps({"prompt": ids}) + "\n")
    command = ["--model", folder, "--calibration", text, "-o", tmp_path / "omega.json", "--bits", 3]
    command += ["--rounding", "nearest", "--sequence-length", 24]
    assert exit_code(indicator_main, [str(each) for each in command]) == 0
    assert "of which experts" in capsys.readouterr().out
    shape, cpu = model_shape(str(folder)), torch.device("cpu")
    omega = load_omega(tmp_path / "omega.json", shape, (3, 16))
    assert omega.experts is not None
    windows = token_windows([ids], None, 24)
    plain = LayerScheme(dtype=torch.float32, rounding="nearest")
    full = Subject("full", (plain,) * shape.layers)
    for layer in range(shape.layers):
        for rest, experts, found in (
            (3, 16, omega.matrix - omega.experts),
            (16, 3, omega.experts),
        ):
            schemes = [plain] * shape.layers
            schemes[layer] = replace(plain, bits=rest, expert_bits=experts)
            alone, reference = evaluate(folder, windows, [Subject("", tuple(schemes)), full], cpu)
            assert reference.divergence is None
            assert alone.divergence == pytest.approx(found[layer, 0], rel=1e-4, abs=1e-9)
            has_part = rest == 3 or shape.layer(layer).experts is not None
            assert (found[layer, 0] > 0) == has_part
    scheme = LayerScheme(expert_bits=3, dtype=torch.float32)
    by = [None, load_importance(tmp_path / "omega.importance.safetensors")]
    subjects = [Subject("", (scheme,) * shape.layers, importance=own) for own in by]
    plainly, weighted = evaluate(folder, windows, subjects, cpu)
    assert plainly.nll != weighted.nll, "experts are rounded by importance beside 16 bit too"


def by_hand(layer: Any, model: Any, token_ids: Any) -> Any:
    """Each method's losses at the lower bitwidth, of linears and of experts."""
    seen: dict[nn.Module, Any] = {}
    experts = layer.mlp.experts
    linears = [each for each in layer.self_attn.modules() if isinstance(each, nn.Linear)]
    for module in (experts, *linears):
        module.register_forward_pre_hook(lambda own, inputs: seen.__setitem__(own, inputs))
    with torch.no_grad():
        model(input_ids=torch.from_numpy(token_ids), use_cache=False)
    for linear in linears:
        x = seen[linear][0].flatten(0, -2).double()
        yield from losses([(linear.weight.detach(), x, torch.ones(len(x)).double())], len(x))
    hidden, index, router = (each.detach() for each in seen[experts])
    hidden, router = hidden.flatten(0, -2).double(), router.double()
    flip = getattr(experts, "is_transposed", False)
    gates, ups, downs = [], [], []
    for expert in range(len(experts.down_proj)):
        asks = (index == expert).any(1)
        if not asks.any():
            continue
        own = (router * (index == expert)).sum(1)[asks]
        counted = own * router.sum(1)[asks]
        weight, down = experts.gate_up_proj[expert].detach(), experts.down_proj[expert].detach()
        weight, down = (each.T if flip else each for each in (weight, down))
        grown = hidden[asks] @ weight.double().T
        if flip:
            grown = grown + experts.gate_up_proj_bias[expert].detach().double()
        half = len(weight) // 2
        gate, up = (weight[::2], weight[1::2]) if flip else (weight[:half], weight[half:])
        gates.append((gate, hidden[asks], counted))
        ups.append((up, hidden[asks], counted))
        downs.append((down, experts._apply_gate(grown), counted))
    assert len(gates) > 2
    for parts in (gates, ups, downs):
        yield from losses(parts, len(hidden))


def losses(parts: list[tuple[Tensor, Tensor, Tensor]], count: int) -> Any:
    """Of weights with their inputs, and what each of these counts, all of one projection."""
    lost = energy = 0.0
    for weight, x, counted in parts:
        step = float(weight.abs().max()) / 7
        square = float((counted.unsqueeze(-1) * x.square()).sum()) / (count * x.shape[1])
        yield "variance", weight.numel() * step**2 * square / 6
        gram = 2 * (x * counted.unsqueeze(-1)).T @ x
        yield "hessian", float(torch.linalg.eigvalsh(gram)[-1]) * squared_rounding_error(weight, 4)
        squares = (counted.unsqueeze(-1) * x.square()).sum(0)
        apart = (dequantize(quantize(weight, 4)) - weight).double()
        lost += float((apart.square() * squares).sum())
        energy += float((weight.double().square() * squares).sum())
    yield "error", lost / energy
