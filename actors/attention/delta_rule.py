"""The gated delta rule over requests of a flattened micro-batch, each with a state of its own
(Gated Delta Networks, arXiv 2412.06464, equation 10).

Transformers' mixers know a row of a batch as one sequence, so that on a flattened batch the state
of a request would go on in the next one. Here every request begins with what its slot holds.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.attention.constant_state import DeltaInputs, Runs, TokenRuns
from actors.attention.delta_cpu import can_run, run_in_place
from actors.attention.ragged import RaggedContext
from planner.model.layer_parts import DeltaMixer


def mix(
    context: RaggedContext, layer: int, new: DeltaInputs, taps: Tensor, sizes: DeltaMixer
) -> Tensor:
    """Go on with the states of all requests by their new tokens.

    `taps` `[conv_width, channels]`, float32, are the weights of the convolution, the last of which
    is that of the token itself. Returns `[tokens, value_heads, value_dim]`, float32; rows of `new`
    beyond the tokens of the context are nobody's and get zeros.
    """
    state, inputs = context.cache.states_of(layer)
    runs = context.runs
    convolved = replace(new, mixed=F.silu(_convolved(runs, new.mixed, inputs, taps)))
    if can_run(new.mixed.device):
        return run_in_place(convolved, state, runs, sizes)
    shape = len(new.mixed), sizes.value_heads, sizes.value_dim
    out = new.mixed.new_zeros(shape, dtype=torch.float32)
    for each in runs.equal:
        out[each.tokens], state[each.slots] = _of_runs(each, convolved, state, sizes)
    return out


def _convolved(runs: TokenRuns, mixed: Tensor, held: Tensor, taps: Tensor) -> Tensor:
    """The causal convolution within each request, float32; the last inputs stay in `held` `[slots,
    conv_width - 1, channels]`.

    Products and sums are operations of their own, so that an element's bits do not depend on where
    it stands.
    """
    before, channels = held.shape[1:]
    out = mixed.new_zeros(mixed.shape, dtype=torch.float32)
    for each in runs.equal:
        requests = len(each.slots)
        own = mixed[each.tokens].view(requests, each.count, channels)
        earlier = own.new_zeros(requests, before, channels)
        if not each.is_fresh:
            earlier = held[each.slots]
        joined = torch.cat([earlier, own], 1)
        held[each.slots] = joined[:, each.count :]
        wide = joined.float()
        result = wide[:, : each.count] * taps[0]
        for tap in range(1, len(taps)):
            result += wide[:, tap : tap + each.count] * taps[tap]
        out[each.tokens] = result.flatten(0, 1)
    return out


def _of_runs(
    runs: Runs, new: DeltaInputs, state: Tensor, sizes: DeltaMixer
) -> tuple[Tensor, Tensor]:
    """The results of `runs` `[requests x count, value_heads, value_dim]`, and their states, by
    transformers' functions.
    """
    from transformers.models.qwen3_next.modeling_qwen3_next import (
        torch_chunk_gated_delta_rule,
        torch_recurrent_gated_delta_rule,
    )

    shape = len(runs.slots), runs.count
    own, log_decay, beta = (
        each[runs.tokens].view(*shape, -1) for each in (new.mixed, new.log_decay, new.beta)
    )
    keys, values = (sizes.key_heads, sizes.key_dim), (sizes.value_heads, sizes.value_dim)
    query, key, value = (
        each.unflatten(-1, heads)
        for each, heads in zip(
            own.split([sizes.key_width, sizes.key_width, sizes.value_width], -1),
            (keys, keys, values),
            strict=True,
        )
    )
    rule = torch_recurrent_gated_delta_rule if runs.count == 1 else torch_chunk_gated_delta_rule
    result, after = rule(
        query,
        key,
        value,
        g=log_decay,
        beta=beta,
        initial_state=None if runs.is_fresh else state[runs.slots],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return result.flatten(0, 1), after
