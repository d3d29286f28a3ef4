"""The CUDA source of attention, run on the CPU by an emulator, against float64."""

from __future__ import annotations

import ctypes
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.attention import cuda
from actors.attention.addresses import Addresses, Scoring
from actors.attention.cuda import (
    KERNELS,
    SOURCE,
    RangeAttention,
    as_stored,
    reference,
    self_test,
)
from actors.attention.stored import Stored
from actors.messages import MicroBatch
from quant.backends.cuda.driver import CudaError, compile_cuda, text_of
from tests.actors.configs import LAYERS
from tests.actors.models import save_tiny, stages_of
from tests.actors.own_kernels import range_attention, use_own_kernels, with_wide_heads
from tests.cuda_emulation import CPU, check_machine_code, needs_compiler, needs_nvrtc

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
FEW, MANY = 1, 1000
"""Blocks that a GPU asks for: none is split, or every range is."""


def attention(head_dim: int, dtype: torch.dtype, coded: bool, blocks: int = FEW) -> RangeAttention:
    return range_attention(head_dim, dtype, coded, blocks=blocks)


def ragged(*requests: tuple[int, int]) -> MicroBatch:
    """Requests of an earlier and a new number of tokens, in ranges with holes between them."""
    starts, counts = (np.array(each) for each in zip(*requests, strict=True))
    begins = np.cumsum(starts + counts + 3) - starts - counts
    return MicroBatch(np.arange(len(requests)), starts, counts, begins)


