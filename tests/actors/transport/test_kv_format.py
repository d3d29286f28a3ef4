"""Keys and values as messages: as they went in they come out; what no stage sends is refused."""

from __future__ import annotations

import struct

import pytest
import torch

from actors.messages import KvPart
from actors.transport.kv_format import decode_kv, encode_kv
from quant.common.errors import StageLostError

PART = KvPart(range(3, 5), range(1, 4))


def tensors(tokens: int, dtype: torch.dtype, coded: bool = False) -> list[torch.Tensor]:
    """Numbers, and scales where they are coded, of keys and values of each layer of `PART`."""
    found = []
    for _ in range(2 * len(PART.layers)):
        found.append((100 * torch.randn(3, tokens, 4)).to(dtype))
        if coded:
            found.append(torch.randn(3, tokens).bfloat16())
    return found


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
    sent = {7: tensors(5, dtype, coded), 2**40: tensors(1, dtype, coded)}
    sent[9] = [tensor[:, 1:4] for tensor in tensors(6, dtype, coded)]
    part, found = decode_kv(encode_kv(PART, sent))
    assert part == PART
    assert found.keys() == sent.keys()
    for key, each in sent.items():
        assert [tensor.dtype for tensor in found[key]] == [tensor.dtype for tensor in each]
        assert all(map(torch.equal, found[key], each))


def test_layers_of_other_sizes() -> None:
    """Two heads of one width in one layer, one of another in the next, and a layer of none."""
    shapes = [(2, 5, 4), (1, 5, 8)] * 2
    sent = {7: [torch.randn(shape) for shape in shapes]}
    part, found = decode_kv(encode_kv(KvPart(range(3), range(2)), sent))
    assert part == KvPart(range(3), range(2))
    assert all(map(torch.equal, found[7], sent[7]))


def test_a_message_of_no_requests() -> None:
    assert decode_kv(encode_kv(PART, {})) == (PART, {})


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *((0, 5), (1, 2**63), (3, 1), (4, 0), (4, 5), (5, 4), (6, 9), (7, 2**60)),
        *((8, 0), (9, 5), (10, 2**63), (12, 2**50), (13, 6)),
    ],
)
def test_numbers_that_do_not_agree_are_refused(place: int, value: int) -> None:
    message = encode_kv(PART, {7: tensors(5, torch.float32)})
    data = message.numpy().data
    struct.pack_into("<Q", data, 8 * place, value)
    if place == 12:  # the key, which any number may be
        assert decode_kv(message)[1].keys() == {value}
        return
    with pytest.raises(StageLostError, match="a message of another stage"):
        decode_kv(message)


@pytest.mark.parametrize("size", [0, 63, 64, 79, 80, 500])
def test_parts_of_a_message_are_refused(size: int) -> None:
    message = encode_kv(PART, {7: tensors(5, torch.float32)})
    with pytest.raises(StageLostError, match="a message of another stage"):
        decode_kv(message[:size])
