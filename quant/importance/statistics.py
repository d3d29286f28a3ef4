"""Statistics of what the linears of a decoder layer multiply: the square of an output's error,
sum_j (w_j - q_j) x_j, weighs each column by E[x_j^2] (products of columns left out); 8-bit kernels
scale activations by how large they become.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quant.common.errors import CheckpointError


@dataclass(frozen=True, eq=False)
class InputStatistics:
    """Float32 `[in]` on the host: `mean_square` E[x^2]; `largest` |x| seen."""

    mean_square: Tensor
    largest: Tensor

    def of_inputs(self, part: slice) -> InputStatistics:
        return InputStatistics(self.mean_square[part], self.largest[part])


@dataclass(frozen=True, eq=False)
class LayerImportance:
    """`inputs` by the linear's name; linears of one input share an object. `keys`: the largest
    magnitude of each channel as cached, after rotation, float32 `[kv_heads, head_dim]`.
    """

    inputs: Mapping[str, InputStatistics]
    keys: Tensor


class RunningStatistics:
    """Sums of a pass in float32, of all passes in float64."""

    def __init__(self) -> None:
        self._squares = torch.zeros((), dtype=torch.float64)
        self._largest = torch.zeros(())
        self._vectors = 0

    def add(self, vectors: Tensor) -> None:
        rows = vectors.detach().reshape(-1, vectors.shape[-1]).float()
        self._squares = self._squares + rows.square().sum(0).cpu().double()
        self._largest = torch.maximum(self._largest, rows.abs().amax(0).cpu())
        self._vectors += len(rows)

    def result(self) -> InputStatistics:
        mean_square = (self._squares / max(1, self._vectors)).float()
        if not self._vectors or not bool(mean_square.isfinite().all()):
            raise CheckpointError(
                "the values that it multiplies are not finite in the type computed in; the weights "
                "are damaged, or the model needs another dtype (or rounding nearest, which does "
                "not look at them)"
            )
        return InputStatistics(mean_square, self._largest)


class LinearInputs:
    """Statistics by name while `watching`; linears called in turn with one tensor share theirs."""

    def __init__(self) -> None:
        self._running: dict[str, RunningStatistics] = {}
        self._source_of: dict[str, str] = {}
        self._last: tuple[Tensor | None, str] = (None, "")  # kept: no other takes its place

    @contextmanager
    def watching(self, linears: Mapping[str, nn.Module]) -> Iterator[None]:
        handles = [
            linear.register_forward_pre_hook(
                lambda _, inputs, name=name: self._see(name, inputs[0])
            )
            for name, linear in linears.items()
        ]
        try:
            yield
        finally:
            self._last = (None, "")
            for handle in handles:
                handle.remove()

    def _see(self, name: str, inputs: Tensor) -> None:
        if inputs is not self._last[0]:
            self._last = (inputs, name)
            self._running.setdefault(name, RunningStatistics()).add(inputs)
        self._source_of[name] = self._last[1]

    def results(self) -> dict[str, InputStatistics]:
        found: dict[str, InputStatistics] = {}
        for name, running in self._running.items():
            try:
                found[name] = running.result()
            except CheckpointError as error:
                raise CheckpointError(f"{name}: {error}") from error
        return {name: found[source] for name, source in self._source_of.items()}


class LargestKeys:
    def __init__(self) -> None:
        self._largest: Tensor | None = None

    def see(self, keys: Tensor) -> None:
        own = keys.detach().float().abs().amax(0).cpu()
        self._largest = own if self._largest is None else torch.maximum(self._largest, own)

    def result(self) -> Tensor:
        if self._largest is None or not bool(self._largest.isfinite().all()):
            raise CheckpointError("its keys are not finite; the weights are damaged")
        return self._largest
