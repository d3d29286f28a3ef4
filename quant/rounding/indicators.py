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

Experts e that a token asks with weights w_e add sum_e w_e (W_e - Q(W_e)) x_e to what the layer
gives, whose square is at most sum_e c_e |(W_e - Q(W_e)) x_e|^2 with c_e = |w_e| sum_f |w_f|,
whatever their errors have in common. So the inputs of each expert count c_e: copies of one MLP lose
what it loses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quant.common.errors import CheckpointError
from quant.devices import row_blocks
from quant.rounding.canonical import dequantize, quantize
from quant.rounding.gram import Gram
from quant.rounding.importance import InputStatistics, RunningStatistics
from quant.scheme import FULL_BITS, VarianceForm

_BLOCK_VALUES = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Number of values summed at once in float32: 256 KB stay in a CPU core's second-level cache, and
so few lose some 1e-5 of their sum; a GPU waits for the host once for each block."""

_CANCELLED = 1e-3
"""Share of the sum of squares below which a second pass computes the variance around the mean."""

_NOT_FINITE = (
    "inputs of a linear are not finite or beyond 1e16; the weights are damaged, or the compute "
    "type overflows: use float32"
)

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class AskedWeight:
    """An expert's `weight` `[out, in]`, whose inputs were observed as `source` while `tokens`
    passed its layer. `parts`: the rows of each projection, by its name, which all experts share.
    `rounded_by`: the statistics by which stages round it, if any.
    """

    source: str
    weight: Tensor
    parts: Mapping[str, slice]
    tokens: int
    rounded_by: InputStatistics | None


class RunningMoments:
    """Mean and variance in float64 over float32 blocks, merged as in Chan, Golub and LeVeque
    (1979), so that a large mean cancels no digits.
    """

    def __init__(self) -> None:
        self.count = 0.0
        self.mean = 0.0
        self._squares = 0.0  # summed squared deviations from the mean

    @property
    def variance(self) -> float:
        return self._squares / self.count if self.count else 0.0

    def add(self, values: Tensor) -> None:
        at_once = _BLOCK_VALUES.get(values.device.type, _BLOCK_VALUES["cuda"])
        for block in values.reshape(-1).split(at_once):
            self._merge(block.numel(), *_mean_and_squares(block.float()))

    def add_counted(self, rows: Tensor, counted: Tensor) -> None:
        """Add the values of `rows` `[asked, in]`, each as often as `counted` `[asked]` says."""
        values, weights = rows.double(), counted.double().unsqueeze(-1)
        count = float(weights.sum()) * rows.shape[-1]
        if not count:
            return
        mean = float((weights * values).sum()) / count
        squares = float((weights * (values - mean).square()).sum())
        if not np.isfinite(squares):
            raise CheckpointError(_NOT_FINITE)
        self._merge(count, mean, squares)

    def _merge(self, count: float, mean: float, squares: float) -> None:
        total, apart = self.count + count, mean - self.mean
        self._squares += squares + apart * apart * self.count * count / total
        self.mean += apart * count / total
        self.count = total


def _mean_and_squares(block: Tensor) -> tuple[float, float]:
    count, total, raw = block.numel(), float(block.sum()), float(torch.dot(block, block))
    mean = total / count
    if not np.isfinite(raw):
        raise CheckpointError(_NOT_FINITE)
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

    gathers_squares = False
    """Whether a matrix `[in, in]` is kept of every source until `settle`."""

    @abstractmethod
    def observe(self, source: str, inputs: Tensor) -> None: ...

    def observe_asked(self, source: str, rows: Tensor, counted: Tensor) -> None:
        """Take inputs `[asked, in]` of one expert's weight, and how much each counts, `[asked]`."""
        self.observe(source, rows.float() * counted.float().sqrt().unsqueeze(-1))

    def settle(self) -> None:  # noqa: B027  (most keep little)
        """Let go of what the sources seen until now no longer need; they are seen no more."""

    def omega_of_experts(
        self, experts: Iterable[AskedWeight], bitwidths: Sequence[int]
    ) -> list[float]:
        """Sum the indicator at each bitwidth over the weights of experts that were asked."""
        total = np.zeros(len(bitwidths))
        for own in experts:
            for name, rows in own.parts.items():
                part = own.weight[rows]
                share = self._asked_share(own)
                total += share * np.array(self._losses(name, part, own.source, bitwidths))
        return list(total.tolist())

    def _asked_share(self, own: AskedWeight) -> float:
        """By what the losses of an expert count, beyond what its inputs tell."""
        return 1.0

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

    def observe_asked(self, source: str, rows: Tensor, counted: Tensor) -> None:
        self._inputs.setdefault(source, RunningMoments()).add_counted(rows, counted)

    def _asked_share(self, own: AskedWeight) -> float:
        return self._inputs[own.source].count / (own.weight.shape[1] * own.tokens)

    def _losses(
        self, name: str, weight: Tensor, source: str, bitwidths: Sequence[int]
    ) -> list[float]:
        gain = self._form.gain(self._inputs[source].mean, self._inputs[source].variance)
        return [noise * gain for noise in weight_noises(self._form, weight, bitwidths)]


class HessianStatistics(LayerStatistics):
    """X X^T of every input, for the Hessian-based indicator; `[in, in]` float32 each."""

    gathers_squares = True

    def __init__(self) -> None:
        self._grams: dict[str, Gram] = {}
        self._curvatures: dict[str, float] = {}

    def observe(self, source: str, inputs: Tensor) -> None:
        self._grams.setdefault(source, Gram(inputs.shape[-1], inputs.device)).add(inputs)

    def settle(self) -> None:
        for source, gram in self._grams.items():
            self._curvatures[source] = 2 * gram.top_eigenvalue()
        self._grams.clear()

    def _losses(
        self, name: str, weight: Tensor, source: str, bitwidths: Sequence[int]
    ) -> list[float]:
        self.settle()
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

    def omega_of_experts(
        self, experts: Iterable[AskedWeight], bitwidths: Sequence[int]
    ) -> list[float]:
        """Sum as of linears, each of which is one projection of all experts together."""
        lost: dict[str, Matrix] = defaultdict(lambda: np.zeros(len(bitwidths)))
        energy: dict[str, float] = defaultdict(float)
        for own in experts:
            running = self._inputs[own.source]
            inputs = running.result()
            stored = [
                own.weight
                if bits == FULL_BITS
                else self._stored(own.source, own.weight, bits, own.rounded_by or inputs)
                for bits in bitwidths
            ]
            for name, rows in own.parts.items():
                part = own.weight[rows]
                energy[name] += running.vectors * weighted_square(part, None, inputs)
                lost[name] += running.vectors * np.array(
                    [weighted_square(part, each[rows], inputs) for each in stored]
                )
        total = np.zeros(len(bitwidths))
        for name in (name for name in lost if energy[name]):
            total += lost[name] / energy[name]
        if not np.isfinite(total).all():
            raise CheckpointError("weights are NaN or infinite; the checkpoint is damaged")
        return list(total.tolist())

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
    """Scale errors `[..., K]` to nats a token by `alone`, the model with that part alone at a
    bitwidth (NaN: not measured; the lowest is). Divergence grows with the square of small noise,
    and that of independent parts adds up.
    """
    lowest = errors[..., :1]
    gain = np.divide(alone[..., :1], lowest, out=np.zeros_like(lowest), where=lowest > 0)
    return np.where(np.isnan(alone), errors * gain, alone)
