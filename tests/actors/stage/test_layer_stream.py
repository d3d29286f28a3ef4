"""Layers streamed one at a time against transformers' forward of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actors.stage.layer_stream import LayerStream, compute_on, stream_layers
from quant.common.errors import CheckpointError, SpecError
from quant.loading.emulated_kernels import Compute, LayerScheme
from quant.rounding.canonical import dequantize, quantize
from quant.scheme import Processor
from tests.actors.configs import CONFIGS, EVERY_CONFIG, LAYERS, STATE_CONFIGS, VOCABULARY
from tests.actors.models import save_tiny

CPU = torch.device("cpu")
IN_FLOAT32 = compute_on(CPU, torch.float32)


def tokens(sequences: int = 5, length: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, VOCABULARY, (sequences, length), generator=generator)


def whole(model: Any, token_ids: Tensor) -> Any:
    """transformers' logits and hidden states: `[i]` goes into layer i."""
    with torch.no_grad():
        return model(input_ids=token_ids, output_hidden_states=True, use_cache=False)


@pytest.mark.parametrize(
    ("name", "sequences_at_once"),
    [
        *((name, 2) for name in CONFIGS),
        *(("bloom", 1), ("llama", 5), ("granite", 5), ("qwen3_5", 2)),
    ],
)
def test_hidden_states_and_logits_are_transformers(
    name: str, sequences_at_once: int, tmp_path: Path
) -> None:
    model, token_ids = save_tiny(tmp_path, (EVERY_CONFIG | STATE_CONFIGS)[name]), tokens()
    expected = whole(model, token_ids)
    stream = LayerStream(tmp_path, IN_FLOAT32, tokens_at_once=sequences_at_once * 12)
    for layer in stream_layers(stream, token_ids):
        torch.testing.assert_close(
            layer.hidden, expected.hidden_states[layer.index], rtol=1e-5, atol=1e-5
        )
    tail = stream.tail()
    logits = tail.logits(tail.normed(layer.hidden))
    assert layer.index == LAYERS - 1
    torch.testing.assert_close(logits, expected.logits, rtol=1e-5, atol=1e-5)


def test_hooks_see_every_token_once_and_in_order(tmp_path: Path) -> None:
    model, token_ids = save_tiny(tmp_path, CONFIGS["llama"]), tokens()
    seen: list[Tensor] = []
    wanted: list[Tensor] = []
    target = model.model.layers[2].mlp.down_proj
    target.register_forward_pre_hook(lambda _, inputs: wanted.append(inputs[0]))
    whole(model, token_ids)
    for layer in stream_layers(LayerStream(tmp_path, IN_FLOAT32, tokens_at_once=24), token_ids):
        if layer.index == 2:
            before = layer.hidden.clone()
            handle = layer.linears["mlp.down_proj"].register_forward_pre_hook(
                lambda _, inputs: seen.append(inputs[0])
            )
            layer.observe()
            handle.remove()
            assert torch.equal(layer.hidden, before)
    torch.testing.assert_close(torch.cat(seen, dim=1)[0], wanted[0].flatten(0, 1))


@pytest.mark.parametrize("by_hand", [False, True])
def test_weights_replaced_in_the_loop_are_what_the_text_passes_through(
    by_hand: bool, tmp_path: Path
) -> None:
    model, token_ids = save_tiny(tmp_path, CONFIGS["opt"]), tokens()

    def halve(linear: nn.Linear) -> None:
        with torch.no_grad():
            linear.weight.mul_(0.5)

    for layer in model.model.decoder.layers:
        halve(layer.fc1)
    expected = whole(model, token_ids)
    for streamed in stream_layers(LayerStream(tmp_path, IN_FLOAT32), token_ids):
        streamed.observe()
        halve(streamed.linears["fc1"])
        if by_hand:
            streamed.advance()
    if not by_hand:
        assert streamed.advanced
    tail = LayerStream(tmp_path, IN_FLOAT32).tail()
    logits = tail.logits(tail.normed(streamed.hidden))
    torch.testing.assert_close(logits, expected.logits, rtol=1e-5, atol=1e-5)


def test_mixed_bits_equal_the_model_with_rounded_weights(tmp_path: Path) -> None:
    bits = (4, 16, 3, 8, 4)
    model, token_ids = save_tiny(tmp_path, CONFIGS["llama"]), tokens()
    for decoder_layer, layer_bits in zip(model.model.layers, bits, strict=True):
        for linear in (m for m in decoder_layer.modules() if isinstance(m, nn.Linear)):
            if layer_bits < 16:
                linear.weight.data = dequantize(quantize(linear.weight.data, layer_bits))
    expected = whole(model, token_ids)
    schemes = [LayerScheme(b) for b in bits]
    compute = Compute(CPU, torch.float32, Processor(instruction_sets=frozenset()))
    stream = LayerStream(tmp_path, compute)
    *_, layer = stream_layers(stream, token_ids, schemes)
    tail = stream.tail()
    logits = tail.logits(tail.normed(layer.hidden))
    torch.testing.assert_close(logits, expected.logits, rtol=1e-5, atol=1e-5)


def test_no_layer_outlives_its_turn(tmp_path: Path) -> None:
    save_tiny(tmp_path, CONFIGS["llama"])
    stream = LayerStream(tmp_path, IN_FLOAT32)
    for _ in stream_layers(stream, tokens()):
        held = [
            name
            for name, parameter in stream._middle.named_parameters()
            if not parameter.is_meta and "layers" in name
        ]
        assert held == []


REFUSED = {
    "too long": (torch.zeros(1, 129, dtype=torch.int64), "128 positions"),
    "beyond the vocabulary": (torch.full((2, 4), VOCABULARY), f"vocabulary has {VOCABULARY}"),
    "negative": (torch.full((2, 4), -1), "-1"),
    "no sequences": (torch.zeros(0, 4, dtype=torch.int64), "at least one token"),
    "flat": (torch.zeros(4, dtype=torch.int64), "sequences, length"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_token_ids_that_cannot_run(name: str, tmp_path: Path) -> None:
    token_ids, message = REFUSED[name]
    save_tiny(tmp_path, CONFIGS["llama"])
    with pytest.raises(SpecError, match=message):
        next(stream_layers(LayerStream(tmp_path, IN_FLOAT32), token_ids))


def test_bits_that_are_not_one_a_layer(tmp_path: Path) -> None:
    save_tiny(tmp_path, CONFIGS["llama"])
    stream = LayerStream(tmp_path, IN_FLOAT32)
    with pytest.raises(SpecError, match=f"4 bitwidths for {LAYERS} layers"):
        next(stream_layers(stream, tokens(), [LayerScheme()] * 4))


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, CONFIGS["llama"])
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight[2, 5] = float("nan")
    model.save_pretrained(tmp_path)
    stream = LayerStream(tmp_path, IN_FLOAT32)
    with pytest.raises(CheckpointError, match=r"layers\.3\.mlp\.up_proj\.weight"):
        list(stream_layers(stream, tokens()))
