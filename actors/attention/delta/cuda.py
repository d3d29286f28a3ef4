"""Decode steps of the gated delta rule on GPUs by two kernels of our own: the convolution, and all
else between a mixer's projections.

By PyTorch's operations a step starts 60 kernels a layer and copies the states of its requests
several times; here each is read and written once, where it lies.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from actors.attention.delta.states import DeltaWeights, Projected
from planner.model.layer_parts import DeltaMixer
from quant.backends.cuda_driver import THREADS, Kernels, kernels_for

SOURCE = Path(__file__).with_name("delta.cu")
KERNELS = ("convolve", "delta_step")


class Heads(ctypes.Structure):
    """The struct of that name in the source."""

    _fields_ = (("keys", ctypes.c_uint), ("values", ctypes.c_uint), ("eps", ctypes.c_float))


@dataclass(frozen=True)
class DeltaKernels:
    """The compiled kernels for one size of heads and type."""

    kernels: Kernels

    def step(
        self, new: Projected, weights: DeltaWeights, held: tuple[Tensor, Tensor], slots: Tensor
    ) -> Tensor:
        """Go on with the states and the inputs of a layer, in `slots` `[rows]` of `held`, by one
        token each; returns what the norm makes of the results, `[rows, value_width]`. A row in
        slot -1 is nobody's.
        """
        state, inputs = held
        sizes, rows = weights.sizes, len(slots)
        mixed, gate, beta, decay = (each.contiguous() for each in new)
        convolved = torch.empty(mixed.shape, dtype=torch.float32, device=mixed.device)
        channels = sizes.conv_channels
        self.kernels.launch(
            "convolve", rows * -(-channels // THREADS),
            mixed, weights.convolution, slots, inputs, convolved, channels,
        )  # fmt: skip
        out = torch.empty_like(gate)
        self.kernels.launch(
            "delta_step", rows * sizes.value_heads,
            convolved, gate, beta, decay, weights.rates, weights.biases, weights.norm_weight,
            slots, state, out, Heads(sizes.key_heads, sizes.value_heads, weights.norm_eps),
        )  # fmt: skip
        return out


def compiled_kernels(
    sizes: DeltaMixer, dtype: torch.dtype, device: torch.device
) -> DeltaKernels | None:
    """The kernels for a mixer of these sizes; None on a CPU, in float32 and for other sizes.

    Raises CudaError where they cannot be compiled.
    """
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return None
    if not sizes.has_step_kernel:
        return None
    definitions = {"KEY_DIM": sizes.key_dim, "VALUE_DIM": sizes.value_dim}
    definitions["CONV_WIDTH"] = sizes.conv_width
    return DeltaKernels(kernels_for(SOURCE, KERNELS, dtype, device, **definitions))
