"""What plans say of quality beside what is measured: within the factor that they state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch

from actors.importance import measure_layers
from actors.sample_text import what_is_seen
from actors.stage.layer_stream import compute_on
from benchmarks.quantization.models import smollm2
from llmpq import Cluster, Workload
from llmpq.quality.scoring import evaluate
from llmpq.quality.subjects import bits_subject
from llmpq.quality.text_windows import token_windows
from llmpq.tokenizing.requests import load_tokenizer
from planner.model.finding import model_shape
from planner.plan.parts import QualityForecast
from quant.checkpoint.model_reference import demo_gguf
from quant.common.errors import SpecError
from quant.loading.emulated_kernels import LayerScheme
from quant.rounding.importance import Importance
from tests.paths import DEMO_MODEL

CPU = torch.device("cpu")
Bits = tuple[int, ...]


def measured(model: Path, chosen: Sequence[Bits], windows: int) -> list[float]:
    """The divergence from 16 bit at each of `chosen` bits, rounded as stages round."""
    text = token_windows([topics["typesseq"]], load_tokenizer(model), 128, 128 * windows)
    shape = model_shape(str(model))
    layers = range(shape.layers)
    compute = compute_on(CPU, torch.float32)
    _, seen = measure_layers(model, compute, layers, [LayerScheme()] * len(layers))
    importance = Importance(tuple(seen), what_is_seen(shape), shape.fingerprint())
    subjects = [
        replace(bits_subject(bits, len(layers), CPU, "float32"), importance=importance)
        for bits in ((16,) * len(layers), *chosen)
    ]
    _, *found = evaluate(model, text, subjects, CPU)
    return [each.divergence or 0.0 for each in found]


def planned(model: Path, bits: int) -> QualityForecast:
    cluster = Cluster.from_counts(["A100-SXM4-40GB"], [1])
    found = cluster.plan(str(model), Workload(2, 16, 2), bits=(bits,)).quality
    assert found is not None
    return found


def test_what_is_said_of_the_demo_model_is_within_the_factor_of_what_is_measured() -> None:
    layers = model_shape(str(DEMO_MODEL)).layers
    mixed = (4, 16) * (layers // 2)
    *uniform, half = measured(DEMO_MODEL, [(bits,) * layers for bits in (3, 4, 8)] + [mixed], 4)
    plans = [planned(DEMO_MODEL, bits) for bits in (3, 4, 8)]
    for plan, found in zip(plans, uniform, strict=True):
        assert plan.low <= found <= plan.high
        assert plan.high == pytest.approx(plan.divergence * plan.scale.factor + plan.scale.margin)
    scale = plans[1].scale
    assert scale.at(0.5) / scale.factor <= half <= scale.at(0.5) * scale.factor
    assert planned(DEMO_MODEL, 16).divergence == 0


@pytest.mark.rare
def test_what_is_said_of_smollm2_is_within_the_factor_of_what_is_measured() -> None:
    try:
        demo_gguf()
    except SpecError as error:
        pytest.skip(str(error))
    model = smollm2()
    layers = model_shape(str(model)).layers
    found = measured(model, [(bits,) * layers for bits in (3, 4, 8)], 4)
    for bits, each in zip((3, 4, 8), found, strict=True):
        plan = planned(model, bits)
        assert plan.low <= each <= plan.high
