"""Bitwidths, group sizes, shapes of weights, a rank's parts of them, processors, and the forms of
GPTQ and of the variance indicator; no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate, chain
from math import gcd

from quant.common.errors import SpecError

FULL_BITS = 16
"""The bitwidth of weights that are not quantized: they have the compute type, whatever its width.
"""

NEAR_FULL_BITS = 8
"""Layers of at least so many bits are near 16 bit: +0.04 of 19.8 and nothing of 32.1 in perplexity,
with weights alone +0.04 of 23.0 (docs/measurements/quantization.md). Plans keep to them where
nothing is said.
"""

AFFINE_BITS = (3, 4, 5, 6)
"""Bitwidths of weights whose groups have a scale and a zero each."""

BITWIDTHS = (*AFFINE_BITS, NEAR_FULL_BITS, FULL_BITS)
"""All that plans choose from and measurements take where nothing is said."""

KV_BITWIDTHS = (8, FULL_BITS)
HEAD_BITWIDTHS = (6, NEAR_FULL_BITS, FULL_BITS)
"""Those that embedding and LM head may have, both the same."""

WEIGHTED = "weighted"
GPTQ = "gptq"
NEAREST = "nearest"
ROUNDINGS = (WEIGHTED, NEAREST, "stochastic")
"""Ways of rounding a weight that is quantized while it is loaded, the default first; see
`quant.rounding.ways`."""

PLAN_ROUNDINGS = (*ROUNDINGS, GPTQ)
"""Those, and GPTQ: a plan of it is run with a checkpoint that is calibrated before."""

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

GROUP_SIZES = (128, 64, 32)
"""Group sizes that kernels take, and in this order tried where a checkpoint is calibrated."""

NARROW_GROUP = 32
"""Columns that share a scale where weights are rounded as they are loaded: scale and zero then
have a byte each (`quant.narrow`)."""

SUPER_BLOCK = 256
"""Columns of a block of GGUF whose groups have small factors of a few numbers of 16 bit."""


class ScaleForm(StrEnum):
    """How scales and zeros of 3 to 6 bit are held: as two numbers of 16 bit each, in a byte each
    (`quant.narrow`), or as factors in super-blocks (`quant.super_blocks`).
    """

    PAIRS = "pairs"
    NARROW = "narrow"
    SUPER_BLOCKS = "super-blocks"


@dataclass(frozen=True)
class LinearShape:
    """A matrix `[out_features, in_features]`; what is stored holds for quantized checkpoints,
    `cut_group` for columns of a rank, which keep the groups of the wider matrix.
    """

    in_features: int
    out_features: int
    stored_group: int | None = None
    cut_group: int | None = None
    stored_bits: int | None = None
    stored_form: ScaleForm = ScaleForm.PAIRS

    @property
    def group(self) -> int:
        return self.cut_group or self.stored_group or rounded_group(self.in_features)

    @property
    def form(self) -> ScaleForm:
        """How scale and zero of a group are held, if there are both."""
        form = ScaleForm.NARROW if self.stored_group is None else self.stored_form
        is_apart = form is ScaleForm.NARROW and self.group != NARROW_GROUP
        return ScaleForm.PAIRS if is_apart else form

    @property
    def parameters(self) -> int:
        return self.in_features * self.out_features


@dataclass(frozen=True)
class Processor:
    """What decides on kernels: a CPU has neither capability nor architecture (`gfx942`)."""

    compute_capability: tuple[int, int] | None = None
    instruction_sets: frozenset[str] = frozenset({"avx512_bf16", "avx512_vnni"})
    rocm_architecture: str | None = None

    @property
    def is_cpu(self) -> bool:
        return self.compute_capability is None and self.rocm_architecture is None


def group_size(in_features: int) -> int:
    """Columns of a group in a checkpoint that is calibrated here."""
    return next((size for size in GROUP_SIZES if in_features % size == 0), in_features)


def super_block_pairs(bits: int) -> int:
    """Pairs of bytes that scales of a super-block take: 6 bit has one number of 16 bit, 4 and 5 bit
    have two, and all one pair for each 32 columns.
    """
    return SUPER_BLOCK // NARROW_GROUP + (1 if bits == 6 else 2)


def rounded_group(in_features: int) -> int:
    """Columns of a group of a weight that is rounded as it is loaded."""
    return in_features if in_features % NARROW_GROUP else NARROW_GROUP


def code_bytes(columns: int, bits: int) -> int:
    """Bytes of a row of affine codes: two a byte of four bits, and planes of one bit of the others,
    each of whole bytes.
    """
    half, planes = (-(-columns // 2), bits - 4) if bits >= 4 else (0, bits)
    return half + planes * -(-columns // 8)


ROWS, COLUMNS = 0, 1


@dataclass(frozen=True)
class Cut:
    """Half-open `begin` to `end` of `size` rows (`dimension` 0) or columns (1) of a tensor: what
    one rank holds. Column-parallel linears (queries, keys, values, the first ones of the MLP) are
    cut along the rows of their weights, row-parallel ones (the output of attention, the last one of
    the MLP) along the columns (Megatron-LM, Shoeybi et al. 2019, section 3). `more`: ranges
    behind that one, of linears that were fused.
    """

    dimension: int
    begin: int
    end: int
    size: int
    more: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        assert 0 <= self.begin < self.end <= self.size, "ranks have parts of what there is"
        assert not self.more or self.dimension == ROWS, "columns of a group lie together"

    @property
    def length(self) -> int:
        return sum(end - begin for begin, end in ((self.begin, self.end), *self.more))

    @property
    def index(self) -> tuple[slice | list[int], ...]:
        own = slice(self.begin, self.end)
        if self.more:
            return ([*range(self.begin, self.end), *chain(*(range(*each) for each in self.more))],)
        return (slice(None),) * self.dimension + (own,)

    def whole_shape(self, held: Sequence[int]) -> tuple[int, ...]:
        before, after = held[: self.dimension], held[self.dimension + 1 :]
        return (*before, self.size, *after)

    def reaches(self, dimensions: int) -> bool:
        """Whether a tensor of so many dimensions is cut: the bias of a row-parallel linear is
        whole.
        """
        return self.dimension < dimensions

    def whole_groups(self, group: int) -> range:
        return range(self.begin // group * group, min(-(-self.end // group) * group, self.size))

    def within(self, span: range) -> Cut:
        return Cut(self.dimension, self.begin - span.start, self.end - span.start, len(span))


def stacked(cuts: Sequence[Cut]) -> Cut:
    """The cut of a linear that has the rows of several ones below each other."""
    firsts = [0, *accumulate(cut.size for cut in cuts)]
    spans = [(first + cut.begin, first + cut.end) for first, cut in zip(firsts, cuts, strict=False)]
    (begin, end), *more = spans
    return Cut(ROWS, begin, end, firsts[-1], tuple(more))


def part_form(form: ScaleForm, cut: Cut) -> ScaleForm:
    """How scales of a part are held, where its groups are those of the whole: super-blocks have to
    be whole.
    """
    is_whole = cut.dimension == ROWS or cut.begin % SUPER_BLOCK == cut.length % SUPER_BLOCK == 0
    return form if is_whole or form is not ScaleForm.SUPER_BLOCKS else ScaleForm.PAIRS


def part_group(group: int, cut: Cut) -> int:
    """Columns of a part that share a scale: `group`, unless the cut goes through a group."""
    return group if cut.dimension == ROWS else gcd(group, cut.begin, cut.length)


def part_shape(shape: LinearShape, cut: Cut) -> LinearShape:
    if cut.dimension == ROWS:
        return replace(shape, out_features=cut.length, cut_group=None, stored_bits=None)
    group = part_group(shape.group, cut)
    is_usual = shape.stored_group is None and group == rounded_group(cut.length)
    stored = None if is_usual else group
    form = part_form(shape.stored_form, cut)
    return LinearShape(cut.length, shape.out_features, stored, stored_form=form)


DAMPING = 0.01
"""Share of the mean diagonal of X^T X that is added to it (Frantar et al., section 3.3)."""

MOST_DAMPING = 1.0


@dataclass(frozen=True)
class GptqOptions:
    """`symmetric`: the zero is the middle code, as some kernels require (Marlin). `act_order`:
    columns with the largest inputs are rounded first, under scales that are fixed before, so that
    columns stay in their places and kernels are not affected; else columns are rounded in their
    order, and each group's scale is chosen when it is reached. `damping`: share of the mean
    diagonal added to it. `narrow`: 3 to 6 bit have the groups of weights that are rounded when
    they are loaded, which no other library reads.
    """

    symmetric: bool = False
    act_order: bool = True
    damping: float = DAMPING
    narrow: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.damping <= MOST_DAMPING:
            raise SpecError(f"damping is {self.damping}; it must be above 0 and at most 1")

    def group(self, columns: int, bits: int) -> int:
        """Columns that share a scale."""
        is_narrow = self.narrow and bits != NEAR_FULL_BITS and columns % NARROW_GROUP == 0
        return NARROW_GROUP if is_narrow else group_size(columns)


FORM_ROUNDINGS = ("nearest", "stochastic")
FORM_SCHEMES = ("asymmetric", "symmetric")
FORM_SCALES = ("tensor", "group")


@dataclass(frozen=True)
class VarianceForm:
    """`scales`: one S_W for the whole tensor, or one for each group. The defaults are Proposition
    2's.
    """

    rounding: str = "nearest"
    scheme: str = "asymmetric"
    scales: str = "tensor"

    def __post_init__(self) -> None:
        choices = {"rounding": FORM_ROUNDINGS, "scheme": FORM_SCHEMES, "scales": FORM_SCALES}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise SpecError(
                    f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}"
                )

    def gain(self, mean: float, variance: float) -> float:
        if self.rounding == "nearest":
            return variance / 4
        return (mean**2 + variance) / 6

    def steps(self, bits: int) -> int:
        """Steps that a span of weights (symmetric: its larger side) is divided into."""
        return (1 << bits) - 1 if self.scheme == "asymmetric" else (1 << (bits - 1)) - 1

    def group(self, out_features: int, in_features: int, bits: int) -> int:
        if self.scales == "tensor":
            return out_features * in_features
        return in_features if bits == 8 else rounded_group(in_features)
