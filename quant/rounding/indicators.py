"""The indicators of how much a decoder layer loses by quantization (LLM-PQ sections 4.2, 6.5).

Variance indicator (Theorem 1, Proposition 2), for layer i at b bits, summed over its linears o:

    omega[i, b] = sum_o  D_W * S_W(b)^2 * G(X)                                              (eq. 3)
    G(X) = Var[X] / 4                 rounding to nearest ("deterministic")
    G(X) = (E[X]^2 + Var[X]) / 6      stochastic rounding
    S_W(b) = (max W - min W) / (2^b - 1)       asymmetric
    S_W(b) = max |W| / (2^(b-1) - 1)           symmetric

E and Var are scalars over all tokens and features of the linear's input, as eq. 2 has them. 16 bit
loses nothing: 0.

D_W, "the dimension of the weights", is the number of weights, in x out: the proof (A.1) adds up the
noise of all scalar products, its ||W||^2 runs over the whole matrix, and the published prototype
gives the MLP's matrices four times the weight of attention's. Read as the variance of one output
element it would be the number of inputs. `docs/quantization.md` has what either makes of the demo
model. S_W is of the whole tensor; with `scales="group"` D_W * S_W^2 becomes the sum over the groups
that the quantizer really scales (`quant.rounding.canonical`) of weights times squared step.

The Hessian-based indicator to compare with is lambda_max(2 X X^T) * ||Q(W) - W||^2, summed over
linears: the Hessian of ||W X - Q(W) X||^2 with respect to a row of W is 2 X X^T. The random one
falls with rising bitwidth, otherwise noise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from scipy.linalg import blas, eigh_tridiagonal
from torch import Tensor

from quant.common.errors import CheckpointError
from quant.rounding.canonical import dequantize, quantize, row_blocks
from quant.rounding.importance import InputStatistics, RunningStatistics
from quant.scheme import FULL_BITS, VarianceForm

_BLOCK_VALUES = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Number of values summed at once in float32: 256 KB stay in a CPU core's second-level cache, and
so few lose some 1e-5 of their sum; a GPU waits for the host once for each block."""

_CANCELLED = 1e-3
"""Share of the sum of squares below which a second pass computes the variance around the mean."""

Matrix = npt.NDArray[np.float64]


class RunningMoments:
    """Mean and variance in float64 over float32 blocks, merged as in Chan, Golub and LeVeque
    (1979), so that a large mean cancels no digits.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0  # summed squared deviations from the mean

    @property
    def variance(self) -> float:
        return self._squares / self.count if self.count else 0.0

    def add(self, values: Tensor) -> None:
        at_once = _BLOCK_VALUES.get(values.device.type, _BLOCK_VALUES["cuda"])
        for block in values.reshape(-1).split(at_once):
            self._merge(block.numel(), *_mean_and_squares(block.float()))

    def _merge(self, count: int, mean: float, squares: float) -> None:
        total, apart = self.count + count, mean - self.mean
        self._squares += squares + apart * apart * self.count * count / total
        self.mean += apart * count / total
        self.count = total


def _mean_and_squares(block: Tensor) -> tuple[float, float]:
    count, total, raw = block.numel(), float(block.sum()), float(torch.dot(block, block))
    mean = total / count
    if not np.isfinite(raw):
        raise CheckpointError(
            "inputs of a linear are not finite or beyond 1e16; the weights are damaged, or the "
            "compute type overflows: use float32"
        )
    squares = raw - total * mean
    if squares < _CANCELLED * raw:
        shifted = block - mean
        rest = float(shifted.sum())
        squares = float(torch.dot(shifted, shifted)) - rest * rest / count
    return mean, max(0.0, squares)


def weight_noises(form: VarianceForm, weight: Tensor, bitwidths: Sequence[int]) -> list[float]:
    """D_W * S_W(b)^2 of `[out, in]` at each bitwidth, or its sum over groups; each size is read
    once.
    """
    squared_spans: dict[int, float] = {}
    noises = []
    for bits in bitwidths:
        group = form.group(weight.shape[0], weight.shape[1], bits)
        if group not in squared_spans:
            squared_spans[group] = _squared_spans(weight, group, form.scheme)
        noises.append(0.0 if bits == FULL_BITS else squared_spans[group] / form.steps(bits) ** 2)
    return noises


def _squared_spans(weight: Tensor, group: int, scheme: str) -> float:
    if group == weight.numel():
        low, high = torch.aminmax(weight)
    else:
        grouped = weight.reshape(-1, group)
        low, high = grouped.amin(-1), grouped.amax(-1)
    low, high = low.double(), high.double()
    spans = high - low if scheme == "asymmetric" else torch.maximum(low.abs(), high.abs())
    total = float(spans.square().sum()) * group
    if not np.isfinite(total):
        raise CheckpointError("weights are NaN or infinite; the checkpoint is damaged")
    return total


class LayerStatistics(ABC):
    """Gathers while a text passes through a layer; `source` is the first of an input's."""

    @abstractmethod
    def observe(self, source: str, inputs: Tensor) -> None: ...

    def omega(
        self, weights: Mapping[str, Tensor], source_of: Mapping[str, str], bitwidths: Sequence[int]
    ) -> list[float]:
        """Sum the indicator at each bitwidth over the linears of a layer."""
        total = np.zeros(len(bitwidths))
        for name, weight in weights.items():
            total += np.array(self._losses(name, weight, source_of[name], bitwidths))
        return list(total.tolist())

    @abstractmethod
    def _losses(
        self, name: str, weight: Tensor, source: str, bitwidths: Sequence[int]
    ) -> Sequence[float]: ...


