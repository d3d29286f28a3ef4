"""Statistics of what the linears of a decoder layer multiply.

The error of an output of a linear is sum_j (w_j - q_j) x_j: over many tokens its square weighs each
column of the weight by E[x_j^2] (and by the products of columns, which are left out here). Rounding
that keeps this sum small keeps the model (`quant.rounding`); 8-bit kernels that round activations
too scale them by how large they become.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class InputStatistics:
    """Statistics of the inputs of one linear over the tokens measured, float32 `[in]` on the host.

    `mean_square`: E[x^2] of each feature; `largest`: the largest |x| seen.
    """

    mean_square: Tensor
    largest: Tensor

    def of_inputs(self, part: slice) -> InputStatistics:
        """Those of some of the inputs."""
        return InputStatistics(self.mean_square[part], self.largest[part])


@dataclass(frozen=True, eq=False)
class LayerImportance:
    """Statistics of one decoder layer.

    `inputs`: by the linear's name within the layer, such as `self_attn.q_proj`; linears of one
    input share an object. `keys`: the largest magnitude of each channel of the keys as the cache
    holds them, after any rotation, float32 `[kv_heads, head_dim]`.
    """

    inputs: Mapping[str, InputStatistics]
    keys: Tensor
