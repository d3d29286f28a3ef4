"""Expected seconds of passes and calibrations, against operations that are counted here."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from actors.stage.layer_stream import compute_on
from llmpq.quality.effort import PASS_SHARE, SOLVING_SHARE, Effort, operations_per_s
from llmpq.quality.options import IndicatorOptions
from planner.model.finding import model_shape
from quant.loading.emulated_kernels import LayerScheme

SHAPE = model_shape("opt-30b")
RATE = 1e12


def test_a_pass_takes_two_operations_a_weight_and_token() -> None:
    seconds = Effort(SHAPE, RATE).passes_s(1000, 48)
    weights = 48 * 12 * 7168**2  # LLM-PQ's 12 h^2 of a layer
    assert seconds == pytest.approx(2 * 1000 * weights / RATE / PASS_SHARE, rel=0.01)


def test_of_experts_those_asked_take_time() -> None:
    """Qwen3-30B-A3B: 8 of 128 experts of 3 matrices of 2048 by 768, 4096 by 2048 of queries and
    output, 512 of keys and values, 128 of the router.
    """
    shape = model_shape("qwen3-30b-a3b")
    weights = 2048 * (3 * 8 * 768 + 2 * 4096 + 2 * 512 + 128)
    seconds = Effort(shape, RATE).passes_s(1000, 48)
    assert seconds == pytest.approx(2 * 1000 * 48 * weights / RATE / PASS_SHARE, rel=0.001)


def test_every_expert_is_solved_for_itself_with_the_tokens_that_ask_it() -> None:
    """Gates and ups of 2048 inputs and 1536 rows, downs of 768 and 2048, of 8 of 128 experts."""
    effort = Effort(model_shape("qwen3-30b-a3b"), RATE)
    few, many = (effort.gptq_s(tokens, [4] * 48) for tokens in (1000, 2000))
    solving = 128 * 2 * (2048**3 + 1536 * 2048**2 + 768**3 + 2048 * 768**2)
    attention = 2048 * (2 * 4096 + 2 * 512)
    solving += 3 * 2 * 2048**3 + 2 * attention * 2048
    assert 2 * few - many == pytest.approx(48 * solving / SOLVING_SHARE / RATE)
    shown_s = 2 * 1000 * (3 * 2048**2 + 8 * (2048**2 + 768**2)) / PASS_SHARE / RATE
    assert many - few == pytest.approx(48 * shown_s + effort.passes_s(1000, 48 * 7))


def test_models_that_begin_alike_are_computed_once() -> None:
    effort, full = Effort(SHAPE, RATE), LayerScheme(16)
    alike = [[full] * 48, [full] * 47 + [LayerScheme(4)]]
    head = effort.passes_s(10, 0, 1)
    one, both = effort.evaluation_s(10, alike[:1]), effort.evaluation_s(10, alike)
    assert both - one == pytest.approx(effort.passes_s(10, 1) + head)
    apart = [[full] * 48, [LayerScheme(4)] * 48]
    assert effort.evaluation_s(10, apart) == pytest.approx(2 * one)


def test_more_text_more_bits_and_slower_machines_take_longer() -> None:
    effort, slow = Effort(SHAPE, RATE), Effort(SHAPE, RATE / 2)
    few, many = IndicatorOptions(bits=(4,)), IndicatorOptions(bits=(3, 4, 8))
    assert effort.gptq_s(800_000, [4] * 48) > 1.5 * effort.gptq_s(400_000, [4] * 48)
    assert effort.gptq_s(1000, [16] * 48) == pytest.approx(effort.passes_s(1000, 48))
    assert slow.gptq_s(1000, [4] * 48) == pytest.approx(2 * effort.gptq_s(1000, [4] * 48))
    assert effort.indicator_s(1000, many) > effort.indicator_s(1000, few)
    variance = dataclasses.replace(many, method="variance")
    assert effort.indicator_s(1000, variance) == pytest.approx(effort.passes_s(1000, 48))


def test_the_machines_speed_is_measured_by_the_clock() -> None:
    times = iter([0.0, 0.0, 0.1, 0.2])  # two products in 0.2 s
    compute = compute_on(torch.device("cpu"), torch.float32)
    rate = operations_per_s(compute, lambda: next(times))
    assert rate == pytest.approx(2 * 2 * 512 * 1024 * 1024 / 0.2)
