"""The compiled loops over 4-bit codes, held against torch's passes over the same words."""

from __future__ import annotations

import pytest
import torch

from quant import code_loops
from quant.backends import int4_layout
from quant.checkpoint import decoding
from quant.checkpoint.codes import unpack_words

pytest.importorskip("numba")


@pytest.fixture
def all_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_loops, "_LEAST", 0)


def words(rows: int, columns: int) -> torch.Tensor:
    draws = torch.Generator().manual_seed(rows)
    return torch.randint(-(1 << 31), (1 << 31) - 1, (rows, columns), generator=draws).int()


@pytest.mark.parametrize("threads", [1, 2])
def test_words_are_unpacked_as_by_torch(
    monkeypatch: pytest.MonkeyPatch, all_compiled: None, threads: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for rows, columns in ((1, 1), (33, 9), (128, 8), (70, 17)):
        along, across = words(rows, columns), words(columns, rows).t()
        for stored in (along, across, across[1:] if rows > 1 else across):
            found = decoding._unpacked(stored, 4, 8 * columns)
            assert torch.equal(found, unpack_words(stored, 4, 8 * columns))
    assert torch.equal(decoding._unpacked(along, 4, 131), unpack_words(along, 4, 131))


@pytest.mark.parametrize("shape", [(8, 1), (16, 40), (136, 33), (12, 5)])
def test_awq_is_unpacked_as_by_torch(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    stored = words(*shape)
    expected = decoding._awq_codes(stored)
    monkeypatch.setattr(code_loops, "_LEAST", 0)
    assert torch.equal(decoding._awq_codes(stored), expected)


@pytest.mark.parametrize("rows", [16, 64, 208, 1040])
def test_codes_are_packed_as_by_torch(all_compiled: None, rows: int) -> None:
    codes = torch.randint(16, (rows, 96), generator=torch.Generator().manual_seed(1)).byte()
    packed = int4_layout.pack_weight(codes)
    assert torch.equal(packed, int4_layout.pack_codes(codes))
    turned = codes.t().contiguous().t()
    assert torch.equal(int4_layout.pack_weight(turned), packed)


@pytest.mark.parametrize("half", [16, 32])
def test_both_layouts_have_the_rows_of_a_block_in_their_bytes(half: int) -> None:
    """Whatever this CPU's is."""
    codes = torch.randint(16, (6 * half, 64), generator=torch.Generator().manual_seed(2)).byte()
    packed = torch.empty(3, 64, half, dtype=torch.uint8)
    loop = int4_layout._packing(half)
    loop(0, 3, codes.numpy().view("uint64"), packed.numpy().view("uint64"))
    low, high = codes.view(3, 2, half, 64).unbind(1)
    assert torch.equal(packed, (low + 16 * high).transpose(1, 2))
