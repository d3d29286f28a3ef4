"""The memory of a stage: packed weights, KV cache, embedding and head, temporaries, the runtime.

This is the memory cost model of LLM-PQ section 4.1, with the bytes of the kernels that really run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from planner.adapters import adapter_widths
from planner.cluster.device import CPU_TOKENS_AT_ONCE, Device
from planner.costs.hosting import experts_bytes, streaming_bytes
from planner.costs.stored_bytes import (
    embedding_bytes,
    head_bytes,
    kept_of_requests,
    kv_cache_bytes_per_layer,
    kv_token_bytes,
    layer_weight_bytes,
    norm_bytes,
)
from planner.costs.temporaries import (
    all_linears,
    attended_width,
    bias_bytes,
    code_bytes,
    expanded_numbers,
    expert_row_bytes,
    int8_bytes,
    mixer_bytes,
    restored_bytes,
    scratch_tokens,
)
from planner.model.layer_parts import LayerChoice
from planner.model.shape import ModelShape
from planner.workload import MicroBatches, Workload
from quant.backends.table import MOST_SPLITS, SPLIT_TOKENS, has_kernels, reads_ranges
from quant.scheme import DTYPE_BYTES, FULL_BITS, Processor

# PyTorch's caching allocator rounds large blocks up to 2 MiB and cannot join blocks of different
# segments; 2 % of the device covers that where sizes repeat, as they do here.
_ALLOCATOR_SLACK = 0.02

_SPLIT_ROWS = 8 * 2 * 4 * 192
"""Rows of sums that split ranges leave: 8 for each block, of at most twice as many blocks as keep a
GPU busy, 4 a multiprocessor of up to 192 (`actors.attention.cuda`)."""

MOST_GRAPHS = 8
"""Recorded decode steps that a stage keeps: of the sizes that its micro-batches have at a time."""

_FLOAT32_BYTES = 4
_TOKEN_ID_BYTES = 8  # int64 indices of an embedding
_TRANSFER_BUFFERS = 2  # one micro-batch arriving while another one leaves
# Sampling works in float64. Its peak is in sorting: logits with bias and penalties, their scaled
# copy, the sorted copy, its 64-bit order, and the sort's own space for both.
_SAMPLING_BYTES_PER_LOGIT = 6 * 8
# Buffers of the MLP's width that exist at once: gate, up and their product; else the matrix product
# and its activation; of gate and up in one, that, the activation and the product.
_GATED_BUFFERS, _PLAIN_BUFFERS, _FUSED_BUFFERS = 3, 2, 4
_ADDED_BUFFERS = 5  # what layers add: looked up, projected, normed, summed, with hidden states
_DECODE_BUFFERS = 3  # rows of an embedding of codes: gathered, rotated back, multiplied
_NORM_BUFFERS = 3  # float32 copy, its square, and the scaled result


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a stage by part; `runtime` is the device's context and the allocator's slack."""

    weights: int
    kv_cache: int
    embedding: int
    final: int
    temporary: int
    runtime: int

    @property
    def total(self) -> int:
        return self.fixed + self.weights + self.kv_cache

    @property
    def fixed(self) -> int:
        """The sum of all parts but the layers and their KV cache."""
        return self.embedding + self.final + self.temporary + self.runtime


@dataclass(frozen=True)
class StageWork:
    """The work of a stage in `dtype`. `quantized`: its kernels may be of less than 16 bits.
    `kv_bits`: 16 stands for `dtype`. `mixed`: most requests of a micro-batch that mixes the phases,
    0 where none does. `vocabulary`: logits of a row where `shape` has only a rank's part of them.
    """

    shape: ModelShape
    workload: Workload
    sizes: MicroBatches
    dtype: str
    quantized: bool = True
    kv_bits: int = FULL_BITS
    mixed: int = 0
    vocabulary: int | None = None

    @cached_property
    def of_kinds(self) -> tuple[StageWork, ...]:
        """The work of a model with only such layers, for each kind of layer."""
        return tuple(replace(self, shape=each) for each in self.shape.kind_shapes)

    @property
    def prefill_tokens(self) -> int:
        return self.sizes.prefill * self.workload.prompt_length + self.mixed

    @property
    def decode_requests(self) -> int:
        return max(self.sizes.decode, self.mixed)

    @property
    def most_tokens(self) -> int:
        return max(self.prefill_tokens, self.decode_requests)


