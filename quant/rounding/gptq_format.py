"""The checkpoint format of GPTQ weights: that of GPTQModel, and of auto-gptq before it.

A module `name` of `in` x `out` features is stored as

- `name.qweight` int32 `[in * bits / 32, out]`: codes of each output, a stream of bits from the
  lowest bit of the first word on, so that 3-bit codes cross words;
- `name.qzeros` int32 `[groups, out * bits / 32]`: zeros in the same way, along the outputs;
- `name.scales` float16 `[groups, out]`, and `name.g_idx` int32 `[in]`: the group of each input.

A weight is `(code - zero) * scale`. In the canonical form that is `(code - half) * scale + (half -
zero) * scale`: exact with the scale in its own float16 and the product in float32. A backend that
holds both in 16 bits keeps the scale exact in float16 and rounds the product (2^-11 of it); one
that holds bfloat16 (int4pack, the CUDA kernels) rounds both to 2^-9, at most 0.03 of a step where
rounding to codes costs 0.5. 8-bit GPTQ is affine per group, the canonical 8-bit form symmetric per
row, which every 8-bit kernel takes: it is quantized once more, to the nearest of its 255 codes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from quant.checkpoint.gptq_config import (
    STORED_BITS,
    WORD_BITS,
    bits_of_words,
)
from quant.checkpoint.reader import Checkpoint
from quant.common.errors import CheckpointError
from quant.rounding.canonical import CanonicalWeight, quantize, row_blocks
from quant.scheme import group_size

_WORD_MASK = (1 << WORD_BITS) - 1
_FIRST_PART, _SECOND_PART = 21, 11
"""3-bit codes that start below bit 63 of 96, and those from there on: both parts fit an int64."""


@dataclass(frozen=True)
class GptqWeight:
    """A weight `(code - zero) * scale`: `codes` uint8 `[out, in]`; `scale` float `[out, groups]`;
    `zero` uint8 `[out, groups]`; `group_of_column` int32 `[in]`.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    group_of_column: torch.Tensor
    bits: int

    def dequantize(self) -> torch.Tensor:
        out = torch.empty(self.codes.shape)
        rows, columns = self.codes.shape
        for block in row_blocks(rows, columns, out.device):
            out[block] = self.rows(block)
        return out

    def split_rows(self, parts: int) -> list[GptqWeight]:
        """As many weights of equal numbers of rows below each other."""
        each = [part.chunk(parts) for part in (self.codes, self.scale, self.zero)]
        return [
            replace(
                self,
                codes=codes,
                scale=scale,
                zero=zero,
                group_of_column=self.group_of_column.clone(),  # of files, no two may share memory
            )
            for codes, scale, zero in zip(*each, strict=True)
        ]

    def rows(self, block: slice) -> torch.Tensor:
        columns = self.group_of_column.long()
        centred = self.codes[block].float().sub_(self.zero[block].float()[:, columns])
        return centred.mul_(self.scale[block].float()[:, columns])


@dataclass(frozen=True)
class StoredWeight:
    """A canonical weight, and the inputs of its columns, int32 `[in]`; None: in order."""

    canonical: CanonicalWeight
    input_order: torch.Tensor | None