class VarianceStatistics(LayerStatistics):
    def __init__(self, form: VarianceForm = VarianceForm()) -> None:
        self._form = form
        self._inputs: dict[str, RunningMoments] = {}

    def observe(self, source: str, inputs: Tensor) -> None:
        self._inputs.setdefault(source, RunningMoments()).add(inputs)

    def _losses(
        self, name: str, weight: Tensor, source: str, bitwidths: Sequence[int]
    ) -> list[float]:
        gain = self._form.gain(self._inputs[source].mean, self._inputs[source].variance)
        return [noise * gain for noise in weight_noises(self._form, weight, bitwidths)]


class HessianStatistics(LayerStatistics):
    """X X^T of every input, for the Hessian-based indicator; `[in, in]` float32 each."""

    def __init__(self) -> None:
        self._grams: dict[str, Gram] = {}
        self._curvatures: dict[str, float] = {}

    def observe(self, source: str, inputs: Tensor) -> None:
        self._grams.setdefault(source, Gram(inputs.shape[-1], inputs.device)).add(inputs)

    def _losses(
        self, name: str, weight: Tensor, source: str, bitwidths: Sequence[int]
    ) -> list[float]:
        if source not in self._curvatures:
            self._curvatures[source] = 2 * self._grams[source].top_eigenvalue()
        curvature = self._curvatures[source]
        return [
            0.0 if bits == FULL_BITS else squared_rounding_error(weight, bits) * curvature
            for bits in bitwidths
        ]


Indicator = Callable[[], LayerStatistics]
"""Makes the statistics of one layer."""


def random_indicator(layers: int, bitwidths: Sequence[int], seed: int) -> Matrix:
    """Draw `[layers, K]` that fall with the bitwidth (section 6.5), 0 at 16 bit."""
    draws = np.random.default_rng(seed).uniform(size=(layers, len(bitwidths)))
    falling = np.empty_like(draws)
    falling[:, np.argsort(bitwidths)] = -np.sort(-draws, axis=1)
    falling[:, [bits == FULL_BITS for bits in bitwidths]] = 0.0
    return falling


_TOLERANCE = 1e-3
"""Tolerance of the residual: eigenvalues were within 1e-5 of the exact ones; 1e-2 leaves 4e-3."""

_MOST_ITERATIONS = 200


