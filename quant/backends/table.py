"""The table of kernel backends (sizes, devices, speed and kernel class) and the choice among them,
without torch.

The planner sizes and times stages with these entries and the kernels allocate by them too, so that
a plan and the bytes really allocated cannot drift apart. Bytes are those of the tensors; what an
allocator rounds up to is the planner's slack. A new backend is one file with its kernel (a
`quant.backends.base.PackedWeight`) and one entry of `KERNEL_RULES`, which names that class.
"""

from __future__ import annotations

from dataclasses import replace

from quant.backends.kernel_rule import KernelCost, KernelRule
from quant.backends.sizes import (
    NF4_BLOCK,
    int8_row_bytes,
    nf4_bytes,
    onednn_bytes,
    packed_bytes,
    plain_bytes,
    rotated_bytes,
)
from quant.common.errors import SpecError
from quant.scheme import (
    AFFINE_BITS,
    BITWIDTHS,
    DTYPE_BYTES,
    FULL_BITS,
    GROUP_SIZES,
    LinearShape,
    Processor,
    ScaleForm,
)

INT8PACK_COLUMNS = 16
"""Weights that torch's int8 CPU kernel reads at once, beyond the end of a row if need be."""

FUSED_TOKENS = 24
"""Rows up to which our CUDA kernels multiply with the packed weight without tensor cores. Estimated
from datasheets, not measured: their multiply-adds, at half the float32 rate, take as long as
writing and reading the weight in 16 bit at about 25 rows on a P100."""

TENSOR_TOKENS = 128
"""Rows up to which they do on tensor cores, from compute capability 7.0 on. Estimated by counting
instructions; where the kernels run, the ways are timed."""

RANGE_OCTET = 8
RANGE_LARGEST_HEAD = 256
"""Sizes of heads that `actors/attention/cuda_attention.cu` is written for."""

SPLIT_TOKENS, MOST_SPLITS = 256, 32
"""Fewest tokens of a split of a range, where there are too few ranges for a GPU: what blocks leave
to be put together is a twelfth of what they read, or less. And the most splits."""

INT8_MATRICES = (7, 5)
"""Compute capability from which on GPUs multiply matrices of 8-bit integers."""

LIBRARY_TOKENS = 64
"""Rows up to which our own kernel multiplies codes with codes; it reads the weight once for them,
which by the datasheets takes longer than to multiply. cuBLASLt serves more. Not measured."""

_MOST_CODES = 2**17
"""Columns up to which the sums of products of codes are numbers of 32 bits."""


ASKED_PER_EXPERT = 2
"""Products for each expert up to which every one is computed by itself: as of a plain weight, of
which the second row reads it from cache. Not measured on a GPU."""


def _anywhere(processor: Processor, shape: LinearShape, dtype: str) -> bool:
    return True


def _int4pack_supports(processor: Processor, shape: LinearShape, dtype: str) -> bool:
    """Check what `_convert_weight_to_int4pack_for_cpu` and its product do, and for bfloat16: the
    kernel takes float32 and float16 too, at a hundredth of the speed.
    """
    rows = 64 if shape.form is ScaleForm.SUPER_BLOCKS else 16
    whole = not shape.out_features % rows and (rows == 64 or shape.group in GROUP_SIZES)
    return processor.is_cpu and dtype == "bfloat16" and whole


def _int6pack_supports(processor: Processor, shape: LinearShape, dtype: str) -> bool:
    """Ask for whole blocks of 64 rows, of 5 bit as of 6."""
    whole = shape.out_features % 64 == 0 and shape.in_features % 32 == 0
    return _int4pack_supports(processor, shape, dtype) and whole


def _int3pack_cost(processor: Processor, shape: LinearShape, dtype: str) -> KernelCost:
    if _multiplies_pairs(processor, shape):
        return _PAIRS_COST
    return _INT3LOOP_COST if _has_loops(shape) else _INT3PACK_COST


def _int4pack_cost(processor: Processor, shape: LinearShape, dtype: str) -> KernelCost:
    return _PAIRS_COST if _multiplies_pairs(processor, shape) else _INT4PACK_COST


def _multiplies_pairs(processor: Processor, shape: LinearShape) -> bool:
    """Whether our own loop, `quant.backends.cpu.int4_few`, multiplies few rows by products of
    pairs.
    """
    return "avx512_bf16" in processor.instruction_sets and _has_loops(shape)


def _has_loops(shape: LinearShape) -> bool:
    whole_blocks = shape.out_features % 64 == 0 and shape.in_features % 64 == 0
    return shape.form is not ScaleForm.PAIRS and whole_blocks


