"""The GPU's kernels for decode steps of the gated delta rule, on a CPU behind the emulator, against
float64.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.attention.delta import rule as delta_rule
from actors.attention.delta.rule import KERNELS, SOURCE, DeltaKernels, compiled_kernels
from actors.attention.delta.states import ConstantStates, DeltaWeights, Projected
from actors.attention.kv_cache import CacheForm, CacheShape, KVCache
from planner.model.layer_parts import DeltaMixer
from quant.backends.cuda.driver import CudaError, compile_cuda, text_of
from tests.actors.attention.delta.test_delta_states import (
    CPU,
    LAYER,
    LENGTHS,
    mixed_in_parts,
    projected,
    wanted_of,
    weights_of,
)
from tests.cuda_emulation import check_machine_code, emulated, needs_compiler, needs_nvrtc

HALF, BFLOAT = torch.float16, torch.bfloat16
NARROW = DeltaMixer(key_heads=2, value_heads=4, key_dim=8, value_dim=40, conv_width=4)
WIDE = DeltaMixer(key_heads=1, value_heads=3, key_dim=128, value_dim=128, conv_width=4)
ODD = DeltaMixer(key_heads=2, value_heads=2, key_dim=36, value_dim=12, conv_width=3)


def definitions_of(sizes: DeltaMixer, dtype: torch.dtype) -> dict[str, int]:
    return {
        "BFLOAT16": int(dtype == BFLOAT),
        "KEY_DIM": sizes.key_dim,
        "VALUE_DIM": sizes.value_dim,
        "CONV_WIDTH": sizes.conv_width,
    }


def kernels_of(sizes: DeltaMixer, dtype: torch.dtype, _: object = None) -> DeltaKernels:
    return DeltaKernels(emulated(SOURCE, KERNELS, **definitions_of(sizes, dtype)))


def of_type(new: Projected, dtype: torch.dtype) -> Projected:
    return Projected(*(each.to(dtype) for each in new))


def states_of(sizes: DeltaMixer, slots: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return ConstantStates([0], sizes, slots, dtype, CPU).of_layer(0)


@needs_compiler
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        *((NARROW, HALF), (WIDE, BFLOAT), (ODD, HALF)),
        *(
            pytest.param(*case, marks=pytest.mark.rare)
            for case in ((NARROW, BFLOAT), (WIDE, HALF), (ODD, BFLOAT))
        ),
    ],
)
def test_steps_are_those_of_float64(sizes: DeltaMixer, dtype: torch.dtype) -> None:
    """Of requests in slots that lie apart, from nothing on; what others hold stays as it is."""
    kernels, weights = kernels_of(sizes, dtype), weights_of(sizes, dtype)
    state, inputs = states_of(sizes, 5, dtype)
    state[[1, 2]], inputs[[1, 2]] = 7.0, 7.0
    slots = torch.tensor([4, 0, 3])
    texts = [of_type(projected(6, seed, sizes), dtype) for seed in range(3)]
    found = []
    for token in range(6):
        new = Projected(
            *(torch.stack(rows) for rows in zip(*[t.of(token) for t in texts], strict=True))
        )
        found.append(kernels.step(new, weights, (state, inputs), slots))
    for row, text in enumerate(texts):
        wanted = torch.from_numpy(wanted_of(text, weights))
        own = torch.stack([each[row] for each in found]).double()
        assert (own - wanted).norm() < 4 * torch.finfo(dtype).eps * wanted.norm()
        assert torch.equal(inputs[slots[row]], text.mixed[-inputs.shape[1] :])
    assert (state[[1, 2]] == 7).all()
    assert (inputs[[1, 2]] == 7).all()


@needs_compiler
def test_micro_batches_of_both_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps by the kernels, prompts and their parts by PyTorch's operations."""
    monkeypatch.setattr(delta_rule, "can_run", lambda device: False)
    monkeypatch.setattr(delta_rule, "delta_kernels", kernels_of)
    sizes = NARROW
    states = ConstantStates([LAYER], sizes, len(LENGTHS), BFLOAT, CPU)
    cache = KVCache(range(2, 4), CacheShape(64, 1, 8), CacheForm(BFLOAT, CPU), states=states)
    weights = weights_of(sizes, BFLOAT)
    texts = [of_type(projected(length, i, sizes), BFLOAT) for i, length in enumerate(LENGTHS)]
    for text, found in zip(
        texts, mixed_in_parts(cache, [3, 0, 4, 1, 2], texts, weights), strict=True
    ):
        wanted = wanted_of(text, weights)
        assert np.linalg.norm(found - wanted) < 0.01 * np.linalg.norm(wanted)


@needs_compiler
def test_the_self_test_finds_what_is_wrong() -> None:
    kernels = kernels_of(NARROW, HALF)
    assert delta_rule.self_test(kernels, NARROW, HALF, CPU) is None

    class Wrong(DeltaKernels):
        def step(
            self, new: Projected, weights: DeltaWeights, held: tuple[Tensor, Tensor], slots: Tensor
        ) -> Tensor:
            slower = replace(weights, rates=weights.rates * 0.9)
            return super().step(new, slower, held, slots)

    complaint = delta_rule.self_test(Wrong(kernels.kernels), NARROW, HALF, CPU)
    assert complaint is not None
    assert "is off by" in complaint


@needs_compiler
def test_the_order_of_threads_and_blocks_is_all_one() -> None:
    kernels, weights = kernels_of(WIDE, BFLOAT), weights_of(WIDE, BFLOAT)
    found = []
    for number in (0, 5, 11):
        kernels.kernels.driver.seed(ctypes.c_uint(number))
        held = states_of(WIDE, 2, BFLOAT)
        new = of_type(projected(2, 1, WIDE), BFLOAT)
        outs = [kernels.step(new, weights, held, torch.tensor([1, 0])) for _ in range(2)]
        found.append([*outs, *held])
    kernels.kernels.driver.seed(ctypes.c_uint(0))
    for one, other in pairwise(found):
        assert all(map(torch.equal, one, other))


@needs_nvrtc
@pytest.mark.parametrize(
    "capability",
    [
        (7, 0),
        *(
            pytest.param(each, marks=pytest.mark.rare)
            for each in ((6, 0), (6, 1), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
        ),
    ],
)
def test_compiles_for_every_gpu_without_spills(capability: tuple[int, int]) -> None:
    dtype = BFLOAT if capability >= (8, 0) else HALF
    check_machine_code(SOURCE, KERNELS, capability, **definitions_of(WIDE, dtype))


@needs_nvrtc
def test_sizes_that_it_is_not_written_for() -> None:
    wrong = definitions_of(replace(WIDE, key_dim=130), HALF)
    with pytest.raises(CudaError, match="multiples of 4, at most 128"):
        compile_cuda(text_of(SOURCE), (7, 0), wrong)
    gpu = torch.device("cuda")
    for sizes in (replace(WIDE, key_dim=256), replace(WIDE, value_dim=6)):
        assert compiled_kernels(sizes, HALF, gpu) is None
    assert compiled_kernels(WIDE, torch.float32, gpu) is None
    assert compiled_kernels(WIDE, HALF, CPU) is None