@dataclass(frozen=True)
class StageEnds:
    embedding: bool = False
    norm: bool = False
    head: bool = False

    @classmethod
    def of(cls, stage: int, stages: int, head_on_first: bool = False) -> StageEnds:
        is_first, is_last = stage == 0, stage == stages - 1
        return cls(is_first, is_last, is_first if head_on_first else is_last)


def temporary_bytes(work: StageWork, ends: StageEnds, processor: Processor | None = None) -> int:
    """Peak bytes of activations without padding, and of hidden states between stages."""
    shape, element = work.shape, DTYPE_BYTES[work.dtype]
    peaks = [_layers_peak(work, processor)]
    if ends.embedding:
        widths = shape.word_embedding_size + 2 * shape.hidden_size
        widths += _ADDED_BUFFERS * (shape.message_width - shape.hidden_size)
        coded = _DECODE_BUFFERS * shape.word_embedding_size * _FLOAT32_BYTES
        coded *= shape.head_bits != FULL_BITS
        peaks.append(work.most_tokens * (widths * element + coded + 2 * _TOKEN_ID_BYTES))
    if ends.head:
        rows = max(work.sizes.prefill, work.decode_requests)
        logits = work.vocabulary or shape.vocab_size
        peaks.append(rows * logits * (element + _SAMPLING_BYTES_PER_LOGIT))
    under_way = _TRANSFER_BUFFERS * work.most_tokens * shape.message_width * element
    added = max(map(adapter_widths, shape.kind_shapes)) * work.most_tokens * element
    return max(peaks) + under_way + _scratch_bytes(work) + added


def _scratch_bytes(work: StageWork) -> int:
    """Scratch that layers with rooms share, and their own where later layers read their keys."""
    scratch, is_read = 0, any(each.reads_earlier_keys for each in work.shape.kind_shapes)
    for each in work.shape.kind_shapes:
        room, window = work.workload.room(each.sliding_window), each.sliding_window
        if room is not None and window is not None:
            tokens = scratch_tokens(room, window, work.prefill_tokens, work.mixed)
            own = tokens * kv_token_bytes(each, work.kv_bits, work.dtype)
            scratch = max(scratch, own * (2 if is_read else 1))
    return scratch


@lru_cache(maxsize=1024)
def _layers_peak(work: StageWork, processor: Processor | None) -> int:
    """The most bytes that a layer takes at once, wherever the stage is."""
    return max(_layer_peak(each, processor) for each in work.of_kinds)


def _layer_peak(work: StageWork, processor: Processor | None) -> int:
    shape, element = work.shape, DTYPE_BYTES[work.dtype]
    mlp = _mlp_bytes(work, work.most_tokens)
    if shape.delta is not None:
        own = has_kernels(processor or Processor(), work.dtype) and shape.delta.has_step_kernel
        prompts = work.sizes.prefill + work.mixed, work.prefill_tokens
        mixers = (
            mixer_bytes(shape.delta, shape.hidden_size, batch, element, own)
            for batch in (prompts, (work.decode_requests, work.decode_requests))
        )
        return max(mlp, *mixers)
    prefill = _prompt_bytes(work, processor)
    decode = _attention_bytes(work, work.decode_requests, _decode_keys(work, processor), False)
    if not _reads_ranges(work, processor):  # else nothing is masked
        prefill += bias_bytes(shape, work.workload.prompt_length, element)
    return max(
        prefill,
        decode + _decode_index_bytes(work) + _split_bytes(work),
        mlp,
    )


def _decode_keys(work: StageWork, processor: Processor | None) -> int:
    """Most tokens that a decode step copies at once; on GPUs that read ranges where they lie those
    of one request, as what takes its place after a failed self-test does
    (`actors.attention.addresses.Addresses.read_together`).
    """
    shape, longest = work.shape, work.workload.total_length
    longest = min(longest, work.workload.room(shape.sliding_window) or longest)
    copied = longest if _reads_ranges(work, processor) else work.decode_requests * longest
    return min(copied, work.workload.kv_tokens)


def _reads_ranges(work: StageWork, processor: Processor | None) -> bool:
    return processor is not None and reads_ranges(processor, work.dtype, work.shape.head_dim)


