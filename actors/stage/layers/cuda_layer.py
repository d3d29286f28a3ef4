"""What a decoder layer computes between its products, on GPUs by kernels of our own: sums with
norms, positions with the write of keys and values, activations.

transformers' modules start 30 to 60 kernels a layer for it, of which each takes longer to start
than to run in a decode step.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from actors.attention.addresses import Scoring
from actors.attention.ragged import NewTokens, RaggedContext, attend_stored
from actors.attention.stored import Stored
from quant.backends.cuda.driver import THREADS, CudaError, Kernels, kernels_for

SOURCE = Path(__file__).with_name("cuda_layer.cu")
KERNELS = ("add_norm", "turn_and_store", "activate")

_OCTET = 8
_ALIGNMENT = 16  # bytes of an octet
_WARPS = THREADS // 32
_LARGEST_HEAD, _LARGEST_WIDTH = 256, 24000

_ACTIVATIONS = {
    "SiLUActivation": 0,
    "SiLU": 0,
    "GELUActivation": 1,
    "GELUTanh": 2,
    "NewGELUActivation": 2,
    "FastGELUActivation": 2,
    "BloomGelu": 2,
    "ReLU": 3,
    "QuickGELUActivation": 4,
}
"""The kernel's number of a module's function, by the module's class."""


class _Norm(ctypes.Structure):
    """The struct `Norm` of the source."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("weight", "bias", "out"))


class _NormForm(ctypes.Structure):
    _fields_ = (("is_rms", ctypes.c_uint), ("eps", ctypes.c_float))


class _Heads(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("tokens", "group", "turned_heads", "kv_heads")),
        *((name, ctypes.c_uint) for name in ("slots", "rotary", "query_token", "query_head")),
        *((name, ctypes.c_uint) for name in ("key_token", "key_head", "value_token", "value_head")),
        ("eps", ctypes.c_float),
    )


@dataclass(frozen=True)
class Norm:
    """An RMSNorm, or a LayerNorm; without `weight` and `bias` one of ones and zeros."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    is_rms: bool

    @classmethod
    def of(cls, module: nn.Module | None) -> Norm | None:
        """The norm of a module; None where that is something else."""
        if isinstance(module, nn.LayerNorm):
            return cls(_whole(module.weight), _whole(module.bias), module.eps, False)
        eps: Any = getattr(module, "variance_epsilon", None)
        weight: Any = getattr(module, "weight", None)
        return None if eps is None else cls(_whole(weight), None, float(eps), True)

    def into(self, out: Tensor) -> _Norm:
        weight, bias = (None if t is None else t.data_ptr() for t in (self.weight, self.bias))
        return _Norm(weight, bias, out.data_ptr())


@dataclass(frozen=True)
class Turning:
    """What positions do to queries and keys: `cosines` and `sines` `[tokens, rotary_width]`, and
    what queries alone are multiplied by, `growth` `[tokens, 1, 1]`, if anything.
    """

    cosines: Tensor
    sines: Tensor
    growth: Tensor | None = None