def _onednn_supports(processor: Processor, shape: LinearShape, dtype: str) -> bool:
    """Ask for VNNI, else u8 x s8 products saturate, and 64 x 64 tiles, else there is padding."""
    whole_tiles = shape.in_features % 64 == 0 and shape.out_features % 64 == 0
    vnni = processor.is_cpu and "avx512_vnni" in processor.instruction_sets
    return vnni and whole_tiles and dtype in ("bfloat16", "float32")


def _int8pack_supports(processor: Processor, shape: LinearShape, dtype: str) -> bool:
    """Ask for rows that the kernel does not read beyond, and bfloat16, which has a fast path."""
    whole = shape.in_features % INT8PACK_COLUMNS == 0
    return processor.is_cpu and dtype == "bfloat16" and whole


def _nf4_supports(processor: Processor, shape: LinearShape, dtype: str) -> bool:
    """Ask for compute capability 6.0, rows of whole blocks, as bitsandbytes' decode kernel does,
    and a weight that is not quantized already: its codes are not those of nf4.
    """
    whole_blocks = shape.in_features % NF4_BLOCK == 0
    return _has_capability(processor, (6, 0)) and whole_blocks and shape.stored_group is None


def _nf4_cost(processor: Processor, shape: LinearShape, dtype: str) -> KernelCost:
    """bitsandbytes multiplies with the packed weight up to some number of rows: a few without the
    matrix units, and with them, where it uses these, the more the wider the output is. Beyond, it
    writes the weight in 16 bit and reads it again.
    """
    least = processor.compute_capability or (0, 0)
    if least < (7, 5) or dtype == "float32":
        return _NF4_SCALAR_COST
    by_width = next(widths for capability, widths in _NF4_FUSED_ROWS if least >= capability)
    wide = shape.out_features > shape.in_features
    rows = next(each[wide] for width, *each in by_width if shape.out_features >= width)
    return KernelCost(passes=4.0, restores_from=rows + 1)


def _nf4_is_outdone(processor: Processor, shape: LinearShape, dtype: str, rows: int) -> bool:
    """Whether nf4 would be restored for rows that our kernel multiplies packed, which by the count
    of bytes takes four times as long and more, or multiplied without tensor cores that ours uses.
    """
    nf4, own = (cost(processor, shape, dtype) for cost in (_nf4_cost, _cuda_cost))
    is_slower = nf4.scalar is not None and own.scalar is None
    least = _NF4_SCALAR_ROWS + 1 if is_slower else nf4.restores_from
    return least <= rows < own.restores_from and _cuda_supports(processor, shape, dtype)


def _cuda_w8a8_supports(processor: Processor, shape: LinearShape, dtype: str) -> bool:
    """Ask for instructions on 8-bit integers, and columns that are rotated together. 7.0 has those
    of 6.1 too, but its matrix units multiply float16 twice as fast.
    """
    if not _cuda_supports(processor, shape, dtype) or processor.compute_capability is None:
        return False
    columns, capability = shape.in_features, processor.compute_capability
    multiplies = (6, 1) <= capability < (7, 0) or capability >= INT8_MATRICES
    return multiplies and columns % 64 == 0 and columns <= _MOST_CODES


def _cuda_w8a8_cost(processor: Processor, shape: LinearShape, dtype: str) -> KernelCost:
    has_matrices = _has_capability(processor, INT8_MATRICES)
    return _CUDA_W8A8_COST if has_matrices else _CUDA_DP4A_COST


def _cuda_supports(processor: Processor, shape: LinearShape, dtype: str) -> bool:
    """Ask for groups of whole runs of 32 columns or super-blocks, the 8 rows of a block, and a type
    of the GPU.
    """
    least = {"float16": (6, 0), "bfloat16": (8, 0)}.get(dtype)
    if least is None or not _has_capability(processor, least):
        return False
    known = shape.group in GROUP_SIZES or shape.form is ScaleForm.SUPER_BLOCKS
    return known and shape.out_features >= 8


def reads_ranges(processor: Processor, dtype: str, head_dim: int) -> bool:
    """Whether a GPU has llmpq's attention (`actors.attention.cuda`), which reads keys and values
    where they lie.
    """
    known = head_dim % RANGE_OCTET == 0 and head_dim <= RANGE_LARGEST_HEAD
    return known and has_kernels(processor, dtype)


def has_kernels(processor: Processor, dtype: str) -> bool:
    """Whether llmpq's kernels for GPUs compute there in this type."""
    return dtype in ("float16", "bfloat16") and _has_capability(processor, (6, 0))


def _cuda_cost(processor: Processor, shape: LinearShape, dtype: str) -> KernelCost:
    tensor_cores = _has_capability(processor, (8, 0) if dtype == "bfloat16" else (7, 0))
    return _TENSOR_COST if tensor_cores else _CUDA_COST


def _has_capability(processor: Processor, least: tuple[int, int]) -> bool:
    return processor.compute_capability is not None and processor.compute_capability >= least