def _split_bytes(work: StageWork) -> int:
    """Bytes of the sums that splits of ranges leave."""
    splits = min(MOST_SPLITS, work.workload.total_length // SPLIT_TOKENS)
    if splits < 2:
        return 0
    rows = min(_SPLIT_ROWS, work.decode_requests * work.shape.heads * splits)
    return rows * (work.shape.head_dim + 2) * _FLOAT32_BYTES


def _decode_index_bytes(work: StageWork) -> int:
    """Bytes of slots that a step reads, and of what is added to scores, for equal lengths."""
    heads = work.shape.heads if work.shape.alibi else 1
    each = _TOKEN_ID_BYTES + heads * DTYPE_BYTES[work.dtype]
    return work.decode_requests * work.workload.total_length * each


def runtime_bytes(device: Device) -> int:
    """Bytes of the device's context and the allocator's slack; 0 where the budget is stated net."""
    if device.runs_on_cpu:
        return 0
    return device.runtime_bytes + round(_ALLOCATOR_SLACK * device.memory_bytes)


def fixed_stage_memory(work: StageWork, device: Device, ends: StageEnds) -> StageMemory:
    """The parts of a stage that do not depend on its layers; `weights` and `kv_cache` are 0."""
    shape, held = work.shape, (work.shape, work.dtype, device.processor)
    norm = norm_bytes(shape, work.dtype) if ends.norm else 0
    head = head_bytes(*held, on_first=ends.embedding) if ends.head else 0
    return StageMemory(
        weights=0,
        kv_cache=0,
        embedding=embedding_bytes(*held, with_head=ends.head) if ends.embedding else 0,
        final=norm + head,
        temporary=temporary_bytes(work, ends, device.processor) + graph_bytes(work, device),
        runtime=runtime_bytes(device),
    )


def padded_rows(requests: int) -> int:
    """Rows of a recorded decode step of so many requests: powers of two, from 16 on with one and a
    half of each, so that at most a third of them is nobody's.
    """
    power = 1 << (requests - 1).bit_length()
    middle = power * 3 // 4
    return middle if middle >= 24 and requests <= middle else power


def graph_bytes(work: StageWork, device: Device) -> int:
    """Bytes of the decode steps that `actors.stage.decode_graphs` records on GPUs whose attention
    and states are kernels of ours: inputs and results of each, and the temporaries of the largest,
    which all share.

    The kernels in a graph are the driver's, in `Device.runtime_bytes`: about 10 kB each (NVIDIA's
    CCCL, pull request 3768, which bounds its graphs by that), 1.2 MB a layer in all graphs.
    """
    if device.degree > 1 or not all(_is_recorded(each, device) for each in work.of_kinds):
        return 0
    rows = padded_rows(work.decode_requests)
    ends = 2 * rows * work.shape.message_width * DTYPE_BYTES[work.dtype]
    return MOST_GRAPHS * ends + max(_recorded_bytes(each, device, rows) for each in work.of_kinds)


def _is_recorded(work: StageWork, device: Device) -> bool:
    """Whether steps of a kind may be recorded: not of latents, of experts at some bitwidths."""
    shape, processor = work.shape, device.processor
    if shape.latent is not None or (shape.experts is not None and not work.quantized):
        return False
    if shape.delta is not None:
        return has_kernels(processor, work.dtype) and shape.delta.has_step_kernel
    return reads_ranges(processor, work.dtype, shape.head_dim)


def _recorded_bytes(work: StageWork, device: Device, rows: int) -> int:
    shape = work.shape
    mlp = _mlp_bytes(replace(work, quantized=False), rows)
    if work.quantized:
        restored = restored_bytes(shape, device.processor, work.dtype, rows)
        mlp += max(restored, rows * int8_bytes(shape))
    if shape.delta is not None:
        element = DTYPE_BYTES[work.dtype]
        return max(mlp, mixer_bytes(shape.delta, shape.hidden_size, (rows, rows), element, True))
    return max(_attention_bytes(work, rows, 0, False), mlp) + _split_bytes(work)


def margin_bytes(device: Device, share: float) -> int:
    """Bytes of a GPU that a plan leaves free; 0 for a CPU, whose budget a user has chosen."""
    return 0 if device.accelerator.is_cpu else round(share * device.memory_bytes)


def _chosen_bytes(shape: ModelShape, choice: LayerChoice, device: Device, dtype: str) -> int:
    """Bytes on the device of the weights of a layer of one kind."""
    whole = layer_weight_bytes(shape, choice.bits, device, dtype)
    if shape.experts is None or choice == LayerChoice.whole(choice.bits):
        return whole
    rest = whole - experts_bytes(shape, choice.bits, device.processor, dtype)
    if choice.on_host:
        return rest
    return rest + experts_bytes(shape, choice.expert_bits, device.processor, dtype)


def with_streaming(memory: StageMemory, shape: ModelShape, dtype: str) -> StageMemory:
    """The memory of a stage to which experts may come from its host."""
    return replace(memory, temporary=memory.temporary + streaming_bytes(shape, dtype))


def memory_with_layers(
    work: StageWork,
    device: Device,
    layers: range,
    choices: Sequence[LayerChoice],
    fixed: StageMemory,
) -> StageMemory:
    """Fill up `fixed` with these layers of the model and their KV cache."""
    shapes, kinds = work.shape.kind_shapes, work.shape.kind_of_layer[layers.start : layers.stop]
    held = [
        (_chosen_bytes(shapes[kind], choice, device, work.dtype), kind)
        for kind, choice in zip(kinds, choices, strict=True)
    ]
    kept = [
        kv_cache_bytes_per_layer(own, work.workload, work.kv_bits, work.dtype) for own in shapes
    ]
    found = replace(
        fixed,
        weights=fixed.weights + sum(own for own, _ in held),
        kv_cache=fixed.kv_cache + sum(kept[kind] for _, kind in held),
    )
    hosted = any(choice.on_host for choice in choices)
    return with_streaming(found, work.shape, work.dtype) if hosted else found


def state_bytes(work: StageWork, layers: range) -> int:
    """Bytes of a request in these layers of the model, whatever its length."""
    kinds = [
        kept_of_requests(each, work.workload, work.kv_bits, work.dtype)[1]
        for each in work.shape.kind_shapes
    ]
    return sum(kinds[kind] for kind in work.shape.kind_of_layer[layers.start : layers.stop])


def _prompt_bytes(work: StageWork, processor: Processor | None) -> int:
    """Bytes of the attention of prompts: of latents, keys and values of whole ones, or what parts
    of long ones ask on a CPU.
    """
    tokens, latent = work.prefill_tokens, work.shape.latent
    if latent is None or work.mixed:
        return _attention_bytes(work, tokens, tokens, True)
    element, on_cpu = DTYPE_BYTES[work.dtype], processor is None or processor.is_cpu
    parts = CPU_TOKENS_AT_ONCE if on_cpu and tokens > CPU_TOKENS_AT_ONCE else 0
    whole = tokens * element * (2 * work.shape.hidden_size + expanded_numbers(work.shape, latent))
    if work.kv_bits != FULL_BITS:
        whole += code_bytes(work.shape, tokens, tokens, element, False)
    return max(whole, _attention_bytes(work, parts, work.workload.prompt_length, False))


def _attention_bytes(work: StageWork, tokens: int, key_tokens: int, repeats: bool) -> int:
    """Bytes of residual, norm, projections with rotated copies, copied keys and values, result.
    Prefill `repeats` keys for kernels that do not know grouped heads. 8-bit ones are restored
    before.
    """
    shape, element = work.shape, DTYPE_BYTES[work.dtype]
    per_token = 2 * shape.hidden_size + 2 * (shape.query_width + 2 * shape.kv_width)
    per_token += shape.query_width * (2 if shape.output_gate else 1)
    if shape.latent is not None:  # latents that are attended to, and the values of these
        per_token += shape.heads * (shape.latent.rank + shape.latent.value_width)
    keys = shape.query_width if repeats else attended_width(shape)
    norm = _NORM_BUFFERS * _FLOAT32_BYTES * shape.hidden_size
    attended = tokens * per_token * element + 2 * key_tokens * keys * element
    if work.kv_bits != FULL_BITS:
        attended += code_bytes(shape, tokens, key_tokens, element, repeats)
    return max(attended, tokens * (2 * shape.hidden_size * element + norm))


def _mlp_bytes(work: StageWork, tokens: int) -> int:
    """Bytes of residual, norm, buffers, and of the largest restored weights or int8 codes."""
    shape, element = work.shape, DTYPE_BYTES[work.dtype]
    buffers = _GATED_BUFFERS if shape.gated_mlp else _PLAIN_BUFFERS
    buffers = _FUSED_BUFFERS if shape.fused_mlp else buffers
    buffers += shape.activation_buffers
    total = 2 * tokens * shape.hidden_size * element
    if shape.experts is None:
        total += tokens * buffers * shape.intermediate_size * element
    else:
        total += expert_row_bytes(shape.experts, shape.hidden_size, tokens, element)
    if work.quantized:
        restored = max(linear.parameters for linear in all_linears(shape)) * element
        total += max(restored, tokens * int8_bytes(shape))
    return total