class Case:
    """A cache, queries and what float64 makes of them."""

    def __init__(
        self,
        batch: MicroBatch,
        heads: tuple[int, int],
        head_dim: int,
        dtype: torch.dtype = torch.float16,
        coded: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(head_dim)
        slots = int((batch.begins + batch.lengths).max()) + 2
        self.batch, self.where = batch, Addresses.of(batch, CPU)
        numbers = [torch.randn(heads[1], slots, head_dim, generator=generator) for _ in range(2)]
        numbers[0][:, :, 0] *= 4
        self.keys, self.values = (as_stored(each, dtype, coded, CPU) for each in numbers)
        shape = (int(batch.counts.sum()), heads[0], head_dim)
        self.query = torch.randn(shape, generator=generator).to(dtype)

    def exact(self, scoring: Scoring) -> Tensor:
        keys, values = (whole(each) for each in (self.keys, self.values))
        return reference(self.query.double(), self.batch, scoring, keys, values)

    def check(self, found: Tensor, exact: Tensor) -> None:
        """Rounded once to the type, after sums in float32."""
        assert found.dtype == self.query.dtype
        error = (found.double() - exact).abs()
        limit = torch.finfo(found.dtype).eps / 2 * exact.abs() + 2e-5 * exact.abs().max()
        assert (error <= limit).all(), float((error / limit).max())


def whole(stored: Stored) -> Tensor:
    return stored.read(lambda part: part, torch.float64).double()


RAGGED = ((130, 1), (0, 1), (63, 1), (64, 1), (200, 1))
CHUNKS = ((130, 1), (40, 5), (0, 9), (70, 20))


@needs_compiler
@pytest.mark.parametrize(
    ("head_dim", "heads", "dtype", "coded"),
    [
        (80, (6, 3), "bfloat16", False),
        (128, (7, 1), "float16", True),
        (256, (8, 1), "bfloat16", True),
        *(
            pytest.param(*case, marks=pytest.mark.rare)
            for case in (
                (64, (4, 4), "float16", False),
                (64, (8, 2), "bfloat16", True),
                (16, (11, 1), "float16", False),
            )
        ),
    ],
)
def test_every_new_token_sees_its_own_range(
    head_dim: int, heads: tuple[int, int], dtype: str, coded: bool
) -> None:
    """One to eight rows a block and more than it takes; octets that leave lanes idle."""
    kernels = attention(head_dim, DTYPES[dtype], coded)
    scoring = Scoring(head_dim**-0.5)
    for requests in (RAGGED, CHUNKS):
        case = Case(ragged(*requests), heads, head_dim, DTYPES[dtype], coded)
        found = kernels.attend(case.query, case.where, scoring, (case.keys, case.values))
        case.check(found, case.exact(scoring))


@needs_compiler
@pytest.mark.parametrize("blocks", [FEW, MANY])
@pytest.mark.parametrize("requests", [((700, 1), (1100, 1), (0, 1)), ((600, 3), (1, 9))])
def test_windows_and_slopes_also_in_splits(
    requests: tuple[tuple[int, int], ...], blocks: int
) -> None:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    case = Case(ragged(*requests), (4, 2), 64)
    kernels = attention(64, torch.float16, False, blocks)
    for scoring in (
        Scoring(0.1, 50),
        Scoring(0.1, 1),
        Scoring(0.1, 2000),
        Scoring(0.1, 70, slopes),
    ):
        found = kernels.attend(case.query, case.where, scoring, (case.keys, case.values))
        case.check(found, case.exact(scoring))


@needs_compiler
@pytest.mark.parametrize("blocks", [FEW, MANY])
def test_sinks_and_soft_caps(blocks: int) -> None:
    """A sink is one more score, whose share goes to nothing."""
    sinks, cap = torch.tensor([3.0, -1.0, 8.0, 0.0]), 2.5
    case = Case(ragged((600, 1), (513, 2)), (4, 2), 64)
    kernels = attention(64, torch.float16, False, blocks)
    held = (case.keys, case.values)
    scoring = Scoring(0.3, sinks=sinks, cap=cap)
    found = kernels.attend(case.query, case.where, scoring, held)
    keys, values = (whole(each).repeat_interleave(2, 0) for each in held)
    rows = []
    for row, (request, position) in enumerate(((0, 600), (1, 513), (1, 514))):
        begin = int(case.batch.begins[request])
        seen = slice(begin, begin + position + 1)
        scores = 0.3 * (keys[:, seen] @ case.query[row].double()[:, :, None])[..., 0]
        scores = torch.cat([cap * (scores / cap).tanh(), sinks[:, None].double()], 1)
        rows.append((scores.softmax(1)[:, :-1, None] * values[:, seen]).sum(1))
    case.check(found, torch.stack(rows))


@needs_compiler
@pytest.mark.parametrize("blocks", [FEW, MANY])
def test_the_order_of_threads_and_blocks_is_all_one(blocks: int) -> None:
    case = Case(ragged((513, 2), (5, 1)), (4, 2), 64)
    kernels = attention(64, torch.float16, False, blocks)
    found = []
    for number in (0, 5, 11):
        kernels.kernels.driver.seed(ctypes.c_uint(number))
        found.append(kernels.attend(case.query, case.where, Scoring(0.1), (case.keys, case.values)))
    kernels.kernels.driver.seed(ctypes.c_uint(0))
    assert all(torch.equal(*pair) for pair in pairwise(found))


@needs_compiler
@pytest.mark.parametrize("blocks", [FEW, MANY])
def test_requests_without_new_tokens_are_passed_over(blocks: int) -> None:
    """As those are that fill up the batch of a CUDA graph; counters are left for its next run."""
    kernels = attention(64, torch.float16, False, blocks)
    case = Case(ragged((1030, 1), (600, 1)), (4, 2), 64)
    held = case.keys, case.values
    alone = kernels.attend(case.query, case.where, Scoring(0.1), held)
    padded = ragged((1030, 1), (600, 1), (0, 1))
    where = Addresses.of(padded, CPU)
    where.tiles(2)[0][2, 3] = 0
    query = torch.cat([case.query, case.query[:1]])
    for _ in range(2):
        found = kernels.attend(query, where, Scoring(0.1), held)
        assert torch.equal(found[:2], alone)
        assert not kernels.arrived.any()


@needs_compiler
@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("blocks", [FEW, MANY])
def test_keys_and_values_are_read_once_and_nothing_beside_them(coded: bool, blocks: int) -> None:
    """Of a range its own tokens alone, once for all heads that share them; with queries, tables and
    what splits leave at most a tenth more bytes.
    """
    case = Case(ragged((900, 1), (813, 1)), (8, 2), 128, coded=coded)
    kernels = attention(128, torch.float16, coded, blocks)
    driver = kernels.kernels.driver
    driver.moved_bytes.restype = ctypes.c_size_t
    held = [
        tensor[head, begin : begin + length]
        for stored in (case.keys, case.values)
        for tensor in (stored.numbers, stored.scales)
        if tensor is not None
        for head in range(2)
        for begin, length in zip(case.batch.begins, case.batch.lengths, strict=True)
    ]
    splits = 1 if blocks == FEW else 3
    left = 2 * 4 * (128 + 2) * 16 * splits if splits > 1 else 0  # written, and read by the last
    try:
        for tensor in (case.query, *case.where.tiles(4), *held):
            driver.allow(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes))
        driver.moved_bytes()
        kernels.attend(case.query, case.where, Scoring(0.1), (case.keys, case.values))
        moved = driver.moved_bytes() + left
    finally:
        driver.allow_everything()
    assert 1.0 <= moved / sum(part.nbytes for part in held) <= 1.1


@needs_compiler
def test_queries_as_projections_leave_them() -> None:
    """Heads before tokens, or at an odd place in memory."""
    case = Case(ragged((70, 1), (3, 2)), (4, 2), 64)
    kernels = attention(64, torch.float16, False)
    held = (case.keys, case.values)
    plain = kernels.attend(case.query, case.where, Scoring(0.1), held)
    strided = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    odd = torch.cat([case.query.new_zeros(1), case.query.flatten()])[1:].view_as(case.query)
    for query in (strided, odd):
        assert torch.equal(kernels.attend(query, case.where, Scoring(0.1), held), plain)


