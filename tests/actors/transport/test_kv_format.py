"""Keys and values as messages: as they went in they come out; what no stage sends is refused."""

from __future__ import annotations

import struct

import pytest
import torch

from actors.messages import KvPart
from actors.transport.kv_format import decode_kv, encode_kv
from quant.common.errors import StageLostError

PART = KvPart(range(3, 5), range(1, 4))


def tensors(tokens: int, dtype: torch.dtype, coded: bool = False) -> tuple[torch.Tensor, ...]:
    """Numbers, and scales where they are coded, of keys and values of each layer of `PART`."""
    found = []
    for _ in range(2 * len(PART.layers)):
        found.append((100 * torch.randn(3, tokens, 4)).to(dtype))
        if coded:
            found.append(torch.randn(3, tokens).bfloat16())
    return tuple(found)


@pytest.mark.parametrize(
    ("dtype", "coded"),
    [
        (torch.float32, False),
        (torch.float16, False),
        (torch.bfloat16, False),
        (torch.int8, True),
    ],
)
def test_what_is_encoded_comes_out_bit_for_bit(dtype: torch.dtype, coded: bool) -> None:
    """Also of views that are not contiguous, and of odd numbers of tokens."""
    sent = {7: (5, tensors(5, dtype, coded)), 2**40: (1, tensors(1, dtype, coded))}
    sent[9] = 3, tuple(tensor[:, 1:4] for tensor in tensors(6, dtype, coded))
    part, found = decode_kv(encode_kv(PART, sent))
    assert part == PART
    assert found.keys() == sent.keys()
    for key, (count, each) in sent.items():
        assert found[key][0] == count
        assert [tensor.dtype for tensor in found[key][1]] == [tensor.dtype for tensor in each]
        assert all(map(torch.equal, found[key][1], each))


def test_layers_of_other_sizes() -> None:
    """Two heads of one width in one layer, one of another in the next, a layer of none, and states
    of layers without keys.
    """
    shapes = [(2, 5, 4), (1, 5, 8)] * 2 + [(2, 3, 4, 6), (2, 3, 7)]
    sent = {7: (5, tuple(torch.randn(shape) for shape in shapes))}
    part, found = decode_kv(encode_kv(KvPart(range(3), range(2)), sent))
    assert part == KvPart(range(3), range(2))
    assert found[7][0] == 5
    assert all(map(torch.equal, found[7][1], sent[7][1]))


def test_a_message_of_no_requests() -> None:
    assert decode_kv(encode_kv(PART, {})) == (PART, {})


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *((0, 5), (1, 2**63), (3, 1), (4, 0), (4, 2), (4, 2**60)),
        *((5, 2**50), (6, 0), (6, 2**40), (7, 0), (7, 5), (7, 2**60)),
        *((8, 4), (8, 2**63), (9, 2), (9, 2**63), (11, 0), (11, 2**31), (12, 2)),
    ],
)
def test_numbers_that_do_not_agree_are_refused(place: int, value: int) -> None:
    message = encode_kv(PART, {7: (5, tensors(5, torch.float32))})
    data = message.numpy().data
    struct.pack_into("<Q", data, 8 * place, value)
    if place == 5:  # the key, which any number may be
        assert decode_kv(message)[1].keys() == {value}
        return
    with pytest.raises(StageLostError, match="a message of another stage"):
        decode_kv(message)


@pytest.mark.parametrize("size", [0, 39, 40, 63, 64, 223, 500])
def test_parts_of_a_message_are_refused(size: int) -> None:
    message = encode_kv(PART, {7: (5, tensors(5, torch.float32))})
    with pytest.raises(StageLostError, match="a message of another stage"):
        decode_kv(message[:size])
