"""The gated delta rule's mixers of transformers (Qwen3-Next, Qwen3.5) on a flattened micro-batch,
with the states of the requests' slots.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from actors.attention.delta.rule import mix
from actors.attention.delta.states import DeltaWeights, Projected
from actors.attention.ragged import RaggedContext
from planner.model.layer_parts import DeltaMixer


def replace_fused_mixer(module: nn.Module) -> None:
    """Give a mixer with fused projections, Qwen3-Next's, a ragged forward."""
    _replace(module, _fused_projections)


def replace_mixer(module: nn.Module) -> None:
    """Give a mixer with projections apart, Qwen3.5's, a ragged forward."""
    _replace(module, _projections)


def _replace(module: Any, project: Any) -> None:
    module.weights = None
    module.project = MethodType(project, module)
    module.forward = MethodType(_mixed, module)


def _projections(self: Any, hidden: Tensor) -> Projected:
    return Projected(
        self.in_proj_qkv(hidden),
        self.in_proj_z(hidden),
        self.in_proj_b(hidden),
        self.in_proj_a(hidden),
    )


def _fused_projections(self: Any, hidden: Tensor) -> Projected:
    together = self.in_proj_qkvz(hidden)[None], self.in_proj_ba(hidden)[None]
    query, key, value, gate, beta, decay = self.fix_query_key_value_ordering(*together)
    mixed = torch.cat([each[0].flatten(1) for each in (query, key, value)], -1)
    return Projected(mixed, gate[0].flatten(1), beta[0], decay[0])


def _weights(self: Any) -> DeltaWeights:
    """Those of the module, made once of loaded ones."""
    convolution = self.conv1d.weight
    if self.weights is None or self.weights.convolution is not convolution:
        self.weights = DeltaWeights(
            DeltaMixer(
                self.num_k_heads,
                self.num_v_heads,
                self.head_k_dim,
                self.head_v_dim,
                self.conv_kernel_size,
            ),
            convolution,
            convolution[:, 0].t().float().contiguous(),
            -self.A_log.float().exp(),
            self.dt_bias.float(),
            self.norm,
        )
    made: DeltaWeights = self.weights
    return made


def _mixed(self: Any, hidden_states: Tensor, ragged: RaggedContext, **_: Any) -> Tensor:
    """The mixer's output of the flattened batch, `hidden_states`: `[1, tokens, hidden_size]`."""
    new = self.project(hidden_states[0])
    with ragged.timer or nullcontext():
        found = mix(ragged, self.layer_idx, new, _weights(self))
    out: Tensor = self.out_proj(found)
    return out[None]
