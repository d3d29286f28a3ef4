"""Bitwidths, group sizes, and what each kernel backend takes and occupies, without torch.

The planner sizes stages with these rules and the backends call them too, so that a plan and the
bytes really allocated cannot drift apart. Bytes are those of the tensors; what an allocator rounds
up to is the planner's slack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from quant.common.errors import SpecError

FULL_BITS = 16
"""Stands for the compute type, whatever its width: not quantized."""

BITWIDTHS = (3, 4, 8, FULL_BITS)
KV_BITWIDTHS = (8, FULL_BITS)
ROUNDINGS = ("nearest", "searched", "stochastic")
"""Ways of rounding a weight that is quantized while it loads; see `quant.rounding`."""

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

GROUP_SIZES = (128, 64, 32)
"""Group sizes tried in this order; all are among those that torch's int4pack matmul takes."""

INT8PACK_COLUMNS = 16
"""torch's int8 CPU kernel reads rows so many weights at a time, beyond their end if need be."""

NF4_BLOCK = 64
"""bitsandbytes' default block size for 4-bit weights; a block is quantized by its own maximum."""


@dataclass(frozen=True)
class LinearShape:
    """One weight matrix `[out_features, in_features]`.

    `stored_group`: weights that share a scale and a zero where the checkpoint is quantized already,
    None where it is not.
    """

    in_features: int
    out_features: int
    stored_group: int | None = None

    @property
    def group(self) -> int:
        """Weights that share a scale and a zero at 3 and 4 bit."""
        return self.stored_group or group_size(self.in_features)

    @property
    def parameters(self) -> int:
        """Number of weights, bias not counted."""
        return self.in_features * self.out_features


@dataclass(frozen=True)
class Processor:
    """What a kernel backend must know of a device; `compute_capability` is None for a CPU."""

    compute_capability: tuple[int, int] | None = None
    instruction_sets: frozenset[str] = frozenset({"avx512_bf16", "avx512_vnni"})

    @property
    def is_cpu(self) -> bool:
        """Whether kernels run on the host processor."""
        return self.compute_capability is None


@dataclass(frozen=True)
class KernelRule:
    """When a backend can hold a weight matrix at `bits`, and how many bytes it then allocates.

    `supports(processor, shape, dtype)` and `nbytes(shape, dtype)`; `dtype` is the compute type's
    name (a key of `DTYPE_BYTES`). Biases are not part of it: they stay in the compute type.
    """

    name: str
    bits: int
    supports: Callable[[Processor, LinearShape, str], bool]
    nbytes: Callable[[LinearShape, str], int]


_ORDINARY_SHAPE = LinearShape(in_features=4096, out_features=4096)
"""Hidden sizes of language models are multiples of 64: any such shape tells the usual backend."""


def group_size(in_features: int) -> int:
    """Weights that share a scale and a zero at 3 and 4 bit: 128, 64, 32 or else the whole row."""
    return next((size for size in GROUP_SIZES if in_features % size == 0), in_features)


