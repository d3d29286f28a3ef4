"""Token embeddings of which a kernel backend holds the codes; rows are decoded when asked for."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quant.backends.base import PackedWeight


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
