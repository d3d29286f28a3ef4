"""The gated delta rule over requests of a flattened micro-batch, each with a state of its own
(Gated Delta Networks, arXiv 2412.06464, equation 10).

Transformers' mixers know a row of a batch as one sequence, so that on a flattened batch the state
of a request would go on in the next one. Here every request begins with what its slot holds. On
GPUs two kernels of our own take a step, which PyTorch's operations need 60 for, and copies.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actors.attention.delta.cpu import can_run, run_in_place, warm_up
from actors.attention.delta.states import (
    ConstantStates,
    DeltaInputs,
    DeltaWeights,
    EqualRuns,
    Projected,
    TokenRuns,
)
from actors.attention.ragged import RaggedContext
from planner.model.layer_parts import DeltaMixer
from quant.backends.cuda.driver import THREADS, CudaError, Kernels, kernels_for

SOURCE = Path(__file__).with_name("delta.cu")
KERNELS = ("convolve", "delta_step")


class Heads(ctypes.Structure):
    """The struct of that name in the source."""

    _fields_ = (("keys", ctypes.c_uint), ("values", ctypes.c_uint), ("eps", ctypes.c_float))


@dataclass(frozen=True)
class DeltaKernels:
    """The compiled kernels for one size of heads and type."""

    kernels: Kernels

    def step(
        self, new: Projected, weights: DeltaWeights, held: tuple[Tensor, Tensor], slots: Tensor
    ) -> Tensor:
        """Go on with the states and the inputs of a layer, in `slots` `[rows]` of `held`, by one
        token each; returns what the norm makes of the results, `[rows, value_width]`. A row in
        slot -1 is nobody's.
        """
        state, inputs = held
        sizes, rows = weights.sizes, len(slots)
        mixed, gate, beta, decay = (each.contiguous() for each in new)
        convolved = torch.empty(mixed.shape, dtype=torch.float32, device=mixed.device)
        channels = sizes.conv_channels
        self.kernels.launch(
            "convolve", rows * -(-channels // THREADS),
            mixed, weights.convolution, slots, inputs, convolved, channels,
        )  # fmt: skip
        out = torch.empty_like(gate)
        self.kernels.launch(
            "delta_step", rows * sizes.value_heads,
            convolved, gate, beta, decay, weights.rates, weights.biases, weights.norm_weight,
            slots, state, out, Heads(sizes.key_heads, sizes.value_heads, weights.norm_eps),
        )  # fmt: skip
        return out


def compiled_kernels(
    sizes: DeltaMixer, dtype: torch.dtype, device: torch.device
) -> DeltaKernels | None:
    """The kernels for a mixer of these sizes; None on a CPU, in float32 and for other sizes.

    Raises CudaError where they cannot be compiled.
    """
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return None
    if not sizes.has_step_kernel:
        return None
    definitions = {"KEY_DIM": sizes.key_dim, "VALUE_DIM": sizes.value_dim}
    definitions["CONV_WIDTH"] = sizes.conv_width
    return DeltaKernels(kernels_for(SOURCE, KERNELS, dtype, device, **definitions))


_TOLERANCE = 0.01
"""Largest relative error of the self-test; rounding to bfloat16 costs 0.003."""


def mix(context: RaggedContext, layer: int, new: Projected, weights: DeltaWeights) -> Tensor:
    """Go on with the states of all requests by their new tokens.

    Returns what the norm makes of the results, `[tokens, value_width]`; rows of `new` beyond the
    tokens of the context are nobody's and get zeros.
    """
    held, runs = context.cache.states_of(layer), context.runs
    kernels = delta_kernels(weights.sizes, new.mixed.dtype, new.mixed.device)
    if kernels is None:
        return plain(runs, runs.equal, new, weights, held)
    steps = [each for each in runs.equal if each.is_step]
    others = [each for each in runs.equal if not each.is_step]
    if not others and len(steps[0].slots) == len(new.gate):
        return kernels.step(new, weights, held, steps[0].slots)
    out = plain(runs, others, new, weights, held) if others else torch.zeros_like(new.gate)
    for each in steps:
        out[each.tokens] = kernels.step(new.of(each.tokens), weights, held, each.slots)
    return out


def plain(
    runs: TokenRuns,
    parts: Sequence[EqualRuns],
    new: Projected,
    weights: DeltaWeights,
    held: tuple[Tensor, Tensor],
) -> Tensor:
    """As `mix`, for `parts` of the `runs` and without kernels of a GPU: on a CPU by a compiled
    loop, for all of them.
    """
    sizes, (state, inputs) = weights.sizes, held
    rule = DeltaInputs(
        F.silu(_convolved(parts, new.mixed, inputs, weights.taps)),
        weights.rates * F.softplus(new.decay.float() + weights.biases),
        new.beta.float().sigmoid(),
    )
    if can_run(new.mixed.device):
        found = run_in_place(rule, state, runs, sizes)
    else:
        shape = len(new.mixed), sizes.value_heads, sizes.value_dim
        found = new.mixed.new_zeros(shape, dtype=torch.float32)
        for each in parts:
            found[each.tokens], state[each.slots] = _of_runs(each, rule, state, sizes)
    heads = found.to(new.mixed.dtype).flatten(0, 1)
    normed: Tensor = weights.norm(heads, new.gate.reshape(len(heads), -1))
    return normed.view(new.gate.shape)


def warm_up_mixer(states: ConstantStates, dtype: torch.dtype) -> None:
    """Compile what the first token will need."""
    device = states.recurrent.device
    if device.type == "cpu":
        warm_up(states.mixer)
    delta_kernels(states.mixer, dtype, device)


@functools.cache
def delta_kernels(
    sizes: DeltaMixer, dtype: torch.dtype, device: torch.device
) -> DeltaKernels | None:
    """The kernels for decode steps of a mixer of these sizes in `dtype`, compiled when they are
    first asked for. None where PyTorch's operations compute: on a CPU, in float32, for other sizes,
    or where ours failed their self-test, which warns.
    """
    try:
        found = compiled_kernels(sizes, dtype, device)
        complaint = None if found is None else self_test(found, sizes, dtype, device)
    except CudaError as error:
        complaint = str(error)
    if complaint is None:
        return found
    warnings.warn(
        f"llmpq's kernels for the gated delta rule are not usable for {dtype} on {device}: "
        f"{complaint}; PyTorch's operations take their place and are slower",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


@torch.inference_mode()
def self_test(
    kernels: DeltaKernels, sizes: DeltaMixer, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Compare a step of a few requests with PyTorch's operations; say what is wrong, None if
    nothing is.
    """
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=draw).to(device, dtype)

    told = np.array([[2, 0], [5, 5], [0, 1], [1, 1]])
    runs, heads = TokenRuns(told, device), sizes.value_heads
    new = Projected(
        random(2, sizes.conv_channels),
        random(2, sizes.value_width),
        *(random(2, heads) for _ in range(2)),
    )
    weights = random_weights(sizes, random)
    state = random(3, heads, sizes.key_dim, sizes.value_dim, dtype=torch.float32)
    inputs = random(3, sizes.conv_width - 1, sizes.conv_channels)
    before = state.clone(), inputs.clone()
    (steps,) = runs.equal
    found = kernels.step(new, weights, (state, inputs), steps.slots)
    wanted = plain(runs, runs.equal, new, weights, before)
    pairs = (found, wanted), (state, before[0]), (inputs, before[1])
    error = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)
    return None if error <= _TOLERANCE else f"their result is off by {error:.1%}"


def random_weights(sizes: DeltaMixer, random: Callable[..., Tensor]) -> DeltaWeights:
    """Weights of which `random` makes each by its shape."""
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    convolution = random(sizes.conv_channels, 1, sizes.conv_width)
    norm = Qwen3NextRMSNormGated(sizes.value_dim)
    norm.weight = nn.Parameter(random(sizes.value_dim), requires_grad=False)
    return DeltaWeights(
        sizes,
        convolution,
        convolution[:, 0].t().float().contiguous(),
        -random(sizes.value_heads).float().exp(),
        random(sizes.value_heads).float(),
        norm,
    )


def _convolved(parts: Sequence[EqualRuns], mixed: Tensor, held: Tensor, taps: Tensor) -> Tensor:
    """The causal convolution within each request, float32; the last inputs stay in `held` `[slots,
    conv_width - 1, channels]`.

    Products and sums are operations of their own, so that an element's bits do not depend on where
    it stands.
    """
    before, channels = held.shape[1:]
    out = mixed.new_zeros(mixed.shape, dtype=torch.float32)
    for each in parts:
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
    runs: EqualRuns, new: DeltaInputs, state: Tensor, sizes: DeltaMixer
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