def _groups_bytes(shape: LinearShape) -> int:
    """Scale and zero of every group, 16 bit each (bfloat16)."""
    return 4 * shape.out_features * (shape.in_features // shape.group)


def _anywhere(processor: Processor, shape: LinearShape, dtype: str) -> bool:
    return True


def _plain_bytes(shape: LinearShape, dtype: str) -> int:
    return shape.parameters * DTYPE_BYTES[dtype]


def _torch_3bit_bytes(shape: LinearShape, dtype: str) -> int:
    """Three planes of one bit per weight, each row padded to whole bytes."""
    return 3 * shape.out_features * -(-shape.in_features // 8) + _groups_bytes(shape)


def _torch_4bit_bytes(shape: LinearShape, dtype: str) -> int:
    """Two codes per byte, each row padded to whole bytes."""
    return shape.out_features * -(-shape.in_features // 2) + _groups_bytes(shape)


def _int8_row_bytes(shape: LinearShape, dtype: str) -> int:
    """One byte per weight and a 32-bit scale per output row."""
    return shape.parameters + 4 * shape.out_features


def _int4pack_supports(processor: Processor, shape: LinearShape, dtype: str) -> bool:
    """What `_convert_weight_to_int4pack_for_cpu` and its matmul check, and bfloat16 activations.

    The kernel also takes float32 and float16, at a hundredth of the speed.
    """
    whole_groups = shape.group in GROUP_SIZES
    return processor.is_cpu and dtype == "bfloat16" and whole_groups and not shape.out_features % 16


def _onednn_supports(processor: Processor, shape: LinearShape, dtype: str) -> bool:
    """Without VNNI u8 x s8 products saturate; whole 64 x 64 tiles are packed without padding."""
    whole_tiles = shape.in_features % 64 == 0 and shape.out_features % 64 == 0
    vnni = processor.is_cpu and "avx512_vnni" in processor.instruction_sets
    return vnni and whole_tiles and dtype in ("bfloat16", "float32")


def _int8pack_supports(processor: Processor, shape: LinearShape, dtype: str) -> bool:
    """Rows that the kernel does not read beyond; other types than bfloat16 have no fast path."""
    whole = shape.in_features % INT8PACK_COLUMNS == 0
    return processor.is_cpu and dtype == "bfloat16" and whole


def _onednn_bytes(shape: LinearShape, dtype: str) -> int:
    """Codes, a 32-bit compensation (inside the packed blob) and scale per row, and one zero.

    Measured with `torch.ops.mkldnn._nbytes` (torch 2.13): oneDNN pads both sides to 64 and adds
    4 bytes per padded row.
    """
    return shape.parameters + 8 * shape.out_features + 4


def _nf4_supports(processor: Processor, shape: LinearShape, dtype: str) -> bool:
    """Compute capability 6.0; rows of whole blocks, which bitsandbytes' decode kernel asks for; no
    codes of a checkpoint, which are not nf4's.
    """
    whole_blocks = shape.in_features % NF4_BLOCK == 0
    return _has_capability(processor, (6, 0)) and whole_blocks and shape.stored_group is None


def _nf4_bytes(shape: LinearShape, dtype: str) -> int:
    """Two codes per byte, a 32-bit maximum per block of 64, and the table of 16 32-bit values."""
    return shape.parameters // 2 + 4 * (shape.parameters // NF4_BLOCK) + 4 * 16


def _bnb_int8_supports(processor: Processor, shape: LinearShape, dtype: str) -> bool:
    """INT8 tensor cores: compute capability 7.5."""
    return _has_capability(processor, (7, 5))


def _cuda_supports(processor: Processor, shape: LinearShape, dtype: str) -> bool:
    """Groups of whole runs of 32 columns, the 8 rows of a block; bfloat16 where GPUs have it."""
    least = {"float16": (6, 0), "bfloat16": (8, 0)}.get(dtype)
    if least is None or not _has_capability(processor, least):
        return False
    return shape.group in GROUP_SIZES and shape.out_features >= 8


def _has_capability(processor: Processor, least: tuple[int, int]) -> bool:
    return processor.compute_capability is not None and processor.compute_capability >= least


KERNEL_RULES: tuple[KernelRule, ...] = (
    KernelRule("plain", 16, _anywhere, _plain_bytes),
    KernelRule("int3pack", 3, _int4pack_supports, _torch_3bit_bytes),
    KernelRule("int4pack", 4, _int4pack_supports, _torch_4bit_bytes),
    KernelRule("onednn_w8a8", 8, _onednn_supports, _onednn_bytes),
    KernelRule("int8pack", 8, _int8pack_supports, _int8_row_bytes),
    KernelRule("bnb_nf4", 4, _nf4_supports, _nf4_bytes),
    KernelRule("bnb_int8", 8, _bnb_int8_supports, _int8_row_bytes),
    KernelRule("cuda_3bit", 3, _cuda_supports, _torch_3bit_bytes),
    KernelRule("cuda_4bit", 4, _cuda_supports, _torch_4bit_bytes),
    KernelRule("cuda_8bit", 8, _cuda_supports, _int8_row_bytes),
    KernelRule("torch_3bit", 3, _anywhere, _torch_3bit_bytes),
    KernelRule("torch_4bit", 4, _anywhere, _torch_4bit_bytes),
    KernelRule("torch_8bit", 8, _anywhere, _int8_row_bytes),
)
"""Every backend in order of preference; the last of each bitwidth runs everywhere, on any shape."""


def rule_for(
    processor: Processor, bits: int, shape: LinearShape, dtype: str, backend: str | None = None
) -> KernelRule:
    """The rule of `backend`, or of the first backend that takes this weight.

    SpecError for an unknown bitwidth, compute type or backend, or where the named backend cannot
    hold the weight.
    """
    rules = _rules_of(bits, dtype)
    if backend is None:
        return next(rule for rule in rules if rule.supports(processor, shape, dtype))
    named = _named(rules, bits, backend)
    if not named.supports(processor, shape, dtype):
        raise SpecError(
            f"backend {backend} cannot hold a {bits}-bit weight of {shape.out_features} x "
            f"{shape.in_features} in {dtype} on {_describe(processor)}; {rules[-1].name} can"
        )
    return named


def fallback_rule(bits: int) -> KernelRule:
    """The backend of this bitwidth that runs everywhere, on any shape and compute type."""
    return next(rule for rule in reversed(KERNEL_RULES) if rule.bits == bits)


def layer_rule(
    processor: Processor, bits: int, shape: LinearShape, dtype: str, backend: str | None = None
) -> KernelRule:
    """The rule of one linear of a layer planned for `backend`.

    As `rule_for`, except that a shape that the named backend does not take falls to the one that
    takes every shape.
    """
    if backend is None:
        return rule_for(processor, bits, shape, dtype)
    named = _named(_rules_of(bits, dtype), bits, backend)
    return named if named.supports(processor, shape, dtype) else fallback_rule(bits)


def backend_name(processor: Processor, bits: int, dtype: str, is_stored: bool = False) -> str:
    """The preferred backend for weights of ordinary shape; odd shapes may get another one.

    `is_stored`: for weights that the checkpoint holds quantized already.
    """
    shape = replace(_ORDINARY_SHAPE, stored_group=GROUP_SIZES[0]) if is_stored else _ORDINARY_SHAPE
    return rule_for(processor, bits, shape, dtype).name


def _rules_of(bits: int, dtype: str) -> list[KernelRule]:
    if bits not in BITWIDTHS:
        raise SpecError(f"bitwidth {bits} is not one of {', '.join(map(str, BITWIDTHS))}")
    if dtype not in DTYPE_BYTES:
        raise SpecError(f"compute type {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
    return [rule for rule in KERNEL_RULES if rule.bits == bits]


def _named(rules: list[KernelRule], bits: int, backend: str) -> KernelRule:
    for rule in rules:
        if rule.name == backend:
            return rule
    names = ", ".join(rule.name for rule in rules)
    raise SpecError(f"no backend {backend!r} for {bits} bits; choose one of {names}")


def _describe(processor: Processor) -> str:
    if processor.compute_capability is None:
        return f"a CPU with {', '.join(sorted(processor.instruction_sets)) or 'no AVX-512'}"
    return "a GPU of compute capability {}.{}".format(*processor.compute_capability)
