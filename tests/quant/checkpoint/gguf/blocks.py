"""Blocks whose scales are powers of two, and minima few of their steps: products with them are
exact in every type. The package writes no K-quants.
"""

from __future__ import annotations

import gguf
import numpy as np

from tests.quant.checkpoint.gguf.written import Array, Encode

GROUP = 32
TYPES = gguf.GGMLQuantizationType


def coded(weights: Array, kind: str) -> Array:
    """Matrices `[..., in]` as blocks of `kind`."""
    if kind == "Q6_K":
        return _sixteenths(weights).reshape(*weights.shape[:-1], -1)
    grouped = weights.reshape(-1, GROUP).astype(np.float64)
    if kind == "Q4_0":
        step = _steps(2 * np.abs(grouped).max(1), 14)
        low = -8 * step
    else:
        span = grouped.max(1) - np.minimum(grouped.min(1), 0)
        step = _steps(span, 29 if kind == "Q5_1" else 13)
        low = np.minimum(np.floor(grouped.min(1) / step), 0) * step
    codes = np.round((grouped - low[:, None]) / step[:, None])
    codes = np.clip(codes, 0, 31 if kind == "Q5_1" else 15).astype(np.uint8)
    blocks = (_long if kind == "Q4_K" else _short)(codes, step, low, kind)
    return blocks.reshape(*weights.shape[:-1], -1)


def in_blocks(kind: str, others: str = "F32", of: tuple[str, ...] = ()) -> Encode:
    """Matrices of layers in blocks of `kind`, others and those whose names have one `of` in them
    by the package.
    """

    def encode(name: str, weights: Array) -> tuple[Array, gguf.GGMLQuantizationType]:
        if weights.ndim == 1 or "ffn_gate_inp" in name:
            return weights, TYPES.F32
        if name.startswith("blk.") and not any(each in name for each in of):
            return coded(weights, kind), TYPES[kind]
        own = coded(weights, others) if others == "Q6_K" else gguf.quantize(weights, TYPES[others])
        return own, TYPES[others]

    return encode


def _steps(span: Array, codes: int) -> Array:
    """Powers of two, of a few exponents, of which so many are the span or more."""
    return np.exp2(np.clip(np.ceil(np.log2(np.maximum(span, 1e-9) / codes)), -10, -1))


def _short(codes: Array, step: Array, low: Array, kind: str) -> Array:
    halves = (step,) if kind == "Q4_0" else (step, low)
    heads = [each.astype(np.float16).view(np.uint8).reshape(-1, 2) for each in halves]
    if kind == "Q5_1":
        heads.append(np.packbits(codes >> 4, axis=1, bitorder="little"))
    half, codes = GROUP // 2, codes & 15
    return np.concatenate([*heads, codes[:, :half] | codes[:, half:] << 4], axis=1)


def _long(codes: Array, step: Array, low: Array, kind: str) -> Array:
    """Eight groups with 6-bit factors of two halves: powers of two, and up to 63 of the minimum."""
    del kind
    steps, lows = step.reshape(-1, 8), -low.reshape(-1, 8)
    least = steps.min(1, keepdims=True)
    unit = np.exp2(np.ceil(np.log2(np.maximum(lows.max(1, keepdims=True), 1e-9) / 32)))
    scales = np.minimum(steps / least, 32).astype(np.uint8)
    minima = np.clip(np.round(lows / unit), 0, 63).astype(np.uint8)
    packed = np.empty((len(steps), 12), np.uint8)
    packed[:, :4] = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    packed[:, 4:8] = minima[:, :4] | (minima[:, 4:] >> 4) << 6
    packed[:, 8:] = (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4
    heads = [each.astype(np.float16).view(np.uint8).reshape(-1, 2) for each in (least, unit)]
    pairs = codes.reshape(len(steps), 4, 2, GROUP)
    own = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(len(steps), -1)
    return np.concatenate([*heads, packed, own], axis=1)


def _sixteenths(weights: Array) -> Array:
    """Sixteen groups with signed factors of a half, powers of two."""
    grouped = weights.reshape(-1, 16, 16).astype(np.float64)
    steps = _steps(2 * np.abs(grouped).max(2), 62)
    least = steps.min(1, keepdims=True)
    factors = np.minimum(steps / least, 64)
    codes = np.clip(np.round(grouped / (factors * least)[..., None]) + 32, 0, 63).astype(np.uint8)
    first, second, third, last = codes.reshape(-1, 2, 4, GROUP).swapaxes(0, 2).swapaxes(1, 2)
    low = np.stack([first & 15 | third << 4, second & 15 | last << 4], 2)
    upper = first >> 4 | second >> 4 << 2 | third >> 4 << 4 | last >> 4 << 6
    parts = low, upper, factors.astype(np.int8), least.astype(np.float16)
    return np.concatenate([each.reshape(len(steps), -1).view(np.uint8) for each in parts], axis=1)