@dataclass(frozen=True)
class LayerKernels:
    """The compiled kernels for one width of hidden states, head size and type."""

    kernels: Kernels
    reads_tables: ClassVar[bool] = True
    """Whether attention is told of requests by tables on the device."""

    @property
    def device(self) -> torch.device:
        return self.kernels.device

    def add(
        self, residual: Tensor, added: Sequence[Tensor], norms: Sequence[Norm]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The sum of `residual` and up to two `added`, all `[rows, width]`, and up to two norms of
        it, of one kind.
        """
        total = torch.empty_like(residual) if added else residual
        outs = tuple(torch.empty_like(residual) for _ in norms)
        first, second = (*map(Norm.into, norms, outs), _Norm(), _Norm())[:2]
        form = _NormForm(norms[0].is_rms, norms[0].eps) if norms else _NormForm()
        one, other = (*map(_whole, added), None, None)[:2]
        self.kernels.launch(
            "add_norm", len(residual),
            _whole(residual), one, other, total if added else None, first, second, form,
        )  # fmt: skip
        return total, outs

    def attend(
        self,
        context: RaggedContext,
        index: int,
        new: NewTokens,
        turning: Turning | None,
        norms: Sequence[Norm],
        scoring: Scoring,
    ) -> Tensor:
        """Attention of layer `index`, `[tokens, heads, head_dim]`, after the `norms` of heads and
        positions, which may be written to where `new` is.
        """
        held, where = context.held(index), context.layout(index).where
        with context.timer or nullcontext():
            self.turn_and_store(new, turning, norms, where.token_slots, held)
            return attend_stored(context, index, new, scoring)

    def turn_and_store(
        self,
        new: NewTokens,
        turning: Turning | None,
        norms: Sequence[Norm],
        token_slots: Tensor,
        held: tuple[Stored, Stored],
    ) -> None:
        """Turn queries and keys where they are, after the `norms` of their heads if any, and write
        keys and values to `token_slots` `[tokens]` of the cache; to none for -1.

        Queries are left as `Stored.asked` makes them.
        """
        keys, values = held
        kv_heads, slots, _ = keys.numbers.shape
        tokens, heads, _ = new.query.shape
        changed = turning is not None or norms or keys.factors is not None
        turned_heads = heads if changed else 0
        strides = [each.stride(at) for each in (new.query, new.key, new.value) for at in (0, 1)]
        shape = _Heads(
            tokens, heads // kv_heads, turned_heads, kv_heads, slots,
            0 if turning is None else turning.cosines.shape[1], *strides,
            norms[0].eps if norms else 0.0,
        )  # fmt: skip
        query_norm, key_norm = (each.weight for each in norms) if norms else (None, None)
        cosines, sines = (None, None) if turning is None else (turning.cosines, turning.sines)
        self.kernels.launch(
            "turn_and_store", -(-tokens * (turned_heads + 2 * kv_heads) // _WARPS),
            new.query, new.key, new.value, cosines, sines, query_norm, key_norm, keys.factors,
            token_slots, keys.numbers, keys.scales, values.numbers, values.scales, shape,
        )  # fmt: skip

    def activate(self, function: nn.Module, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """`function` of `gate` `[rows, width]`, times `up`; in place of `gate` where the kernel
        knows it and the two do not lie in one tensor.
        """
        kind = _ACTIVATIONS.get(type(function).__name__)
        if kind is None:
            activated: Tensor = function(gate)
            return activated if up is None else activated * up
        columns = max(gate.shape[-1] // _OCTET, 1)
        if up is not None and _can_load_rows(gate) and _can_load_rows(up):
            stride, out = (
                gate.stride(0) // _OCTET,
                torch.empty(gate.shape, dtype=gate.dtype, device=gate.device),
            )
        else:
            gate, up = _whole(gate), _whole(up)
            stride, out = columns, gate
        octets = gate.numel() // _OCTET
        self.kernels.launch(
            "activate", -(-octets // THREADS), gate, up, out, octets, kind, columns, stride
        )
        return out


def _can_load_rows(part: Tensor) -> bool:
    """Whether `part` is columns of a tensor whose rows kernels can load by octets."""
    width = part.shape[-1]
    is_part = part.dim() == 2 and part.stride(1) == 1 and part.stride(0) > width
    return (
        is_part
        and width % _OCTET == part.stride(0) % _OCTET == 0
        and part.data_ptr() % _ALIGNMENT == 0
    )


_T = TypeVar("_T", Tensor, Tensor | None)


def _whole(tensor: _T) -> _T:
    """`tensor`, or a copy of it that is contiguous and begins where kernels can load octets."""
    if tensor is None or (tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


@functools.cache
def layer_kernels(
    width: int, head_dim: int, dtype: torch.dtype, coded: bool, device: torch.device
) -> LayerKernels | None:
    """The kernels for hidden states of `width` in `dtype` and a cache of it or, if `coded`, of
    8-bit codes; compiled when they are first asked for. None where transformers' modules compute:
    on a CPU, in float32, for other sizes, or where they cannot be compiled, which warns.
    """
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return None
    if width % _OCTET or width > _LARGEST_WIDTH or head_dim % _OCTET or head_dim > _LARGEST_HEAD:
        return None
    definitions = {"HIDDEN_SIZE": width, "HEAD_DIM": head_dim, "CODED": int(coded)}
    try:
        return LayerKernels(kernels_for(SOURCE, KERNELS, dtype, device, **definitions))
    except CudaError as error:
        warn_of(str(error), device)
        return None


def warn_of(complaint: str, device: torch.device) -> None:
    warnings.warn(
        f"llmpq's kernels for decoder layers are not usable on {device}: {complaint}; "
        "transformers' modules take their place and are slower",
        RuntimeWarning,
        stacklevel=3,
    )
