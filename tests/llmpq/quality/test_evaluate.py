"""Perplexities against transformers' own loss on the same windows."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from actors.importance import measure_layers
from actors.stage.layer_stream import compute_on
from benchmarks.quantization.quality_tables import divergence_above
from llmpq import Cluster, Plan, Workload
from llmpq.quality.perplexity import Perplexity
from llmpq.quality.scoring import evaluate
from llmpq.quality.subjects import bits_subject
from llmpq.quality.text_windows import Windows, token_windows
from quant.common.errors import DeviceError, PlanMismatchError, SpecError
from quant.loading.emulated_kernels import LayerScheme
from quant.rounding.canonical import dequantize, quantize
from quant.rounding.importance import LayerImportance
from quant.rounding.ways import Rounding
from tests.actors.configs import (
    EVERY_CONFIG,
    LAYERS,
    SHARED_CONFIGS,
    STATE_CONFIGS,
    VOCABULARY,
)
from tests.actors.models import save_tiny
from tests.llmpq.quality.losses import by_transformers, token_text

CPU = torch.device("cpu")
MIXED_BITS = (6, 16, 3, 5, 4)
CONFIGS = EVERY_CONFIG | SHARED_CONFIGS | STATE_CONFIGS
HAS_BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None
WIDE = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    max_position_embeddings=128,
)


def rounded(
    model: Any, bitwidths: tuple[int, ...], importance: Sequence[LayerImportance] = ()
) -> Any:
    """`model` with the linears of each decoder layer as their codes stand for them: by weighted
    rounding, where `importance` has what they multiply.
    """
    for index, bits in enumerate(bitwidths):
        for name, linear in model.model.layers[index].named_modules():
            if isinstance(linear, nn.Linear) and bits < 16:
                inputs = importance[index].inputs[name] if importance else None
                rounding = Rounding("weighted")
                canonical = quantize(
                    linear.weight.data, bits, rounding=replace(rounding, inputs=inputs)
                )
                linear.weight.data = dequantize(canonical)
    return model


def measure(folder: Path, windows: Windows, *bitwidths: tuple[int, ...]) -> list[Perplexity]:
    subjects = [bits_subject(bits, LAYERS, CPU, "float32") for bits in bitwidths]
    return evaluate(folder, windows, subjects, CPU)


@pytest.mark.parametrize(
    "name",
    [
        *("llama-tied", "opt-post-norm", "bloom", "qwen3_5_moe", "gemma4-shared", "gpt_oss"),
        *(
            pytest.param(name, marks=pytest.mark.rare)
            for name in ("qwen2-sliding", "qwen3_moe", "qwen3_next", "glm4_moe", "gemma4-experts")
        ),
    ],
)
def test_full_precision_is_transformers_loss(name: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path, CONFIGS[name])
    windows = token_windows([token_text()], None, 24)
    (result,) = measure(tmp_path, windows, (16,))
    expected = by_transformers(model, windows)
    assert result.perplexity == pytest.approx(math.exp(expected), rel=1e-5)
    assert (result.tokens, result.windows) == (131 - 6, 6)
    assert result.dtypes == ("float32",)
    assert not result.represented


@pytest.mark.parametrize("bits", [(4,) * LAYERS, MIXED_BITS])
def test_quantized_is_transformers_with_rounded_weights(
    bits: tuple[int, ...], tiny: tuple[Path, Any], tmp_path: Path
) -> None:
    model = rounded(save_tiny(tmp_path, CONFIGS["llama"]), bits)
    windows = token_windows([token_text()], None, 24)
    (result,) = measure(tmp_path, windows, bits)
    assert result.perplexity == pytest.approx(math.exp(by_transformers(model, windows)), rel=1e-5)
    assert result.bitwidths == bits


def test_subjects_measured_together_are_as_measured_alone(tiny: tuple[Path, Any]) -> None:
    windows = token_windows([token_text()], None, 24)
    several = [(16,), (4, 4, 3, 3, 3), MIXED_BITS, (16,)]
    together = measure(tiny[0], windows, *several)
    alone = [measure(tiny[0], windows, bits)[0] for bits in several]
    assert [replace(result, window_divergence=None) for result in together] == alone
    assert len({result.nll for result in together}) == 3
    pairs = [measure(tiny[0], windows, (16,), bits)[1] for bits in several[1:]]
    assert together[1:] == pairs
    assert together[0].divergence is None
    assert together[-1].divergence == 0.0
    low, full, _ = measure(tiny[0], windows, (4, 4, 3, 3, 3), (16,), MIXED_BITS)
    assert (low.divergence, full.divergence) == (together[1].divergence, None)
    lower, low = measure(tiny[0], windows, (3,), (4, 4, 3, 3, 3))  # the first, as none is at 16 bit
    assert lower.divergence is None
    assert low.divergence is not None


def log_probabilities(model: Any, windows: Windows) -> list[torch.Tensor]:
    """The library's predictions of each window's scored tokens, float64 `[tokens, vocabulary]`."""
    found = []
    for row, count in zip(windows.token_ids, windows.counts, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(row[:count])[None], use_cache=False).logits
        found.append(torch.log_softmax(logits[0, :-1].double(), dim=-1))
    return found


@pytest.mark.parametrize("at_once", [1 << 24, 7 * VOCABULARY])
def test_divergence_is_that_of_transformers_logits(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmpq.quality.scoring._LOGITS_AT_ONCE", at_once)
    model = save_tiny(tmp_path, CONFIGS["llama"])
    windows = token_windows([token_text()], None, 24)
    full, low, mixed = measure(tmp_path, windows, (16,), (3,), MIXED_BITS)
    expected = log_probabilities(model, windows)
    apart = log_probabilities(rounded(model, (3,) * LAYERS), windows)
    by_hand = [float((p.exp() * (p - q)).sum()) for p, q in zip(expected, apart, strict=True)]
    assert full.divergence is None
    assert full.divergence_error is None
    assert low.window_divergence == pytest.approx(by_hand, rel=1e-5, abs=1e-5)
    assert low.divergence == pytest.approx(sum(by_hand) / windows.scored, rel=1e-5)
    counts = windows.counts - 1
    spread = ((np.array(by_hand) - low.divergence * counts) ** 2).sum()
    error = math.sqrt(spread * len(counts) / (len(counts) - 1)) / windows.scored
    assert low.divergence_error == pytest.approx(error, rel=1e-4)
    assert mixed.divergence is not None
    assert 0 < mixed.divergence < low.divergence
    more, _ = divergence_above(low, mixed)
    assert more == pytest.approx(low.divergence - mixed.divergence, rel=1e-9)
    assert divergence_above(low, full) == (low.divergence, low.divergence_error)


def test_many_logits_are_worked_off_in_parts(
    tiny: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = token_windows([token_text()], None, 24)
    (whole,) = measure(tiny[0], windows, (16,))
    monkeypatch.setattr("llmpq.quality.scoring._LOGITS_AT_ONCE", 7 * VOCABULARY)
    (in_parts,) = measure(tiny[0], windows, (16,))
    np.testing.assert_allclose(in_parts.window_nll, whole.window_nll, rtol=1e-6)


def test_standard_errors_are_those_of_a_mean() -> None:
    generator = np.random.default_rng(5)
    nats = generator.normal(60.0, 4.0, size=(2, 40))
    own, other = (
        Perplexity("x", (16,), tuple(row.tolist()), (20,) * 40, ("float32",)) for row in nats
    )
    of_mean = nats[0].std(ddof=1) / math.sqrt(40) / 20
    assert own.standard_error == pytest.approx(own.perplexity * of_mean)
    difference, error = own.above(other)
    assert difference == pytest.approx(own.perplexity - other.perplexity)
    weighed = own.perplexity * nats[0] - other.perplexity * nats[1]
    assert error == pytest.approx(weighed.std(ddof=1) / math.sqrt(40) / 20)
    single = replace(own, window_nll=(60.0,), window_tokens=(20,))
    assert single.standard_error is None
    with pytest.raises(ValueError, match="different windows"):
        own.above(single)


@pytest.mark.parametrize("loss", [0.05, 1.0])
def test_the_error_of_a_difference_by_other_ways(loss: float) -> None:
    """The delta method with its gradient and covariances written out, and a bootstrap.

    Windows of different lengths, a text that is harder in some, a model that loses little or much.
    """
    generator = np.random.default_rng(3)
    counts = generator.integers(20, 60, 400)
    hardness = generator.normal(3.0, 0.4, 400)
    base = counts * (hardness + generator.normal(0, 0.1, 400))
    worse = counts * (hardness + loss + generator.normal(0, 0.1, 400))
    own, other = (
        Perplexity("x", (16,), tuple(nats.tolist()), tuple(counts.tolist()), ("float32",))
        for nats in (worse, base)
    )
    error = own.above(other)[1]
    residuals = [nats - counts * nats.sum() / counts.sum() for nats in (worse, base)]
    covariance = np.cov(residuals) * 400 / counts.sum() ** 2
    gradient = np.array([own.perplexity, -other.perplexity])
    assert error == pytest.approx(math.sqrt(gradient @ covariance @ gradient), rel=1e-6)
    draws = generator.integers(0, 400, (4000, 400))
    tokens = counts[draws].sum(1)
    differences = np.exp(worse[draws].sum(1) / tokens) - np.exp(base[draws].sum(1) / tokens)
    assert error == pytest.approx(differences.std(), rel=0.05)


# ----------------------------------------------------------------------------------------- plans


def plan_on(cluster: Cluster, model: Path, **options: Any) -> Plan:
    return cluster.plan(model, Workload(2, 16, 8), **options)


def test_a_plan_of_several_stages(plan: Plan, tiny: tuple[Path, Any]) -> None:
    text = token_text()
    expected = by_transformers(tiny[1], token_windows([text], None, 24))
    result = plan.evaluate(text, sequence_length=24)
    assert result.perplexity == pytest.approx(math.exp(expected), rel=1e-5)
    assert result.bitwidths == tuple(b for stage in plan.stages for b in stage.bitwidths)


def test_a_plan_with_keys_and_values_in_8_bit_is_measured_with_them(
    plan: Plan, tiny: tuple[Path, Any]
) -> None:
    text = token_text()
    full = plan.evaluate(text, sequence_length=24)
    coded = Plan(replace(plan.spec, kv_bits=8)).evaluate(text, sequence_length=24)
    assert coded.perplexity != full.perplexity
    assert coded.perplexity == pytest.approx(full.perplexity, rel=0.01)


def test_kernels_of_another_type_are_represented(tmp_path: Path) -> None:
    model, in_float32 = save_tiny(tmp_path, WIDE), compute_on(CPU, torch.float32)
    _, importance = measure_layers(tmp_path, in_float32, range(LAYERS), [LayerScheme()] * LAYERS)
    model = rounded(model, (4,) * LAYERS, importance)
    cluster_file = tmp_path / "cpu.yaml"
    cluster_file.write_text(
        "name: cpu\nnodes: [{name: a, accelerators: {CPU: 1}, threads: 1, memory_gib: 1}]\n"
    )
    options = {"bits": [4], "head_bits": [16], "dtype": "bfloat16"}
    plan = plan_on(Cluster.from_yaml(cluster_file), tmp_path, **options)
    assert plan.stages[0].backends == {4: "int4pack"}
    text = token_text()
    expected = by_transformers(model, token_windows([text], None, 24))
    result = plan.evaluate(text, sequence_length=24, dtype="float32")
    assert result.represented == {"int4pack": tuple(range(LAYERS))}
    assert result.perplexity == pytest.approx(math.exp(expected), rel=1e-5)
    as_run = plan.evaluate(text, sequence_length=24)
    assert as_run.dtypes == ("bfloat16",)
    assert not as_run.represented
    assert as_run.nll == pytest.approx(expected, rel=0.02)


@pytest.fixture(scope="module")
def nf4_plan(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Path]:
    folder = tmp_path_factory.mktemp("nf4")
    save_tiny(folder, WIDE)
    plan = plan_on(Cluster.from_counts(["T4"], [1]), folder, bits=[4], rounding="nearest")
    assert plan.stages[0].backends == {4: "bnb_nf4"}
    return plan, folder


def test_without_bitsandbytes_nf4_names_the_extra(
    nf4_plan: tuple[Plan, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(DeviceError, match=r"llmpq\[bitsandbytes\]"):
        nf4_plan[0].evaluate(token_text(), sequence_length=24)


@pytest.mark.skipif(not HAS_BITSANDBYTES, reason="bitsandbytes is not here")
def test_nf4_is_the_published_table_by_blocks_of_64(nf4_plan: tuple[Plan, Path]) -> None:
    plan, folder = nf4_plan
    model = save_tiny(folder, WIDE)
    for linear in (m for m in model.model.layers.modules() if isinstance(m, nn.Linear)):
        linear.weight.data = nf4_rounded(linear.weight.data)
    text = token_text()
    expected = by_transformers(model, token_windows([text], None, 24))
    result = plan.evaluate(text, sequence_length=24)
    assert result.represented == {"bnb_nf4": tuple(range(LAYERS))}
    assert result.perplexity == pytest.approx(math.exp(expected), rel=1e-5)


def nf4_rounded(weight: torch.Tensor) -> torch.Tensor:
    """QLoRA (Dettmers et al. 2023), appendix E: its 16 values, scaled to each block's maximum."""
    table = torch.tensor(
        [
            -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
            -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
            0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
            0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
        ]
    )  # fmt: skip
    blocks = weight.view(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    nearest = (blocks / largest).unsqueeze(-1).sub(table).abs().argmin(-1)
    return (table[nearest] * largest).view(weight.shape)


def test_plan_of_another_model_is_refused(plan: Plan, tmp_path: Path) -> None:
    save_tiny(tmp_path, CONFIGS["opt"])
    with pytest.raises(PlanMismatchError, match="plan again"):
        plan.evaluate(token_text(), model=str(tmp_path))


def test_logits_that_are_not_finite(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, CONFIGS["llama"])
    with torch.no_grad():
        model.lm_head.weight.mul_(1e38)
        model.model.norm.weight.mul_(1e4)
    model.save_pretrained(tmp_path)
    with pytest.raises(SpecError, match="not finite"):
        measure(tmp_path, token_windows([token_text()], None, 24), (16,))


# ------------------------------------------------------------------------------------ llmpq eval
