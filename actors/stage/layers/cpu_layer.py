"""What a decoder layer computes between its products, on CPUs by compiled loops: each reads and
writes its numbers once, where transformers' modules pass over them for every operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from actors.attention.addresses import Scoring
from actors.attention.cpu import power_of_e
from actors.attention.ragged import NewTokens, RaggedContext, attend
from actors.stage.layers.cuda_layer import Norm, Turning
from quant.numba_loops import (
    compiled_loop,
    has_numba,
    matrix_at,
    narrowing,
    torch_threads,
    widening,
)

_LEAST_SHARED = 1 << 15
"""Numbers from which several threads are sooner done: waking them takes some microseconds."""

_SILU = ("SiLUActivation", "SiLU")


@dataclass(frozen=True)
class LayerLoops:
    """The loops for layers of one `dtype`."""

    dtype: torch.dtype
    device: ClassVar[torch.device] = torch.device("cpu")
    reads_tables: ClassVar[bool] = False

    def add(
        self, residual: Tensor, added: Sequence[Tensor], norms: Sequence[Norm]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As `LayerKernels.add`."""
        total, first = residual.contiguous(), added[0] if added else None
        if len(added) > 1:
            first = added[0] + added[1]
        outs = []
        for norm in norms or (None,):
            total, out = self._add(total, first, norm)
            first = None
            outs.append(out)
        return total, tuple(out for out in outs if out is not None)

    def _add(
        self, residual: Tensor, added: Tensor | None, norm: Norm | None
    ) -> tuple[Tensor, Tensor | None]:
        total = residual if added is None else torch.empty_like(residual)
        out = None if norm is None else torch.empty_like(residual)
        added = None if added is None else added.contiguous()
        weights = (None, None) if norm is None else (norm.weight, norm.bias)
        is_rms, eps = (True, 0.0) if norm is None else (norm.is_rms, norm.eps)
        where = self._addresses(residual, added, total, *weights, out)
        _adding(self.dtype)(where, (is_rms, eps), tuple(residual.shape))
        return total, out

    def attend(
        self,
        context: RaggedContext,
        index: int,
        new: NewTokens,
        turning: Turning | None,
        norms: Sequence[Norm],
        scoring: Scoring,
    ) -> Tensor:
        """As `LayerKernels.attend`."""
        if turning is not None or norms:
            new = replace(new, query=new.query.contiguous(), key=new.key.contiguous())
            for heads, norm in zip((new.query, new.key), norms or (None, None), strict=True):
                self._turn(heads, turning, norm)
        return attend(context, index, new, scoring)

    def _turn(self, heads: Tensor, turning: Turning | None, norm: Norm | None) -> None:
        """Norm and turn contiguous `heads` `[tokens, heads, head_dim]` where they are."""
        angles = (None, None) if turning is None else (turning.cosines, turning.sines)
        rotary = 0 if turning is None else turning.cosines.shape[1]
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        where = self._addresses(heads, *angles, weight)
        _turning(self.dtype)(where, eps, (*heads.shape, rotary))

    def activate(self, function: nn.Module, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """As `LayerKernels.activate`."""
        if up is None or type(function).__name__ not in _SILU:
            activated: Tensor = function(gate)
            return activated if up is None else activated * up
        own, other = gate.contiguous(), up.contiguous()  # copies of halves of one product
        out = torch.empty_like(own)
        where = self._addresses(own, other, out)
        if torch.get_num_threads() == 1 or own.numel() < _LEAST_SHARED:
            _gating(self.dtype, False)(where, tuple(own.shape))
        else:
            with torch_threads():
                _gating(self.dtype, True)(where, tuple(own.shape))
        return out

    def _addresses(self, *tensors: Tensor | None) -> Addressed:
        """Where tensors begin, 0 for those that are missing; ValueError unless loops can read
        them.
        """
        for each in tensors:
            if each is not None and not (each.dtype == self.dtype and each.is_contiguous()):
                raise ValueError(f"a contiguous tensor of {self.dtype} is needed, not {each.dtype}")
        return tuple(0 if each is None else each.data_ptr() for each in tensors)


Addressed = tuple[int, ...]
"""What `LayerLoops._addresses` gives to a loop."""


def layer_loops(dtype: torch.dtype) -> LayerLoops | None:
    """The loops for layers that compute in `dtype`; None where numba is missing."""
    return LayerLoops(dtype) if has_numba() else None


@cache
def _adding(dtype: torch.dtype) -> Any:
    """The compiled sum of `residual` and `added` into `total`, all `[rows, width]`, and its norm
    into `out`; the address of what is left out is 0.

    Numbers are rounded where transformers' modules round them.
    """
    matrix, widen, narrow = matrix_at(dtype), widening(dtype), narrowing(dtype)

    def add(where: Addressed, form: tuple[bool, float], shape: tuple[int, int]) -> None:
        residual, added, total, weight, bias, out = where
        (is_rms, eps), (rows, width) = form, shape
        weights, biases = matrix(weight, 1, width)[0], matrix(bias, 1, width)[0]
        for at in range(rows):
            row = matrix(total, rows, width)[at]
            if added:
                before, other = matrix(residual, rows, width)[at], matrix(added, rows, width)[at]
                for i in range(width):
                    row[i] = narrow(widen(before[i]) + widen(other[i]))
            if out:
                normed = matrix(out, rows, width)[at]
                mean = squares = np.float32(0)
                if not is_rms:
                    for i in range(width):
                        mean += widen(row[i])
                    mean /= np.float32(width)
                for i in range(width):
                    apart = widen(row[i]) - mean
                    squares += apart * apart
                scale = np.float32(1) / np.sqrt(squares / np.float32(width) + np.float32(eps))
                if bias:
                    for i in range(width):
                        own = (widen(row[i]) - mean) * scale
                        normed[i] = narrow(own * widen(weights[i]) + widen(biases[i]))
                elif weight:
                    for i in range(width):
                        own = widen(narrow((widen(row[i]) - mean) * scale))
                        normed[i] = narrow(own * widen(weights[i]))
                else:
                    for i in range(width):
                        normed[i] = narrow((widen(row[i]) - mean) * scale)

    return compiled_loop(add, parallel=False)


@cache
def _turning(dtype: torch.dtype) -> Any:
    """The compiled turn of `heads` `[tokens, heads, head_dim]` by `cosines` and `sines` `[tokens,
    rotary_width]`, after the norm of each head that has a `weight`.
    """
    matrix, widen, narrow = matrix_at(dtype), widening(dtype), narrowing(dtype)

    def norm_head(head: Any, weight: Any, eps: Any) -> None:
        squares = np.float32(0)
        for i in range(len(head)):
            squares += widen(head[i]) * widen(head[i])
        scale = np.float32(1) / np.sqrt(squares / np.float32(len(head)) + eps)
        for i in range(len(head)):
            head[i] = narrow(widen(narrow(widen(head[i]) * scale)) * widen(weight[i]))

    norm = compiled_loop(norm_head, parallel=False)

    def turn(where: Addressed, eps: float, shape: tuple[int, int, int, int]) -> None:
        heads, cosines, sines, weight = where
        tokens, count, head_dim, rotary = shape
        half, width = rotary // 2, count * head_dim
        for token in range(tokens):
            row = matrix(heads, tokens, width)[token]
            cosine = matrix(cosines, tokens, rotary)[token]
            sine = matrix(sines, tokens, rotary)[token]
            for first in range(0, width, head_dim):
                head = row[first : first + head_dim]
                if weight:
                    norm(head, matrix(weight, 1, head_dim)[0], np.float32(eps))
                for i in range(half):
                    low, high = widen(head[i]), widen(head[half + i])
                    own = widen(narrow(low * widen(cosine[i])))
                    head[i] = narrow(own - widen(narrow(high * widen(sine[i]))))
                    own = widen(narrow(high * widen(cosine[half + i])))
                    head[half + i] = narrow(own + widen(narrow(low * widen(sine[half + i]))))

    return compiled_loop(
        turn, parallel=False, exact=True
    )  # of float16 a product and a sum became one


@cache
def _gating(dtype: torch.dtype, parallel: bool) -> Any:
    """The compiled SiLU of `gate`, times `up`, into `out`, all `[rows, width]`."""
    import numba

    matrix, power = matrix_at(dtype), power_of_e()
    widen, narrow = widening(dtype), narrowing(dtype)

    def activate(where: Addressed, shape: tuple[int, int]) -> None:
        (gate, up, out), (rows, width) = where, shape
        for at in numba.prange(rows):
            gates, ups = matrix(gate, rows, width)[at], matrix(up, rows, width)[at]
            row = matrix(out, rows, width)[at]
            for i in range(width):
                x = widen(gates[i])
                small = power(-abs(x))
                share = np.float32(1) / (np.float32(1) + small)
                share = share * small if x < 0 else share
                row[i] = narrow(widen(narrow(x * share)) * widen(ups[i]))

    return compiled_loop(activate, parallel)
