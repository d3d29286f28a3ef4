"""The shape of a decoder-only language model, and the number of parameters of each part."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

from planner.model.layer_parts import DeltaMixer, Experts, LatentAttention
from quant.checkpoint.stored_config import ROUNDED_AGAIN, StoredConfig, StoredLinear
from quant.common.errors import SpecError
from quant.scheme import FULL_BITS, LinearShape

MAX_LAYERS = 2**12
MAX_SIZE = 2**24
"""Limits far beyond any model: larger numbers are typing errors."""

_NOT_IN_FINGERPRINT = (
    *("name", "max_positions", "sliding_window", "stored", "decoded", "alibi"),
    *("activation_buffers", "cut_groups", "adapter_ranks", "head_bits"),
)
_NOT_IN_OLDER_ONES = (
    *("kind", "kinds", "pattern", "joined", "experts", "delta", "layer_norms", "fused_mlp"),
    *("output_gate", "qk_norm_width", "values_are_keys", "reads_earlier_keys", "extra_linears"),
    *("per_layer_width", "sinks", "latent"),
)
"""Fields that enter the fingerprint only where they say something, so that plans from before them
keep theirs."""
_POSITIVE = (
    *("layers", "hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim"),
    *("vocab_size", "max_positions", "word_embedding_size"),
)


@dataclass(frozen=True)
class ModelShape:
    """The properties of a model that planning needs; sizes count elements (LLM-PQ table 2).
    `position_rows` are of a learned table (0: rotary or ALiBi); a `word_embedding_size` other than
    `hidden_size` has projections without bias between (OPT-350m). `norm_parameters` are of one norm
    over the hidden size, `qk_norm` of two over the head size. `sliding_window` None: all tokens.
    `stored`: the codes of a quantized checkpoint, of its kinds each its own, which stages keep at
    those bits; `decoded`: how weights are stored of which none is kept. `alibi`: no length is its
    end. `activation_buffers` of the MLP's width beside its result. `cut_groups`: columns of a rank
    that share a scale in attention's output, in the MLP's last linear and in an expert's, where
    there are such
    (`planner.model.tensor_parallel`). `adapter_ranks`: what adapters beside the model add to
    linears of a layer (`planner.adapters`); `head_bits`: what a plan gives embedding and LM head.
    """

    name: str
    model_type: str
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    word_embedding_size: int
    norm_parameters: int
    tied_embeddings: bool
    position_rows: int = 0
    gated_mlp: bool = False
    fused_qkv: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    final_norm: bool = True
    embedding_norm: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    stored: StoredConfig | None = None
    decoded: str = ""
    alibi: bool = False
    activation_buffers: int = 0
    cut_groups: tuple[int, ...] = ()
    kind: str = ""
    kinds: tuple[ModelShape, ...] = ()
    pattern: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    experts: Experts | None = None
    delta: DeltaMixer | None = None
    layer_norms: int = 2
    fused_mlp: bool = False
    output_gate: bool = False
    qk_norm_width: int = 0
    values_are_keys: bool = False
    reads_earlier_keys: bool = False
    extra_linears: tuple[LinearShape, ...] = ()
    per_layer_width: int = 0
    sinks: bool = False
    latent: LatentAttention | None = None
    adapter_ranks: tuple[tuple[str, int], ...] = ()
    head_bits: int = FULL_BITS

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # of all fields, of all kinds: too many to go through whenever what is known is looked up
        return hash(tuple(getattr(self, each.name) for each in fields(self)))

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            most = MAX_LAYERS if name == "layers" else MAX_SIZE
            if not 1 <= getattr(self, name) <= most:
                raise SpecError(
                    f"model {self.name}: {name} is {getattr(self, name)!r:.40}; 1 to {most} can be"
                )
        if self.kinds and len(self.pattern) != self.layers:
            raise SpecError(
                f"model {self.name}: kinds of {len(self.pattern)} layers are given of {self.layers}"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise SpecError(
                f"model {self.name}: sliding_window is {self.sliding_window}; at least 1, or null"
            )
        if self.heads % self.kv_heads:
            raise SpecError(
                f"model {self.name}: {self.heads} attention heads cannot share "
                f"{self.kv_heads} key/value heads evenly"
            )

    @property
    def kind_shapes(self) -> tuple[ModelShape, ...]:
        """The kinds of layers, each as the shape of a model with only such layers."""
        return self.kinds or (self,)

    @property
    def kind_of_layer(self) -> tuple[int, ...]:
        """The index of each layer's kind in `kind_shapes`, `[layers]`."""
        return self.pattern or (0,) * self.layers

    @property
    def kind_counts(self) -> tuple[int, ...]:
        """How many layers are of each of `kind_shapes`."""
        counts = Counter(self.kind_of_layer)
        return tuple(counts[kind] for kind in range(len(self.kind_shapes)))

    def layer(self, index: int) -> ModelShape:
        """The shape of a model with only such layers as number `index`."""
        return self.kind_shapes[self.kind_of_layer[index]]

    def over_layers(self, of_kind: Callable[[ModelShape], int]) -> int:
        """The sum over all layers of what `of_kind` gives for the kind of each."""
        counted = zip(self.kind_shapes, self.kind_counts, strict=True)
        return sum(count * of_kind(kind) for kind, count in counted)

    @property
    def is_original(self) -> bool:
        """Whether weights are not quantized, or but as those of a GGUF file."""
        return self.stored is None or self.stored.is_gguf

    @cached_property
    def plain(self) -> ModelShape:
        """This shape as of weights that are not quantized: kinds that differ by them are one."""
        every = [replace(kind, stored=None, decoded="") for kind in self.kinds]
        kinds = tuple(dict.fromkeys(every))
        pattern = tuple(kinds.index(every[kind]) for kind in self.pattern)
        if len(kinds) == 1:
            kinds = pattern = ()
        return replace(self, stored=None, decoded="", kinds=kinds, pattern=pattern)

    def at(self, bits: int) -> ModelShape:
        """Layers of one kind as a plan of `bits` holds them: as they are stored where the layer
        has as many, or a linear; other linears are rounded again.
        """
        stored = self.stored
        if stored is None or bits == stored.bits:
            return self
        if bits not in self._at:
            again = StoredLinear(bits, ROUNDED_AGAIN)
            own = tuple(each if each.bits == bits else again for each in stored.linears)
            changed = replace(stored, bits=bits, group_size=ROUNDED_AGAIN, linears=own)
            self._at[bits] = replace(self, stored=changed)
        return self._at[bits]

    def rounds(self, bits: int, linears: slice = slice(None)) -> bool:
        """Whether a plan of `bits` rounds some of the `linears` of layers of this kind."""
        stored = self.stored
        if stored is None or bits in (FULL_BITS, stored.bits):
            return stored is None and bits != FULL_BITS
        return any(each.bits != bits for each in stored.linears[linears] or (stored,))

    @cached_property
    def _at(self) -> dict[int, ModelShape]:
        return {}

    def with_all(self, **changes: Any) -> ModelShape:
        """Return this shape with what its kinds have in common changed."""
        kinds = tuple(replace(kind, **changes) for kind in self.kinds)
        return replace(self, kinds=kinds, **changes)

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of one token's keys, or values, that a layer holds."""
        holds_none = self.delta is not None or self.reads_earlier_keys
        return 0 if holds_none else self.kv_heads * self.head_dim

    @property
    def kv_elements(self) -> int:
        """Elements of one token's keys and values together; a latent is both."""
        return self.kv_width * (2 if self.latent is None else 1)

    def state_bytes(self, element_bytes: int) -> int:
        """A request's state in a layer; its convolution in the compute type, of `element_bytes`."""
        if self.delta is None:
            return 0
        return 4 * self.delta.state_elements + element_bytes * self.delta.conv_elements

    @cached_property
    def layer_linears(self) -> tuple[LinearShape, ...]:
        """Weight matrices of a decoder layer that have its bitwidth, fused where transformers fuses
        them, in the order of `Architecture.attention` and `mlp`; without those of its experts.
        """
        mlp = self._mlp_linears()
        plain = (*self._attention_linears(), *mlp)
        linears = [self._as_stored(place, linear) for place, linear in enumerate(plain)]
        lasts = (self._output_place, -1) if mlp else (self._output_place,)
        for place, group in zip(lasts, self.cut_groups, strict=False):
            linears[place] = replace(linears[place], cut_group=group)
        return tuple(linears)

    @property
    def expert_linears(self) -> tuple[LinearShape, ...]:
        """Weights of one expert, gate and up in one; none where the layer has no experts."""
        if self.experts is None:
            return ()
        first = len(self._attention_linears()) + len(self._mlp_linears())
        plain = self.experts.linears(self.hidden_size)
        grown, last = (self._as_stored(first + place, own) for place, own in enumerate(plain))
        return grown, replace(last, cut_group=self.cut_groups[-1] if self.cut_groups else None)

    @property
    def full_linears(self) -> tuple[LinearShape, ...]:
        """Weights that stay in the compute type: routers, gates, and what makes latents' keys."""
        found = self.extra_linears
        if self.latent is not None:
            found = (*found, self.latent.expansion(self.heads))
        if self.experts is not None:
            found = (*found, LinearShape(self.hidden_size, self.experts.count))
            found += (LinearShape(self.hidden_size, 1),) * self.experts.shared_gate
        return found

    @property
    def output_linear(self) -> LinearShape:
        return self.layer_linears[self._output_place]

    @property
    def _output_place(self) -> int:
        return len(self._attention_linears()) - 1

    @property
    def layer_linear_parameters(self) -> int:
        """Weights that have the layer's bitwidth, of all experts."""
        experts = self.experts.count if self.experts is not None else 0
        each = sum(linear.parameters for linear in self.expert_linears)
        return sum(linear.parameters for linear in self.layer_linears) + experts * each

    @property
    def layer_other_parameters(self) -> int:
        """Norms, biases, routers, convolutions: all that stays in the compute type."""
        biases = self.qkv_bias * sum(linear.out_features for linear in self._qkv_linears())
        biases += self.output_bias * self.hidden_size
        if self.experts is not None:
            biases += self.experts.bias_parameters(self.hidden_size)
        else:
            biases += self.mlp_bias * sum(linear.out_features for linear in self._mlp_linears())
        head_norms = (1 if self.reads_earlier_keys else 2) * self.qk_norm
        norms = self.layer_norms * self.norm_parameters + head_norms * self.head_dim
        mixer = 0 if self.delta is None else self.delta.other_parameters
        mixer += 0 if self.latent is None else self.latent.other_parameters
        mixer += self.heads * self.sinks
        full = sum(linear.parameters for linear in self.full_linears)
        return biases + norms + self.qk_norm_width + mixer + full

    @property
    def layer_parameters(self) -> int:
        """Those of a layer; of layers of several kinds the mean, rounded down."""
        return sum(self.parameters_by_layer) // self.layers

    @property
    def parameters_by_layer(self) -> tuple[int, ...]:
        own = [
            each.layer_linear_parameters + each.layer_other_parameters for each in self.kind_shapes
        ]
        return tuple(own[kind] for kind in self.kind_of_layer)

    @property
    def message_width(self) -> int:
        """Numbers of a token between stages: hidden states, and what each layer adds to them."""
        return self.hidden_size + self.layers * self.per_layer_width

    @property
    def head_linear(self) -> LinearShape:
        return LinearShape(self.word_embedding_size, self.vocab_size)

    @property
    def head_parameters(self) -> int:
        return self.head_linear.parameters

    @property
    def embedding_parameters(self) -> int:
        tokens = self.vocab_size * self.word_embedding_size
        positions = self.position_rows * self.hidden_size
        norm, width = self.embedding_norm * self.norm_parameters, self.per_layer_width
        by_layer = self.layers * width * (self.vocab_size + self.hidden_size) + width
        return tokens + positions + self._projection + norm + by_layer

    @property
    def final_parameters(self) -> int:
        """Final norm, projection out and head, tied too: a last stage needs a copy of its own."""
        return self.final_norm * self.norm_parameters + self._projection + self.head_parameters

    @property
    def total_parameters(self) -> int:
        shared = self.head_parameters if self.tied_embeddings else 0
        ends = self.embedding_parameters + self.final_parameters - shared
        return sum(self.parameters_by_layer) + ends

    @property
    def active_parameters(self) -> int:
        """All but those of experts that a token does not ask."""
        return self.total_parameters - self.over_layers(lambda kind: kind.idle_parameters)

    @property
    def idle_parameters(self) -> int:
        """Those of a layer's experts that a token does not ask; of layers of one kind."""
        if self.experts is None:
            return 0
        each = sum(linear.parameters for linear in self.expert_linears)
        each += self.experts.biases_of_one(self.hidden_size)
        return (self.experts.count - self.experts.per_token) * each

    def fingerprint(self) -> str:
        """A digest of the model, however its weights are stored."""
        if self.stored is not None:
            return self.with_all(adapter_ranks=(), head_bits=FULL_BITS).plain.fingerprint()
        kept = {key: value for key, value in asdict(self).items() if key not in _NOT_IN_FINGERPRINT}
        for key in _NOT_IN_OLDER_ONES:
            if getattr(self, key) == getattr(type(self), key):
                del kept[key]
        if self.kinds:
            kept["kinds"] = [each.fingerprint() for each in self.kinds]
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def _projection(self) -> int:
        if self.word_embedding_size == self.hidden_size:
            return 0
        return self.word_embedding_size * self.hidden_size

    def _as_stored(self, place: int, linear: LinearShape) -> LinearShape:
        stored = self.stored
        if stored is None:
            return linear
        alike = StoredLinear(stored.bits, stored.group_size)
        own = stored.linears[place] if stored.linears else alike
        return own.held(linear, stored.bits)

    def _attention_linears(self) -> tuple[LinearShape, ...]:
        """Projections of attention, or of what stands in its place, its output last."""
        if self.delta is not None:
            return self.delta.linears(self.hidden_size)
        if self.latent is not None:
            return self.latent.linears(self.hidden_size, self.heads)
        return (*self._qkv_linears(), LinearShape(self.query_width, self.hidden_size))

    def _qkv_linears(self) -> tuple[LinearShape, ...]:
        if self.delta is not None or self.latent is not None:
            return ()
        if self.fused_qkv:
            return (LinearShape(self.hidden_size, self.query_width + 2 * self.kv_width),)
        query = LinearShape(self.hidden_size, self.query_width * (2 if self.output_gate else 1))
        if self.reads_earlier_keys:
            return (query,)
        key = LinearShape(self.hidden_size, self.kv_width)
        return (query, key) if self.values_are_keys else (query, key, key)

    def _mlp_linears(self) -> tuple[LinearShape, ...]:
        if self.experts is not None:
            return self.experts.shared_linears(self.hidden_size, self.fused_mlp)
        up = LinearShape(self.hidden_size, self.intermediate_size)
        down = LinearShape(self.intermediate_size, self.hidden_size)
        if self.fused_mlp:
            return (LinearShape(self.hidden_size, 2 * self.intermediate_size), down)
        return (up, up, down) if self.gated_mlp else (up, down)