@needs_compiler
@pytest.mark.parametrize("coded", [False, True])
def test_what_others_hold_spoils_nothing(coded: bool) -> None:
    case = Case(ragged((70, 1), (3, 2)), (4, 2), 64, coded=coded)
    kernels = attention(64, torch.float16, coded)
    plain = kernels.attend(case.query, case.where, Scoring(0.1), (case.keys, case.values))
    others = torch.ones(case.keys.numbers.shape[1], dtype=torch.bool)
    for begin, length in zip(case.batch.begins, case.batch.lengths, strict=True):
        others[begin : begin + length] = False
    for stored in (case.keys, case.values):
        spoilt = stored.numbers if stored.scales is None else stored.scales
        spoilt[:, others] = torch.nan
    found = kernels.attend(case.query, case.where, Scoring(0.1), (case.keys, case.values))
    assert torch.equal(found, plain)


@needs_compiler
def test_the_self_test_finds_a_wrong_kernel() -> None:
    for coded in (False, True):
        assert self_test(attention(64, torch.float16, coded), 64, torch.float16, coded, CPU) is None
    wrong = attention(64, torch.bfloat16, True)
    assert "is off by" in str(self_test(wrong, 64, torch.float16, True, CPU))


def test_pytorch_attends_on_a_cpu() -> None:
    assert cuda.range_attention(64, torch.float16, False, CPU) is None


PASSES = (
    ((0, 6), (0, 3), (0, 6)),  # prompts
    ((6, 1), (3, 4), (6, 1)),  # decode steps beside a part of a prompt
    ((7, 1), (7, 1), (7, 1)),
)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "bits", "kv_bits"),
    [
        ("mistral-sliding", 16, 16),
        *(
            pytest.param(*case, marks=pytest.mark.rare)
            for case in (("llama", 4, 16), ("qwen3", 16, 8), ("bloom", 8, 8))
        ),
    ],
)
def test_a_stage_computes_by_it_what_it_does_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, bits: int, kv_bits: int
) -> None:
    """Hidden states of prompts, parts of prompts and decode steps, in float16; with layers of our
    own too.
    """
    save_tiny(tmp_path, with_wide_heads(name))

    def states() -> list[Tensor]:
        bounds = (0, 2, LAYERS)
        stage = stages_of(tmp_path, bounds, 3, 20, bits, dtype="float16", kv_bits=kv_bits)[0]
        drawn = torch.Generator().manual_seed(2)
        found = []
        for requests in PASSES:
            starts, counts = (np.array(each) for each in zip(*requests, strict=True))
            batch = MicroBatch(np.arange(3), starts, counts, np.array([40, 0, 20]))
            hidden = stage.step(batch, torch.randint(3, 90, (int(counts.sum()),), generator=drawn))
            assert isinstance(hidden, Tensor)
            found.append(hidden.float())
        return found

    monkeypatch.setattr("actors.stage.stage.warm_up", lambda _: None)
    plain = states()
    monkeypatch.setattr("actors.attention.ragged.range_attention", range_attention)
    attended = states()
    use_own_kernels(monkeypatch)
    for own in (attended, states()):
        for one, other in zip(plain, own, strict=True):
            assert torch.linalg.norm(one - other) <= 0.005 * torch.linalg.norm(one)


@needs_nvrtc
@pytest.mark.parametrize(
    ("capability", "head_dim", "coded"),
    [
        ((7, 0), 128, 0),
        ((9, 0), 256, 1),
        *(
            pytest.param(*form, marks=pytest.mark.rare)
            for form in (
                *(((6, 0), 64, 1), ((6, 1), 80, 0), ((7, 5), 256, 1), ((8, 0), 128, 1)),
                *(((8, 6), 80, 0), ((8, 9), 64, 0), ((10, 0), 128, 0), ((12, 0), 128, 1)),
            )
        ),
    ],
)
def test_compiles_for_every_gpu_without_spills(
    capability: tuple[int, int], head_dim: int, coded: int
) -> None:
    definitions = {"BFLOAT16": int(capability >= (8, 0)), "HEAD_DIM": head_dim, "CODED": coded}
    check_machine_code(SOURCE, KERNELS, capability, **definitions)


@needs_nvrtc
def test_a_head_size_that_it_is_not_written_for() -> None:
    with pytest.raises(CudaError, match="HEAD_DIM is a multiple of 8, at most 256"):
        compile_cuda(text_of(SOURCE), (7, 0), {"BFLOAT16": 0, "HEAD_DIM": 100, "CODED": 0})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("requests", [RAGGED, CHUNKS, ((3000, 1), (9000, 1))])
def test_on_a_gpu(requests: tuple[tuple[int, int], ...], coded: bool) -> None:
    device, scoring = torch.device("cuda"), Scoring(0.1, 700)
    case = Case(ragged(*requests), (8, 2), 128, coded=coded)
    query, keys, values = (
        case.query.to(device),
        *(
            Stored(each.numbers.to(device), None if each.scales is None else each.scales.to(device))
            for each in (case.keys, case.values)
        ),
    )
    kernels = cuda.range_attention(128, query.dtype, coded, device)
    assert kernels is not None
    found = kernels.attend(query, Addresses.of(case.batch, device), scoring, (keys, values))
    case.check(found.cpu(), case.exact(scoring))
