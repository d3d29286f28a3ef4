"""Whole steps with packed weights on tensor cores, beside attention and layers of our own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.messages import MicroBatch
from quant.backends.cuda.packed import CudaPacked
from quant.backends.cuda.products import KERNELS, SOURCE, TENSOR_KERNELS, CudaProducts
from quant.linear import QuantizedLinear
from quant.scheme import Processor
from tests.actors.configs import CONFIGS, LAYERS
from tests.actors.models import save_tiny, stages_of
from tests.actors.own_kernels import use_own_kernels
from tests.cuda_emulation import emulated, needs_compiler

pytestmark = [needs_compiler, pytest.mark.rare]

V100 = Processor(compute_capability=(7, 0))
BITS = (3, 8, 16, 3, 8)
PASSES = (
    ((0, 6), (0, 3), (0, 6)),  # prompts
    ((6, 1), (3, 4), (6, 1)),  # decode steps beside a part of a prompt
    ((7, 1), (7, 1), (7, 1)),
)


def products(bits: int, dtype: torch.dtype) -> CudaProducts:
    names = (*KERNELS, *TENSOR_KERNELS)
    kernels = emulated(SOURCE, names, BITS=bits, BFLOAT16=0, CAPABILITY=70)
    return CudaProducts(kernels, dtype, multiprocessors=2)


def states(folder: Path) -> list[Tensor]:
    """Hidden states after all layers but the last, in float16."""
    bounds = (0, LAYERS - 1, LAYERS)
    stage = stages_of(folder, bounds, 3, 20, BITS, "float16", V100)[0]
    held = {
        type(each.packed) for each in stage._model.modules() if isinstance(each, QuantizedLinear)
    }
    assert all(issubclass(each, CudaPacked) for each in held)
    assert len(held) == 2
    drawn = torch.Generator().manual_seed(2)
    found = []
    for requests in PASSES:
        starts, counts = (np.array(each) for each in zip(*requests, strict=True))
        batch = MicroBatch(np.arange(3), starts, counts, np.array([40, 0, 20]))
        hidden = stage.step(batch, torch.randint(3, 90, (int(counts.sum()),), generator=drawn))
        assert isinstance(hidden, Tensor)
        found.append(hidden.float())
    return found


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt_neox", "opt", "bloom"])
def test_a_stage_computes_what_it_does_with_decoded_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """Biases too, which the kernels add."""
    values = CONFIGS[name].to_dict() | {"hidden_size": 64}
    values |= {"n_head" if name == "bloom" else "num_attention_heads": 4}
    values |= {"opt": {"word_embed_proj_dim": 64}, "bloom": {}}.get(name, {"intermediate_size": 96})
    if "num_key_value_heads" in values:
        values["num_key_value_heads"] = 2
    values.pop("head_dim", None)
    save_tiny(tmp_path, type(CONFIGS[name]).from_dict(values))
    decoded = states(tmp_path)
    use_own_kernels(monkeypatch)
    ways: list[str] = []

    def kernels(packed: CudaPacked, dtype: torch.dtype) -> CudaProducts:
        own = products(packed.bits, dtype)
        ways.append(own.way_for(packed.codes, 3))
        return own

    monkeypatch.setattr(CudaPacked, "kernels", kernels)
    for one, other in zip(decoded, states(tmp_path), strict=True):
        assert torch.linalg.norm(one - other) <= 0.005 * torch.linalg.norm(one)
    assert set(ways) == {"tensor"}