class Gram:
    """The sum X X^T `[size, size]` in float32; on a CPU one triangle alone, by BLAS: a quarter of
    the time of torch's product (measured on an AMD EPYC with AVX-512, one thread).
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._sum = torch.zeros(size, size, dtype=torch.float32, device=device)

    def add(self, inputs: Tensor) -> None:
        rows = inputs.reshape(-1, inputs.shape[-1]).float()
        if rows.device.type != "cpu":
            self._sum.addmm_(rows.T, rows)
            return
        # A row-major matrix is, to BLAS, its transpose column by column: the triangle that is
        # upper there is the lower one here. Neither argument is copied.
        kept = blas.ssyrk(1.0, rows.numpy().T, beta=1.0, c=self._sum.numpy().T, overwrite_c=True)
        assert np.shares_memory(kept, self._sum.numpy()), "the routine worked on a copy"

    def matrix(self) -> Tensor:
        if self._sum.device.type != "cpu":
            return self._sum
        lower = torch.tril(self._sum, -1)
        return torch.tril(self._sum).add_(lower.T)

    def top_eigenvalue(self) -> float:
        if not bool(torch.isfinite(self._sum.diagonal()).all()):
            raise CheckpointError(
                "inputs of a linear are not finite; the weights are damaged, or the compute type "
                "overflows: use float32"
            )
        return top_eigenvalue(self.matrix())


def top_eigenvalue(matrix: Tensor, tolerance: float = _TOLERANCE) -> float:
    """Power iteration that keeps all its vectors (Lanczos with full reorthogonalisation, Golub and
    Van Loan, section 10.1), until the residual is within `tolerance` of the value; seeded.
    """
    size, generator = len(matrix), torch.Generator().manual_seed(0)
    if not bool(matrix.diagonal().any()):
        return 0.0
    vector = torch.randn(size, generator=generator).to(matrix)
    most = min(size, _MOST_ITERATIONS)
    basis = torch.empty(most, size, dtype=matrix.dtype, device=matrix.device)
    diagonal: list[float] = []
    beside: list[float] = []
    value = 0.0
    for step in range(most):
        basis[step] = vector / vector.norm()
        vector = torch.mv(matrix, basis[step])
        diagonal.append(float(vector @ basis[step]))
        known = basis[: step + 1]
        for _ in range(2):  # once would leave rounding errors that grow
            vector -= torch.mv(known.T, torch.mv(known, vector))
        last = len(diagonal) - 1
        values, vectors = eigh_tridiagonal(diagonal, beside, select="i", select_range=(last, last))
        value, beyond = float(values[0]), float(vector.norm())
        if beyond * abs(float(vectors[-1, 0])) <= tolerance * value:
            break
        beside.append(beyond)
    return max(0.0, value)


def squared_rounding_error(weight: Tensor, bits: int) -> float:
    """||Q(W) - W||^2 of the canonical quantizer, in blocks that stay in a core's cache."""
    total = 0.0
    rows, columns = weight.shape
    for block in row_blocks(rows, columns, weight.device):
        part = weight[block]
        apart = dequantize(quantize(part, bits)).sub_(part)
        total += float(apart.square_().sum())
    return total


Stored = Callable[[str, Tensor, int, InputStatistics], Tensor]
"""The float weight `[out, in]` that is multiplied with, of the linear of a name, its weight, a
bitwidth, and the statistics of its inputs."""


class ErrorStatistics(LayerStatistics):
    """The weighted error of the weights that are really stored, W `[out, in]` as Q_b(W):

        E[i, b] = sum_o  sum_jk E[x_k^2] (W_jk - Q_b(W)_jk)^2 / sum_jk E[x_k^2] W_jk^2

    The numerator is the expected square of what rounding adds to the outputs for one token, with
    the products of different columns left out; the denominator is that of the outputs, so that
    linears with large and with small outputs count alike. Unlike Proposition 2 it sees the groups,
    the codes and the statistics by which the rounding has weighed the columns.

    How far noise of a layer moves the predictions cannot be told from the layer: on SmolLM2-135M
    none of its norms and energies ranked the layers. `in_nats` takes it from what was measured.
    """

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self._inputs: dict[str, RunningStatistics] = {}

    def observe(self, source: str, inputs: Tensor) -> None:
        self._inputs.setdefault(source, RunningStatistics()).add(inputs)

    def _losses(
        self, name: str, weight: Tensor, source: str, bitwidths: Sequence[int]
    ) -> list[float]:
        inputs = self._inputs[source].result()
        energy = weighted_square(weight, None, inputs)
        if not energy:  # no input ever: nothing is lost
            return [0.0] * len(bitwidths)
        losses = [
            0.0
            if bits == FULL_BITS
            else weighted_square(weight, self._stored(name, weight, bits, inputs), inputs) / energy
            for bits in bitwidths
        ]
        if not np.isfinite(losses).all():
            raise CheckpointError("weights are NaN or infinite; the checkpoint is damaged")
        return losses


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
