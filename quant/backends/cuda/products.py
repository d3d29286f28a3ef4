"""Products of one GPU with packed weights: with the codes themselves, a few rows at a time or on
tensor cores, or with the weight restored to 16 bit.

Which way is fastest for a number of rows depends on the GPU and the shape. It is timed at first
use, which `warm_up` brings forward, and kept for the process; where nothing can be timed, while a
CUDA graph is recorded, an estimate stands.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from quant.backends.base import form_of, groups_of
from quant.backends.cuda.driver import THREADS, Kernels, kernels_for
from quant.backends.table import FUSED_TOKENS, TENSOR_TOKENS
from quant.devices import row_blocks
from quant.scheme import NARROW_GROUP, ScaleForm

_FILES = ("kernels.cu", "mma.cuh", "restoring.cuh", "tensor_cores.cu")
SOURCE = tuple(map(Path(__file__).with_name, _FILES))
KERNELS = ("one_token", "one_expert", "four_tokens", "eight_tokens", "restore")

_TILE_TOKENS = 8
_TILES = (1, 2, 4, 8)
"""Tiles of 8 tokens that a block on tensor cores takes; more would not leave room for the sums."""
TENSOR_KERNELS = tuple(f"tensor_{_TILE_TOKENS * tiles}" for tiles in _TILES)

PACKED, TENSOR, RESTORED = "packed", "tensor", "restored"
ROW_BUCKETS = (4, 8, 16, 32, 64, 128, 256)
"""Rows that are timed; fewer rows go the way of the next of them, more are restored."""

_ONE_TOKEN_ROWS = 2
"""Rows that are multiplied one by one: the second reads the weight from cache, and still takes
fewer instructions than the kernel for four."""

_BLOCK_ROWS = 8
"""Rows of the weight that a block of threads works on, in kernels without tensor cores."""
_TENSOR_BLOCK_ROWS = 128
_STAGE_BYTES = {3: 48, 4: 64, 5: 80, 6: 96, 8: 64}
"""Bytes of a row that a block on tensor cores reads at a time, by bitwidth."""
_PARTIAL_BYTES = 1 << 25
_MOST_TILES = 4096
_STREAMS = 64
_ALIGNMENT = 16
_OCTET = 8
_REPEATS = 3
_LEAST_FILLED = 1 << 26
"""Bytes that are written before each timed product: 0.07 ms at least, which launches stay below."""

Timer = Callable[[Callable[[], None]], float]


class Width(ctypes.Structure):
    """The struct `Width` of the source: octets and groups of a row, log2 of a group's octets, and
    whether scales and zeros are narrow. Groups of super-blocks are their pairs of bytes.
    """

    _fields_ = (
        ("octets", ctypes.c_uint),
        ("groups", ctypes.c_uint),
        ("group_shift", ctypes.c_uint),
        ("narrow", ctypes.c_uint),
    )


class Codes(NamedTuple):
    """A weight as `CudaPacked` holds it."""

    packed: torch.Tensor
    scales: torch.Tensor
    columns: int
    bits: int

    @property
    def rows(self) -> int:
        return self.packed.shape[0]

    @property
    def width(self) -> Width:
        form, octets = form_of(self.scales), self.columns // _OCTET
        is_super = form is ScaleForm.SUPER_BLOCKS
        groups = self.columns // NARROW_GROUP if is_super else groups_of(self.scales)
        shift = (octets // groups).bit_length() - 1
        return Width(octets, groups, shift, form is ScaleForm.NARROW)


class Product(NamedTuple):
    """Activations `x` `[tokens, columns]`, `bias` `[rows]` or None, and what is computed: `out`
    `[tokens, rows]`.
    """

    codes: Codes
    x: torch.Tensor
    bias: torch.Tensor | None
    out: torch.Tensor


class CudaProducts:
    """Products of activations of `dtype`; `seconds_of` times work on the device, without it
    estimates stand.
    """

    def __init__(
        self,
        kernels: Kernels,
        dtype: torch.dtype,
        multiprocessors: int,
        seconds_of: Timer | None = None,
    ) -> None:
        self._kernels = kernels
        self._dtype = dtype
        self._multiprocessors = multiprocessors
        self._seconds_of = seconds_of
        self._fastest: dict[tuple[int, int, int], str] = {}
        self._ways = {PACKED: self._multiply_packed, RESTORED: self._multiply_restored}
        if TENSOR_KERNELS[0] in kernels.functions:
            self._ways[TENSOR] = self._multiply_on_tensor_cores

    @property
    def ways(self) -> tuple[str, ...]:
        return tuple(self._ways)

    def multiply(
        self,
        codes: Codes,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        way: str | None = None,
    ) -> torch.Tensor:
        """Return `x @ weight.t() + bias` for `x` `[..., columns]`; `way` None: the fastest."""
        tokens = x.reshape(-1, codes.columns).contiguous()
        if tokens.data_ptr() % _ALIGNMENT:
            tokens = tokens.clone()
        out = tokens.new_empty(len(tokens), codes.rows)
        bias = None if bias is None else bias.to(x.dtype)
        if len(tokens) > 0:
            self._ways[way or self.way_for(codes, len(tokens))](Product(codes, tokens, bias, out))
        return out.view(*x.shape[:-1], codes.rows)

    def multiply_asked(
        self,
        codes: Codes,
        rows: int,
        x: torch.Tensor,
        asked: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply `x` `[tokens, columns]` with the weights of the experts that each token asks,
        `asked` int64 `[tokens, k]`, to `[tokens * k, rows]`; the `rows` of an expert lie behind
        those of the one before in `codes` and `bias`. By one launch, of which the host knows
        nothing but sizes.
        """
        x = x.contiguous()
        x = x.clone() if x.data_ptr() % _ALIGNMENT else x
        products, bias = asked.numel(), None if bias is None else bias.to(x.dtype)
        out = x.new_empty(products, rows)
        if products:
            self._kernels.launch(
                "one_expert", -(-rows // _BLOCK_ROWS) * products,
                x, codes.packed, codes.scales, bias, asked.contiguous(), out, products,
                asked.shape[1], rows, codes.width,
            )  # fmt: skip
        return out

    def warm_up(self, codes: Codes) -> None:
        for rows in ROW_BUCKETS:
            self.way_for(codes, rows)

    def way_for(self, codes: Codes, rows: int) -> str:
        if rows <= _ONE_TOKEN_ROWS:
            return PACKED
        bucket = next((bucket for bucket in ROW_BUCKETS if rows <= bucket), None)
        if bucket is None:
            return RESTORED
        key = (codes.rows, codes.columns, bucket)
        if key not in self._fastest:
            self._fastest[key] = self._timed(codes, bucket) or self._estimated(bucket)
        return self._fastest[key]

    def _timed(self, codes: Codes, rows: int) -> str | None:
        if self._seconds_of is None or torch.cuda.is_current_stream_capturing():
            return None
        x = codes.packed.new_zeros(rows, codes.columns, dtype=self._dtype)
        product = Product(codes, x, None, x.new_empty(rows, codes.rows))
        seconds = {
            name: self._seconds_of(functools.partial(way, product))
            for name, way in self._ways.items()
        }
        return min(seconds, key=seconds.__getitem__)

    def _estimated(self, rows: int) -> str:
        if TENSOR in self._ways:
            return TENSOR if rows <= TENSOR_TOKENS else RESTORED
        return PACKED if rows <= FUSED_TOKENS else RESTORED

    def _multiply_packed(self, product: Product) -> None:
        codes, x, bias, out = product
        tokens = len(x)
        name, at_once = ("four_tokens", 4) if tokens <= 4 else ("eight_tokens", 8)
        if tokens <= _ONE_TOKEN_ROWS:
            name, at_once = "one_token", 1
        self._kernels.launch(
            name, -(-codes.rows // _BLOCK_ROWS) * -(-tokens // at_once),
            x, codes.packed, codes.scales, bias, out, tokens, codes.rows, codes.width,
        )  # fmt: skip

    def _multiply_on_tensor_cores(self, product: Product) -> None:
        codes, x, bias, out = product
        shape = (codes.rows, codes.columns, codes.bits)
        grid = Grid.of(shape, len(x), self._multiprocessors)
        partial = arrived = None
        if grid.splits > 1:
            partial = out.new_empty(grid.partial_bytes // 4, dtype=torch.float32)
            arrived = _arrived(out.device, self._kernels.stream)
        self._kernels.launch(
            f"tensor_{grid.tokens}", grid.blocks,
            x, codes.packed, codes.scales, bias, out, len(x), codes.rows, codes.width,
            partial, arrived, grid.splits,
        )  # fmt: skip

    def _multiply_restored(self, product: Product) -> None:
        codes, x, bias, out = product
        blocks = list(row_blocks(codes.rows, codes.columns, x.device))
        scratch = x.new_empty(blocks[0].stop, codes.columns)
        for block in blocks:
            weight = scratch[: block.stop - block.start]
            grid = -(-weight.numel() // (_OCTET * THREADS))
            rows = (block.start, len(weight))
            packed, scales = codes.packed, codes.scales
            self._kernels.launch("restore", grid, packed, scales, weight, *rows, codes.width)
            if bias is None:
                torch.mm(x, weight.t(), out=out[:, block])
            else:
                torch.addmm(bias[block], x, weight.t(), out=out[:, block])


@dataclass(frozen=True)
class Grid:
    """How blocks of tensor-core kernels share a product: `tokens` of a block, `runs` of them,
    `down` blocks of 128 rows, and parts of the columns, `splits`.
    """

    tokens: int
    runs: int
    down: int
    splits: int

    @classmethod
    @functools.cache
    def of(cls, shape: tuple[int, int, int], tokens: int, multiprocessors: int) -> Grid:
        """`shape`: rows, columns and bitwidth of the weight."""
        rows, columns, bits = shape
        tiles = next((each for each in _TILES if tokens <= _TILE_TOKENS * each), _TILES[-1])
        runs, down = -(-tokens // (_TILE_TOKENS * tiles)), -(-rows // _TENSOR_BLOCK_ROWS)
        stages = -(-columns * bits // (8 * _STAGE_BYTES[bits]))
        splits = splits_of(runs * down, stages, tiles, multiprocessors)
        return cls(_TILE_TOKENS * tiles, runs, down, splits)

    @property
    def blocks(self) -> int:
        return self.runs * self.down * self.splits

    @property
    def partial_bytes(self) -> int:
        """What blocks write for the last one of a tile, which reads it."""
        return 4 * self.blocks * self.tokens * _TENSOR_BLOCK_ROWS if self.splits > 1 else 0

    def read_bytes(self, weight_bytes: int, activation_bytes: int) -> int:
        """Bytes that go to multiprocessors; from memory the weight comes once."""
        return self.runs * weight_bytes + self.down * activation_bytes + self.partial_bytes


def splits_of(tiles: int, stages: int, width: int, multiprocessors: int) -> int:
    """Return into how many parts the columns are split: of the sums of `width` * 8 tokens in each
    of `tiles` of the output, which take `stages` each.

    Counted in kB: a stage reads 8 of weights and 2 * `width` of activations, of which a
    multiprocessor needs two blocks at least in flight; a part leaves 4 * `width`, which the last
    block of a tile reads while others may have nothing left to do.
    """
    if tiles >= 4 * multiprocessors or tiles > _MOST_TILES:
        return 1

    def cost(splits: int) -> float:
        blocks = -(-tiles * splits // multiprocessors)
        reading = max(2, blocks) * -(-stages // splits) * (8 + 2 * width)
        return reading + (4 * width * (blocks + 2 * splits) if splits > 1 else 0)

    most = _PARTIAL_BYTES // (tiles * width * 4 * _TILE_TOKENS * _TENSOR_BLOCK_ROWS)
    return min(range(1, max(1, min(stages, most)) + 1), key=cost)


def has_tensor_cores(capability: tuple[int, int], dtype: torch.dtype) -> bool:
    return capability >= ((8, 0) if dtype == torch.bfloat16 else (7, 0))


@functools.cache
def products_for(
    bits: int, super_blocks: bool, dtype: torch.dtype, device: torch.device, on_tensor_cores: bool
) -> CudaProducts:
    """Compile the kernels for a GPU, once a process; CudaError says why that cannot be done."""
    source = SOURCE if on_tensor_cores else SOURCE[:1]
    names = (*KERNELS, *TENSOR_KERNELS) if on_tensor_cores else KERNELS
    own = {"BITS": bits, "SUPER_BLOCKS": int(super_blocks)}
    kernels = kernels_for(source, names, dtype, device, **own)
    _zeros(device)  # while no graph is recorded
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return CudaProducts(kernels, dtype, multiprocessors, functools.partial(_gpu_seconds, device))


def _gpu_seconds(device: torch.device, work: Callable[[], None]) -> float:
    """Seconds of the GPU, its cache full of something else. Filling the cache takes longer than the
    launches, which therefore are not timed.
    """
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    other = torch.empty(max(2 * cache_bytes, _LEAST_FILLED), dtype=torch.uint8, device=device)
    milliseconds: list[float] = []
    with torch.cuda.device(device):
        work()
        for _ in range(_REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            other.zero_()
            begin.record()
            work()
            end.record()
            end.synchronize()
            milliseconds.append(begin.elapsed_time(end))
    return min(milliseconds) / 1000


@functools.cache
def _arrived(device: torch.device, stream: int) -> torch.Tensor:
    """Zeros by which the blocks of a launch find their last one. Products on different streams may
    run at once.
    """
    return next(_zeros(device))


@functools.cache
def _zeros(device: torch.device) -> Iterator[torch.Tensor]:
    zeros = torch.zeros(_STREAMS, _MOST_TILES, dtype=torch.int32, device=device)
    return itertools.cycle(zeros.unbind())
