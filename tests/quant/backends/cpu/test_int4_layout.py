"""Codes that a compiled loop packs, held against the packing of torch's kernel."""

from __future__ import annotations

import pytest
import torch

from quant.backends.cpu import int4_layout

pytest.importorskip("numba")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [16, 64, 208, 1040])
def test_codes_are_packed_as_by_torch(
    monkeypatch: pytest.MonkeyPatch, rows: int, threads: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(int4_layout, "_LEAST_TURNED", 0)
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
