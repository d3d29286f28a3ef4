"""The gated delta rule's mixers of transformers (Qwen3-Next, Qwen3.5) on a flattened micro-batch,
with the states of the requests' slots.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actors.attention.constant_state import DeltaInputs
from actors.attention.delta_rule import mix
from actors.attention.ragged import RaggedContext
from planner.model.layer_parts import DeltaMixer


def replace_fused_mixer(module: nn.Module) -> None:
    """Give a mixer with fused projections, Qwen3-Next's, a ragged forward."""
    _replace(module, _fused_projections)


def replace_mixer(module: nn.Module) -> None:
    """Give a mixer with projections apart, Qwen3.5's, a ragged forward."""
    _replace(module, _projections)


def _replace(module: Any, project: Any) -> None:
    module.sizes = DeltaMixer(
        module.num_k_heads,
        module.num_v_heads,
        module.head_k_dim,
        module.head_v_dim,
        module.conv_kernel_size,
    )
    module.made = None
    module.project = MethodType(project, module)
    module.forward = MethodType(_mixed, module)


def _projections(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values in one, gate, beta and decay before their functions, `[tokens,
    ...]`.
    """
    return (
        self.in_proj_qkv(hidden),
        self.in_proj_z(hidden),
        self.in_proj_b(hidden),
        self.in_proj_a(hidden),
    )


def _fused_projections(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `_projections`."""
    together = self.in_proj_qkvz(hidden)[None], self.in_proj_ba(hidden)[None]
    query, key, value, gate, beta, decay = self.fix_query_key_value_ordering(*together)
    mixed = torch.cat([each[0].flatten(1) for each in (query, key, value)], -1)
    return mixed, gate[0].flatten(1), beta[0], decay[0]


def _exact(self: Any) -> tuple[Tensor, Tensor]:
    """The taps of the convolution `[conv_width, channels]` and the heads' rates of decay, float32,
    made once of loaded weights.
    """
    weight = self.conv1d.weight
    if self.made is None or self.made[0] is not weight:
        self.made = weight, weight[:, 0].t().float().contiguous(), -self.A_log.float().exp()
    _, taps, rates = self.made
    return taps, rates


def _mixed(self: Any, hidden_states: Tensor, ragged: RaggedContext, **_: Any) -> Tensor:
    """The mixer's output of the flattened batch, `hidden_states`: `[1, tokens, hidden_size]`."""
    sizes: DeltaMixer = self.sizes
    mixed, gate, beta, decay = self.project(hidden_states[0])
    taps, rates = _exact(self)
    new = DeltaInputs(
        mixed, rates * F.softplus(decay.float() + self.dt_bias), beta.float().sigmoid()
    )
    with ragged.timer or nullcontext():
        found = mix(ragged, self.layer_idx, new, taps, sizes)
    heads = found.to(hidden_states.dtype).flatten(0, 1)
    normed: Tensor = self.norm(heads, gate.reshape(-1, sizes.value_dim))
    out: Tensor = self.out_proj(normed.view(len(mixed), -1))
    return out[None]
