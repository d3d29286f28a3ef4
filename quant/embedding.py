"""Token embeddings of which a kernel backend holds the codes; rows are decoded when asked for."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from quant.backends.base import PackedWeight
from quant.backends.table import fallback_rule
from quant.linear import LayerForm, packed_weight

_TEST_ROWS = 16
_TOLERANCE = 0.1
"""Relative error of decoded rows; 8 bit costs 0.01, 6 bit 0.02, rows that are others' have 1.4."""


class QuantizedEmbedding(nn.Module):
    """Looks tokens up in a `packed` weight `[vocabulary, width]`, which may be the head's too;
    embeddings are multiplied by `factor`.
    """

    def __init__(
        self, packed: PackedWeight, width: int, dtype: torch.dtype, factor: float | None = None
    ) -> None:
        super().__init__()
        self.packed = packed
        self.embedding_dim = width
        self.compute_dtype = dtype
        self.factor = factor

    def forward(self, token_ids: Tensor) -> Tensor:
        """Embeddings `[..., width]` of `token_ids` `[...]`."""
        rows = self.packed.rows(token_ids.flatten())
        assert rows is not None, "tested when it was loaded"
        found = rows.to(self.compute_dtype)
        if self.factor is not None:
            found *= torch.tensor(self.factor).to(found.dtype)
        return found.view(*token_ids.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        return f"width={self.embedding_dim}, backend={type(self.packed).__name__}"


def packed_for_rows(
    weight: Tensor, form: LayerForm, name: str, head: PackedWeight | None
) -> PackedWeight:
    """What an embedding of `weight` `[vocabulary, width]` looks tokens up in: what a tied `head` on
    the same device holds, where its rows can be read, else codes of its own.
    """
    if head is not None and _reads_rows(head, weight, form.device):
        return head
    return packed_weight(weight, replace(form, backend=fallback_rule(form.bits).name), name)


def _reads_rows(packed: PackedWeight, weight: Tensor, device: torch.device) -> bool:
    step = max(1, len(weight) // _TEST_ROWS)
    which = torch.arange(0, len(weight), step)
    wanted = weight[which].float()
    found = packed.rows(which.to(device))
    if found is None:
        return False
    return float((found.cpu() - wanted.cpu()).norm()) <= _TOLERANCE * float(wanted.norm())
