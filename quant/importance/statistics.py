"""Statistics of what the linears of a decoder layer multiply.

The error of an output of a linear is sum_j (w_j - q_j) x_j: over many tokens its square weighs each
column of the weight by E[x_j^2] (and by the products of columns, which are left out here). Rounding
that keeps this sum small keeps the model (`quant.rounding`); 8-bit kernels that round activations
too scale them by how large they become.
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


class RunningStatistics:
    """Statistics of one stream of vectors: sums of a pass in float32, of all passes in float64."""

    def __init__(self) -> None:
        self._squares = torch.zeros((), dtype=torch.float64)
        self._largest = torch.zeros(())
        self._vectors = 0

    def add(self, vectors: Tensor) -> None:
        """Take in `vectors` `[..., width]` of any float type."""
        rows = vectors.detach().reshape(-1, vectors.shape[-1]).float()
        self._squares = self._squares + rows.square().sum(0).cpu().double()
        self._largest = torch.maximum(self._largest, rows.abs().amax(0).cpu())
        self._vectors += len(rows)

    def result(self) -> InputStatistics:
        """The statistics so far; CheckpointError where they are not finite, or nothing was seen."""
        mean_square = (self._squares / max(1, self._vectors)).float()
        if not self._vectors or not bool(mean_square.isfinite().all()):
            raise CheckpointError(
                "the values that it multiplies are not finite in the type computed in; the weights "
                "are damaged, or the model needs another dtype (or rounding nearest, which does "
                "not look at them)"
            )
        return InputStatistics(mean_square, self._largest)


class LinearInputs:
    """Statistics of the inputs of a layer's linears, by name, while `watching` is open.

    Linears that are called one after another with the same tensor share theirs.
    """

    def __init__(self) -> None:
        self._running: dict[str, RunningStatistics] = {}
        self._source_of: dict[str, str] = {}
        self._last: tuple[Tensor | None, str] = (None, "")  # kept: no other takes its place

    @contextmanager
    def watching(self, linears: Mapping[str, nn.Module]) -> Iterator[None]:
        """Look at what `linears` get."""
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
        """Statistics by the linear's name; CheckpointError where they are not finite."""
        found: dict[str, InputStatistics] = {}
        for name, running in self._running.items():
            try:
                found[name] = running.result()
            except CheckpointError as error:
                raise CheckpointError(f"{name}: {error}") from error
        return {name: found[source] for name, source in self._source_of.items()}


class LargestKeys:
    """The largest magnitude of each channel of the keys that a cache is given."""

    def __init__(self) -> None:
        self._largest: Tensor | None = None

    def see(self, keys: Tensor) -> None:
        """Take in `keys` `[tokens, kv_heads, head_dim]`."""
        own = keys.detach().float().abs().amax(0).cpu()
        self._largest = own if self._largest is None else torch.maximum(self._largest, own)

    def result(self) -> Tensor:
        """Float32 `[kv_heads, head_dim]`; CheckpointError where it is not finite."""
        if self._largest is None or not bool(self._largest.isfinite().all()):
            raise CheckpointError("its keys are not finite; the weights are damaged")
        return self._largest
