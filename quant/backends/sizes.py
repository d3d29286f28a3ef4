"""Bytes of a weight as each backend holds it, by its shape alone; no torch."""

from __future__ import annotations

from collections.abc import Callable

from quant.scheme import (
    DTYPE_BYTES,
    SUPER_BLOCK,
    LinearShape,
    ScaleForm,
    code_bytes,
    super_block_pairs,
)

NF4_BLOCK = 64
"""bitsandbytes' default block size for 4-bit weights; a block is quantized by its own maximum."""


def plain_bytes(shape: LinearShape, dtype: str) -> int:
    return shape.parameters * DTYPE_BYTES[dtype]


def _groups_bytes(shape: LinearShape, bits: int) -> int:
    """Bytes of scale and zero of every group, 16 bit each (bfloat16), or narrow ones and 16 bit of
    each row, or factors and halves of super-blocks.
    """
    groups = shape.in_features // shape.group
    pairs = {
        ScaleForm.PAIRS: 2 * groups,
        ScaleForm.NARROW: groups + 1,
        ScaleForm.SUPER_BLOCKS: shape.in_features // SUPER_BLOCK * super_block_pairs(bits),
    }
    return 2 * shape.out_features * pairs[shape.form]


def packed_bytes(bits: int) -> Callable[[LinearShape, str], int]:
    """Affine codes, each row padded to whole bytes, and the groups."""

    def nbytes(shape: LinearShape, dtype: str) -> int:
        return shape.out_features * code_bytes(shape.in_features, bits) + _groups_bytes(shape, bits)

    return nbytes


def int8_row_bytes(shape: LinearShape, dtype: str) -> int:
    """One 8-bit code per weight and a 32-bit scale per output row."""
    return shape.parameters + 4 * shape.out_features


def rotated_bytes(shape: LinearShape, dtype: str) -> int:
    """Codes, a 32-bit scale per row and a 32-bit factor per input."""
    return int8_row_bytes(shape, dtype) + 4 * shape.in_features


def onednn_bytes(shape: LinearShape, dtype: str) -> int:
    """As rotated codes, a 32-bit compensation per row (in the packed blob) and one zero. Measured
    with `torch.ops.mkldnn._nbytes` (torch 2.13): oneDNN pads both sides to 64 and adds 4 bytes per
    padded row.
    """
    return rotated_bytes(shape, dtype) + 4 * shape.out_features + 4


def nf4_bytes(shape: LinearShape, dtype: str) -> int:
    """Two codes per byte, a 32-bit maximum per block, and a table of 16 32-bit values; and 16 bit
    of each row, which `torch_4bit` has where it takes the place of nf4.
    """
    blocks = 4 * (shape.parameters // NF4_BLOCK)
    return shape.parameters // 2 + blocks + 4 * 16 + 2 * shape.out_features