# int*pack: measured on one AVX-512 core against bf16 (`speed.linear`). A few rows are multiplied
# in float32, at 0.35 to 0.4 of the rate of bf16; from 32 (24 for 8 bit) on, weights are restored,
# which takes as long as the product of 40 rows in bf16 (without numba of 130). 3 bit is always
# restored to 4, by one row in 0.7 of the time of bf16. A product with 64 x 64, for which others
# need 5 to 15 us, takes it 42, and onednn_w8a8, which rotates and rounds activations, 130 (CPU time
# of a core; with 256 x 512 of experts in turns 200, 26 of which are its bytes').
_INT3PACK_COST = KernelCost(
    passes=16.0, restores_from=32, few_passes=3.4, scalar=0.44, overhead_s=3e-5
)
# Loops of our own read 3 bit as it is, in the time of 4 bit (measured with AVX2 alone).
_INT3LOOP_COST = replace(_INT3PACK_COST, few_passes=0.0)
_INT4PACK_COST = KernelCost(passes=13.0, restores_from=32, scalar=0.44)
# With products of pairs and narrow scales, few rows are multiplied as fast as the bytes come, and
# from 4 on at 0.6 of the rate of bf16 (4096 x 4096 on a core of Zen 5).
_PAIRS_COST = KernelCost(passes=13.0, restores_from=64, few_rate=0.6, overhead_s=2e-5)
_INT8PACK_COST = KernelCost(passes=14.0, restores_from=24, scalar=0.37)
# Measured: 2.7, 2.0, 1.8 and 1.6 times as fast as bf16 at 1, 8, 64 and 512 rows.
_ONEDNN_COST = KernelCost(integer=True, overhead_s=1.5e-4)
# As our own kernels below, for fewer rows. A V100 multiplies four rows longer than it reads.
_NF4_SCALAR_ROWS = 3
_NF4_SCALAR_COST = KernelCost(passes=4.0, restores_from=8, scalar=0.45)
# Rows that bitsandbytes 0.50 multiplies with the packed weight, by capability and least number of
# outputs, where there are no more outputs than inputs and where there are more: read from
# `_gemm_4bit_use_custom_cuda` of its backends/cuda/ops.py for large weights and the multiprocessors
# of RTX 5090, B200, H100, RTX 4090, A10G-like (84), A100 and T4.
_NF4_FUSED_ROWS = (
    ((12, 0), ((32577, 256, 256), (21697, 128, 128), (8641, 96, 64), (5377, 8, 8), (0, 8, 8))),
    ((10, 0), ((28353, 32, 32), (9409, 4, 8), (0, 4, 4))),
    (
        (9, 0),
        (
            (25281, 64, 64),
            (16833, 48, 48),
            (8385, 32, 32),
            (6273, 16, 16),
            (4161, 5, 16),
            (0, 5, 5),
        ),
    ),
    ((8, 9), ((24513, 256, 256), (16321, 128, 128), (12737, 128, 128), (6529, 128, 64), (0, 8, 8))),
    ((8, 6), ((5313, 128, 128), (2625, 64, 64), (0, 16, 16))),
    ((8, 0), ((20673, 128, 128), (6849, 32, 64), (4097, 16, 128), (0, 5, 128))),
    ((7, 5), ((7617, 64, 128), (1217, 64, 64), (0, 32, 32))),
)
# Activations are rounded in a launch of their own, and cuBLASLt's sums scaled in another one; dp4a
# waits for its loads about half of the time (counted in its code). Estimated: no GPU has run them.
_CUDA_W8A8_COST = KernelCost(rate=0.8, integer=True, overhead_s=5e-6)
_CUDA_DP4A_COST = KernelCost(rate=0.5, integer=True, overhead_s=5e-6)
# Estimated, as no GPU has run them yet. Below 7.0 few rows are multiply-adds in float32, which are
# half of the instructions (counted in the code for compute capability 9.0); then restored, as nf4.
_CUDA_COST = KernelCost(passes=4.0, restores_from=FUSED_TOKENS + 1, scalar=0.45)
# From there on matrix instructions take nine tenths of the cycles of the kernels' loops, or more.
_TENSOR_COST = KernelCost(passes=4.0, restores_from=TENSOR_TOKENS + 1, few_rate=0.9)
# torch_* below: unpack, subtract, scale in float32 and convert are about six passes of 4 bytes. On
# a CPU blocks of rows stay in its caches: 0.3 to 0.8 times as fast as bf16.

