"""Bytes that stay: packed layers, embedding and head, keys and values, states of requests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import repeat

from planner.adapters import adapter_parameters
from planner.cluster.device import Device
from planner.costs.temporaries import KV_SCALE_BYTES
from planner.model.families import layer_factors
from planner.model.shape import ModelShape
from planner.workload import Workload
from quant.backends.kernel_rule import KernelRule
from quant.backends.table import fallback_rule, rule_for
from quant.checkpoint.stored_config import ROUNDED_AGAIN, WHOLE_ROW, StoredLinear
from quant.common.errors import SpecError
from quant.scheme import AFFINE_BITS, DTYPE_BYTES, FULL_BITS, KV_BITWIDTHS, LinearShape, Processor

_NO_ORDER = WHOLE_ROW, ROUNDED_AGAIN
_FLOAT32_BYTES = 4
_CPU = Processor()

HEAD_SHARE = 0.25
"""Share of the host memory for keys and values that heads have which prompts share; requests that
are parked or handed over have the rest."""

LEAST_HEAD_TOKENS = 64
"""Tokens of the shortest head: each takes a pass of its own, and every copy a call for each tensor
of each layer, which shorter ones do not win back."""


def layer_weight_bytes(
    shape: ModelShape, bits: int, device: Device, dtype: str, backend: str | None = None
) -> int:
    """Bytes of a decoder layer as kernels pack it, with all experts, of the preferred `backend`
    unless one is named (errors as there). `shape` has layers of one kind.
    """
    _check_one_kind(shape)
    packed = packed_bytes(shape, bits, device.processor, dtype, backend)
    order = _order_bytes(shape.at(bits))
    exact = 0 if shape.delta is None else shape.delta.exact_parameters
    exact += 0 if shape.experts is None else shape.experts.exact_parameters
    wider = exact * (_FLOAT32_BYTES - DTYPE_BYTES[dtype])
    others = shape.layer_other_parameters + layer_factors(shape.model_type)
    others += adapter_parameters(shape)
    return packed + order + others * DTYPE_BYTES[dtype] + wider


def model_weight_bytes(shape: ModelShape, bits: int, device: Device, dtype: str) -> int:
    return shape.over_layers(lambda kind: layer_weight_bytes(kind, bits, device, dtype))


@cache
def packed_bytes(
    shape: ModelShape, bits: int, processor: Processor, dtype: str, backend: str | None = None
) -> int:
    """Bytes of the weights that have the bits of their layer, with those of all experts."""

    def packed(linears: Sequence[LinearShape]) -> int:
        return sum(
            rule_for(processor, bits, linear, dtype, backend).nbytes(linear, dtype)
            if linear.stored_bits is None
            else rule_for(processor, linear.stored_bits, linear, dtype).nbytes(linear, dtype)
            for linear in linears
        )

    experts, held = 0 if shape.experts is None else shape.experts.count, shape.at(bits)
    return packed(held.layer_linears) + experts * packed(held.expert_linears)


def _order_bytes(shape: ModelShape) -> int:
    """Bytes of the indices of a layer's inputs where the columns of a group lie apart; 8 bit needs
    none.
    """
    stored = shape.stored
    if stored is None or not stored.desc_act:
        return 0
    alike = repeat(StoredLinear(stored.bits, stored.group_size))
    return sum(
        4 * linear.in_features
        for linear, own in zip(shape.layer_linears, stored.linears or alike, strict=False)
        if own.bits in AFFINE_BITS and own.group_size not in (*_NO_ORDER, linear.in_features)
    )


def _check_one_kind(shape: ModelShape) -> None:
    assert not shape.kinds, f"a layer of {shape.name} is of one of its kinds; ask for each"


def kv_cache_bytes_per_layer(
    shape: ModelShape, workload: Workload, kv_bits: int, dtype: str
) -> int:
    """Bytes that a layer of one kind keeps of all requests in flight; 16 bits stand for `dtype`."""
    _check_one_kind(shape)
    if kv_bits not in KV_BITWIDTHS:
        raise SpecError(f"kv_bits is {kv_bits}; choose one of {', '.join(map(str, KV_BITWIDTHS))}")
    token, request = kept_of_requests(shape, workload, kv_bits, dtype)
    return workload.kv_tokens * token + workload.global_batch * request


def kept_of_requests(
    shape: ModelShape, workload: Workload, kv_bits: int, dtype: str
) -> tuple[int, int]:
    """Bytes that a layer keeps of each token, and of each request: its state or its window."""
    token, state = kv_token_bytes(shape, kv_bits, dtype), shape.state_bytes(DTYPE_BYTES[dtype])
    room = workload.room(shape.sliding_window)
    return (token, state) if room is None else (0, room * token + state)


def kv_token_bytes(shape: ModelShape, kv_bits: int, dtype: str) -> int:
    """Bytes of a token's keys and values in a layer: elements of `dtype`, or codes and scales; what
    positions rotate behind a latent has two codes (`actors.attention.stored`).
    """
    if kv_bits == FULL_BITS:
        return shape.kv_elements * DTYPE_BYTES[dtype]
    again = 0 if shape.latent is None else shape.latent.rotary_width
    return shape.kv_elements + again + shape.kv_elements // shape.head_dim * KV_SCALE_BYTES


def embedding_bytes(
    shape: ModelShape, dtype: str, processor: Processor = _CPU, with_head: bool = False
) -> int:
    """Bytes of the embedding, with its positions, norm and projection; `with_head`: the LM head is
    on the same stage, so that a tied one is looked up in the codes of its kernel.
    """
    if with_head and shape.tied_embeddings:
        tokens = _head_rule(shape, dtype, processor).nbytes(shape.head_linear, dtype)
    else:
        tokens = fallback_rule(shape.head_bits).nbytes(shape.head_linear, dtype)
    others = shape.embedding_parameters - shape.head_parameters
    return tokens + others * DTYPE_BYTES[dtype]


def norm_bytes(shape: ModelShape, dtype: str) -> int:
    """Bytes of final norm and projection, which the last stage holds."""
    return (shape.final_parameters - shape.head_parameters) * DTYPE_BYTES[dtype]


def head_bytes(
    shape: ModelShape, dtype: str, processor: Processor = _CPU, on_first: bool = False
) -> int:
    """Bytes of the LM head; 0 where it is tied to an embedding on the same stage."""
    if shape.tied_embeddings and on_first:
        return 0
    return _head_rule(shape, dtype, processor).nbytes(shape.head_linear, dtype)


def _head_rule(shape: ModelShape, dtype: str, processor: Processor) -> KernelRule:
    return rule_for(processor, shape.head_bits, shape.head_linear, dtype)
