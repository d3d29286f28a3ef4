"""An LM head of random weights as it runs on this process's device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from actors.attention.timer import AttentionTimer
from actors.profiling.layers import WEIGHT_SCALE
from actors.stage.model_config import with_layers
from actors.stage.partial_model import empty_model
from planner.profiles.design import LayerWorkload
from quant.linear import LayerForm, prepack, quantize_linear
from quant.loading.loader import module_nbytes
from quant.scheme import NEAREST


@dataclass(frozen=True)
class PreparedRows:
    """The hidden states `[rows, head_width]` of a pass through the one head."""

    hidden: Tensor
    copies: int = 1


class TimedHead:
    """The LM head of `config` and the choice of the likeliest tokens, without a checkpoint, by the
    kernel that stages have for its shape. All of its weights are equal, of which no time depends.
    """

    def __init__(self, config: PretrainedConfig, form: LayerForm) -> None:
        like: nn.Linear = empty_model(with_layers(config, 1)).get_output_embeddings()
        weight = torch.full(like.weight.shape, WEIGHT_SCALE, dtype=form.dtype, device=form.device)
        self._form, self._width = form, like.in_features
        head = quantize_linear(weight, None, replace(form, backend=None, rounding=NEAREST))
        self._head = prepack(head, form.processor) if isinstance(head, nn.Linear) else head
        self.held_bytes = module_nbytes(self._head)

    def kv_bytes(self, workload: LayerWorkload) -> int:
        return 0

    def prepare(self, workload: LayerWorkload) -> PreparedRows:
        """Make hidden states, one a request, and pass once to warm up."""
        shape, form = (workload.batch_size, self._width), self._form
        prepared = PreparedRows(torch.ones(shape, dtype=form.dtype, device=form.device))
        self.pass_through(prepared)
        return prepared

    @torch.inference_mode()
    def pass_through(
        self,
        prepared: PreparedRows,
        timer: AttentionTimer | None = None,
        experts: AttentionTimer | None = None,
    ) -> None:
        """As a stage's sampler does it: all rows are finite, and each has a largest number. It has
        neither of the parts that are timed.
        """
        logits = self._head(prepared.hidden)
        logits.amax(-1).isfinite()
        logits.max(-1)