KERNEL_RULES: tuple[KernelRule, ...] = (
    KernelRule("plain", FULL_BITS, _anywhere, plain_bytes, kernel=None),
    KernelRule(
        "int3pack", 3, _int4pack_supports, packed_bytes(3), "cpu.int4pack.Int3Pack",
        own_cost=_int3pack_cost,
    ),
    KernelRule(
        "int4pack", 4, _int4pack_supports, packed_bytes(4), "cpu.int4pack.Int4Pack",
        own_cost=_int4pack_cost,
    ),
    KernelRule(
        "int5pack", 5, _int6pack_supports, packed_bytes(5), "cpu.int4pack.Int5Pack",
        own_cost=_int4pack_cost,
    ),
    KernelRule(
        "int6pack", 6, _int6pack_supports, packed_bytes(6), "cpu.int4pack.Int6Pack",
        own_cost=_int4pack_cost,
    ),
    KernelRule(
        "onednn_w8a8", 8, _onednn_supports, onednn_bytes, "cpu.int8pack.OneDnnW8A8",
        _ONEDNN_COST,
    ),
    KernelRule(
        "int8pack", 8, _int8pack_supports, int8_row_bytes, "cpu.int8pack.Int8Pack",
        _INT8PACK_COST,
    ),
    KernelRule(
        "bnb_nf4", 4, _nf4_supports, nf4_bytes, "bnb.BnbNf4",
        own_cost=_nf4_cost, is_outdone=_nf4_is_outdone,
    ),
    KernelRule(
        "cuda_w8a8", 8, _cuda_w8a8_supports, rotated_bytes, "cuda.w8a8.CudaW8A8",
        own_cost=_cuda_w8a8_cost, stand_in="cuda_8bit",
    ),
    *(
        KernelRule(
            f"cuda_{bits}bit", bits, _cuda_supports, packed_bytes(bits),
            f"cuda.packed.Cuda{bits}Bit", own_cost=_cuda_cost,
        )
        for bits in AFFINE_BITS
    ),
    KernelRule(
        "cuda_8bit", 8, _cuda_supports, int8_row_bytes, "cuda.packed.Cuda8Bit",
        own_cost=_cuda_cost,
    ),
    *(
        KernelRule(
            f"torch_{bits}bit", bits, _anywhere, packed_bytes(bits), f"portable.Torch{bits}Bit",
            KernelCost(passes=24.0 if bits == 4 else 28.0),
        )
        for bits in AFFINE_BITS
    ),
    KernelRule(
        "torch_8bit", 8, _anywhere, int8_row_bytes, "portable.Torch8Bit",
        KernelCost(passes=20.0),
    ),
)  # fmt: skip
"""Every backend in order of preference; the last of each bitwidth runs everywhere, on any shape."""


HOST_BACKENDS = {3: "int3pack", 4: "int4pack", 5: "int5pack", 6: "int6pack", 8: "int8pack"}
"""Backends by bits of weights in the memory of a GPU's host: CPUs multiply with them, and GPUs can
restore them, which no layout of oneDNN's allows."""


_ORDINARY_SHAPE = LinearShape(in_features=4096, out_features=4096)
"""A usual shape: hidden sizes of language models are multiples of 64."""


def rule_for(
    processor: Processor,
    bits: int,
    shape: LinearShape,
    dtype: str,
    backend: str | None = None,
    decode_rows: int = 0,
) -> KernelRule:
    """Return the rule of the first backend that takes this weight and is not outdone in decode
    steps of `decode_rows` (0: not known), or that of `backend`, and where it does not take the
    shape that which takes every shape; SpecError where there is none.
    """
    rules = _rules_of(bits, dtype)
    if backend is not None:
        named = next((rule for rule in rules if rule.name == backend), None)
        if named is None:
            names = ", ".join(rule.name for rule in rules)
            raise SpecError(f"no backend {backend!r} for {bits} bits; choose one of {names}")
        return named if named.supports(processor, shape, dtype) else fallback_rule(bits)
    return next(
        rule
        for rule in rules
        if rule.supports(processor, shape, dtype)
        and not (rule.is_outdone and rule.is_outdone(processor, shape, dtype, decode_rows))
    )


def fallback_rule(bits: int) -> KernelRule:
    return next(rule for rule in reversed(KERNEL_RULES) if rule.bits == bits)


def backend_name(
    processor: Processor, bits: int, dtype: str, is_stored: bool = False, decode_rows: int = 0
) -> str:
    """Name the preferred backend of ordinary shapes; `is_stored`: the checkpoint is quantized."""
    shape = replace(_ORDINARY_SHAPE, stored_group=GROUP_SIZES[0]) if is_stored else _ORDINARY_SHAPE
    return rule_for(processor, bits, shape, dtype, decode_rows=decode_rows).name


def _rules_of(bits: int, dtype: str) -> list[KernelRule]:
    if bits not in BITWIDTHS:
        raise SpecError(f"bitwidth {bits} is not one of {', '.join(map(str, BITWIDTHS))}")
    if dtype not in DTYPE_BYTES:
        raise SpecError(f"compute type {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
    return [rule for rule in KERNEL_RULES if rule.bits == bits]