def read_gptq(
    checkpoint: Checkpoint,
    module: str,
    shape: tuple[int, int],
    kept: slice | list[int] | None = None,
) -> GptqWeight:
    """Read the weight of `module`, of `shape` `[out, in]`, or the `kept` rows of it, to the host.
    Its bits and groups follow from the stored shapes. CheckpointError, naming the tensor, for
    shapes that do not fit together and for scales that are not finite.
    """
    assert checkpoint.gptq is not None, "read where a GPTQ configuration is"
    prefix = module.partition(".")[0]
    stem = checkpoint.find(f"{module}.qweight", prefix).removesuffix(".qweight")
    place = f"tensor {stem}.qweight in {checkpoint.place}"
    rows, columns = shape
    qweight, scales = checkpoint.read(f"{stem}.qweight"), checkpoint.read(f"{stem}.scales")
    bits = _stored_bits(qweight, columns, rows, place)
    groups = _stored_groups(scales, shape, place)
    qzeros = checkpoint.read(f"{stem}.qzeros")
    if qzeros.dtype != torch.int32 or tuple(qzeros.shape) != (groups, -(-rows * bits // WORD_BITS)):
        raise CheckpointError(
            f"{place}: its zeros are {qzeros.dtype} {list(qzeros.shape)}, which does not fit "
            f"{rows} outputs in {groups} groups at {bits} bits; the checkpoint is damaged"
        )
    kept = slice(0, rows) if kept is None else kept
    qweight = qweight[:, kept]
    codes = torch.empty(qweight.shape[1], columns, dtype=torch.uint8)
    for block in row_blocks(len(codes), columns, codes.device):
        codes[block] = unpack_words(qweight[:, block].t(), bits, columns)
    return GptqWeight(
        codes=codes,
        scale=scales.t()[kept].contiguous(),
        zero=_stored_zeros(qzeros, bits, rows, checkpoint.gptq.zero_offset)[kept],
        group_of_column=_group_of_column(checkpoint, stem, columns, groups),
        bits=bits,
    )


def to_canonical(weight: GptqWeight) -> StoredWeight:
    """Convert to the canonical form: exact at 3 and 4 bit, quantized again per row at 8 bit.
    CheckpointError for groups that do not share the columns evenly.
    """
    columns = weight.codes.shape[1]
    if weight.bits == 8:
        return StoredWeight(_symmetric_rows(weight), None)
    groups = weight.scale.shape[1]
    order = weight.group_of_column.argsort(stable=True)
    evenly = torch.arange(groups).repeat_interleave(columns // groups)
    if columns % groups or not torch.equal(weight.group_of_column[order].long(), evenly):
        raise CheckpointError(
            f"its {columns} columns lie in {groups} groups of unequal size, which kernels do not "
            "take; quantize the model again with a group size that divides its widths"
        )
    in_order = bool((order == torch.arange(columns)).all())
    repeats = _parts_of_group(columns // groups, columns)
    half = 1 << (weight.bits - 1)
    zero = (half - weight.zero.float()) * weight.scale.float()
    canonical = CanonicalWeight(
        codes=weight.codes if in_order else weight.codes[:, order],
        scale=weight.scale.repeat_interleave(repeats, dim=1),
        zero=zero.repeat_interleave(repeats, dim=1),
        bits=weight.bits,
        group=columns // groups // repeats,
    )
    return StoredWeight(canonical, None if in_order else order.int())


def _symmetric_rows(weight: GptqWeight) -> CanonicalWeight:
    rows, columns = weight.codes.shape
    codes = torch.empty(rows, columns, dtype=torch.int8)
    scale = torch.empty(rows, 1)
    for block in row_blocks(rows, columns, codes.device):
        part = quantize(weight.rows(block), 8)
        codes[block], scale[block] = part.codes, part.scale
    return CanonicalWeight(codes, scale, None, 8, columns)


def _parts_of_group(group: int, columns: int) -> int:
    """Count the parts of the usual size into which a larger group is split: kernels that take
    groups of 128 columns but not whole rows can run then, in the planned bytes.
    """
    usual = group_size(columns)
    return group // usual if group > usual and group % usual == 0 else 1


def fills_words(rows: int, columns: int, bits: int) -> bool:
    """Whether the codes of `columns` inputs and the zeros of `rows` outputs fill whole words, as
    GPTQModel's kernels require.
    """
    period = WORD_BITS if bits == 3 else WORD_BITS // bits
    return rows % period == 0 and columns % period == 0


def gptq_tensors(weight: GptqWeight, zero_offset: int) -> dict[str, torch.Tensor]:
    """The tensors of a module by the last part of their name; `weight` has to fulfil `fills_words`,
    `zero_offset` is as in `GptqConfig`.
    """
    rows, columns = weight.codes.shape
    assert fills_words(rows, columns, weight.bits), "checked before anything is computed"
    assert not zero_offset or bool(weight.zero.all()), "format gptq cannot hold a zero of 0"
    packed = torch.empty(rows, columns * weight.bits // WORD_BITS, dtype=torch.int32)
    for block in row_blocks(rows, columns, packed.device):
        packed[block] = pack_words(weight.codes[block], weight.bits)
    return {
        "qweight": packed.t().contiguous(),
        "qzeros": pack_words(weight.zero.t() - zero_offset, weight.bits),
        "scales": weight.scale.t().contiguous(),
        "g_idx": weight.group_of_column.int(),
    }


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes `[rows, n]` to int32 words `[rows, n * bits / 32]`; n has to fill whole words."""
    rows = codes.shape[0]
    if bits != 3:
        shifts = torch.arange(0, WORD_BITS, bits)
        words = (codes.long().view(rows, -1, WORD_BITS // bits) << shifts).sum(-1)
        return words.to(torch.int32)
    parts = codes.long().reshape(rows, -1, WORD_BITS)
    shifts = 3 * torch.arange(_FIRST_PART)
    low = (parts[..., :_FIRST_PART] << shifts).sum(-1)
    high = (parts[..., _FIRST_PART:] << shifts[:_SECOND_PART]).sum(-1)
    words = torch.stack((low, (low >> WORD_BITS) | (high << (WORD_BITS - 1)), high >> 1), dim=-1)
    return words.to(torch.int32).view(rows, -1)


def unpack_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unpack codes uint8 `[rows, count]` from int32 words `[rows, ceil(count * bits / 32)]`."""
    words, rows = words.contiguous(), words.shape[0]
    if bits != 3:
        shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
        codes = (words.unsqueeze(-1) >> shifts).bitwise_and_((1 << bits) - 1)
        return codes.view(rows, -1)[:, :count].to(torch.uint8)
    triples = torch.nn.functional.pad(words, (0, -words.shape[1] % 3)).long() & _WORD_MASK
    first, second, third = triples.view(rows, -1, 3).unbind(-1)
    shifts = 3 * torch.arange(_FIRST_PART)
    low = (first | (second << WORD_BITS)).unsqueeze(-1) >> shifts
    high = ((second >> (WORD_BITS - 1)) | (third << 1)).unsqueeze(-1) >> shifts[:_SECOND_PART]
    codes = torch.cat((low, high), dim=-1).bitwise_and_(7)
    return codes.view(rows, -1)[:, :count].to(torch.uint8)


def _stored_bits(qweight: torch.Tensor, columns: int, rows: int, place: str) -> int:
    bits = bits_of_words(qweight.shape[0], columns) if qweight.dim() == 2 else None
    if bits is not None and qweight.dtype == torch.int32 and qweight.shape[1] == rows:
        return bits
    raise CheckpointError(
        f"{place} is {qweight.dtype} {list(qweight.shape)}, which holds {columns} inputs of {rows} "
        f"outputs at none of {', '.join(map(str, STORED_BITS))} bits; the checkpoint is of another "
        "model or of bits that there are no kernels for"
    )


def _stored_groups(scales: torch.Tensor, shape: tuple[int, int], place: str) -> int:
    if scales.dim() != 2 or not scales.is_floating_point() or scales.shape[1] != shape[0]:
        raise CheckpointError(
            f"{place}: its scales are {scales.dtype} {list(scales.shape)} for {shape[0]} outputs; "
            "the checkpoint is damaged"
        )
    if not bool(torch.isfinite(scales).all()):
        raise CheckpointError(
            f"{place}: its scales hold NaN or infinity; the checkpoint is damaged"
        )
    return scales.shape[0]


def _stored_zeros(qzeros: torch.Tensor, bits: int, rows: int, offset: int) -> torch.Tensor:
    """Unpack zeros uint8 `[out, groups]`. The offset is added as GPTQModel adds it: at 4 and 8 bit
    to whole words, which undoes what its writer's subtraction borrowed, at 3 bit to each zero.
    """
    largest = (1 << bits) - 1
    if bits != 3:
        every_field = (_WORD_MASK // largest) * offset
        words = (qzeros.long() + every_field) & _WORD_MASK
        wrapped = torch.where(words > _WORD_MASK >> 1, words - _WORD_MASK - 1, words)
        return unpack_words(wrapped.int(), bits, rows).t().contiguous()
    zeros = unpack_words(qzeros, bits, rows)
    return zeros.add_(offset).bitwise_and_(largest).t().contiguous()


def _group_of_column(checkpoint: Checkpoint, stem: str, columns: int, groups: int) -> torch.Tensor:
    name = f"{stem}.g_idx"
    if not checkpoint.has(name):
        return torch.arange(columns, dtype=torch.int32) // max(1, -(-columns // groups))
    index = checkpoint.read(name)
    valid = index.dtype in (torch.int32, torch.int64) and tuple(index.shape) == (columns,)
    if not valid or int(index.min()) < 0 or int(index.max()) >= groups:
        raise CheckpointError(
            f"tensor {name} in {checkpoint.place} does not give each of {columns} inputs one of "
            f"{groups} groups; the checkpoint is damaged"
        )
    return index.int()
