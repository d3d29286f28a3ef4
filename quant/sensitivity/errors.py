"""The parts of the Hessian-based indicator (LLM-PQ section 4.2): the Hessian of ||W X - Q(W) X||^2
with respect to a row of W is H = 2 X X^T.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from torch import Tensor

from quant.canonical import row_blocks
from quant.common.errors import CheckpointError
from quant.importance.statistics import InputStatistics, RunningStatistics
from quant.scheme import FULL_BITS
from quant.sensitivity.indicators import Matrix

Stored = Callable[[str, Tensor, int, InputStatistics], Tensor]
"""The float weight `[out, in]` that is multiplied with, of the linear of a name, its weight, a
bitwidth, and the statistics of its inputs."""


class ErrorStatistics:
    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self._inputs: dict[str, RunningStatistics] = {}

    def observe(self, source: str, inputs: Tensor) -> None:
        self._inputs.setdefault(source, RunningStatistics()).add(inputs)

    def omega(
        self, weights: Mapping[str, Tensor], source_of: Mapping[str, str], bitwidths: Sequence[int]
    ) -> list[float]:
        found = {source: running.result() for source, running in self._inputs.items()}
        total = np.zeros(len(bitwidths))
        for name, weight in weights.items():
            inputs = found[source_of[name]]
            energy = weighted_square(weight, None, inputs)
            if not energy:  # no input ever: nothing is lost
                continue
            for column, bits in enumerate(bitwidths):
                if bits == FULL_BITS:
                    continue
                held = self._stored(name, weight, bits, inputs)
                total[column] += weighted_square(weight, held, inputs) / energy
        if not np.isfinite(total).all():
            raise CheckpointError("weights are NaN or infinite; the checkpoint is damaged")
        return list(total.tolist())


def weighted_square(weight: Tensor, stored: Tensor | None, inputs: InputStatistics) -> float:
    """Sum of E[x_k^2] (w_jk - s_jk)^2 over `[out, in]`; `stored` None: of E[x_k^2] w_jk^2."""
    mean_square = inputs.mean_square.to(weight.device)
    total = 0.0
    rows, columns = weight.shape
    for block in row_blocks(rows, columns, weight.device):
        part = weight[block].float()
        if stored is not None:
            part = part - stored[block].to(part)
        total += float((part.square() @ mean_square).double().sum())
    return total


def in_nats(errors: Matrix, alone: Matrix) -> Matrix:
    """Scale errors `[L, K]` to nats a token by `alone`, the model with one layer alone at a
    bitwidth (NaN: not measured; the lowest is). Divergence grows with the square of small noise,
    and that of independent layers adds up.
    """
    lowest = errors[:, :1]
    gain = np.divide(alone[:, :1], lowest, out=np.zeros_like(lowest), where=lowest > 0)
    return np.where(np.isnan(alone), errors * gain, alone)
