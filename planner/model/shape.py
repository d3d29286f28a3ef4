"""The shape of a decoder-only language model, and the number of parameters of each part."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from quant.checkpoint.gptq_config import WHOLE_ROW, GptqConfig
from quant.common.errors import SpecError
from quant.scheme import LinearShape, group_size

MAX_LAYERS = 2**12
MAX_SIZE = 2**24
"""Limits far beyond any model: larger numbers are typing errors."""

_NOT_IN_FINGERPRINT = frozenset(
    {
        "name",
        "max_positions",
        "sliding_window",
        "stored",
        "alibi",
        "activation_buffers",
        "cut_groups",
    }
)
_POSITIVE = (
    "layers",
    "hidden_size",
    "intermediate_size",
    "heads",
    "kv_heads",
    "head_dim",
    "vocab_size",
    "max_positions",
    "word_embedding_size",
)


@dataclass(frozen=True)
class ModelShape:
    """The properties of a model that planning needs; sizes count elements (LLM-PQ table 2).

    `position_rows`: rows of a learned position table, 0 for rotary positions or ALiBi.
    `word_embedding_size`: width of the token embedding and the LM head; where it differs from
    `hidden_size`, projections without bias lie between (OPT-350m).
    `norm_parameters`: of one normalisation over the hidden size (weight, and bias if it has one);
    every layer has two. `final_norm` and `embedding_norm` are as wide as the hidden size too,
    `qk_norm` are two over the head size.
    `sliding_window`: tokens that attention looks back, None for all of them.
    `stored`: how the checkpoint's linears are quantized already, None where they are not.
    `alibi`: attention adds a bias by distance in place of positions, and no length is its end.
    `activation_buffers`: elements of the MLP's width that its activation needs beside its result.
    `cut_groups`: of what a rank of a tensor-parallel group holds, the columns that share a scale in
    attention's output and in the MLP's last linear (`planner.model.tensor_parallel`).
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
    stored: GptqConfig | None = None
    alibi: bool = False
    activation_buffers: int = 0
    cut_groups: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            most = MAX_LAYERS if name == "layers" else MAX_SIZE
            if not 1 <= getattr(self, name) <= most:
                raise SpecError(
                    f"model {self.name}: {name} is {getattr(self, name)!r:.40}; 1 to {most} can be"
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
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of one token's keys, and as many values, in one layer."""
        return self.kv_heads * self.head_dim

    def layer_linears(self) -> tuple[LinearShape, ...]:
        """The weight matrices of one decoder layer, fused where transformers fuses them."""
        return self._layer_linears

    @cached_property
    def _layer_linears(self) -> tuple[LinearShape, ...]:
        output = LinearShape(self.query_width, self.hidden_size)
        plain = (*self._qkv_linears(), output, *self._mlp_linears())
        linears = [self._as_stored(place, linear) for place, linear in enumerate(plain)]
        for place, group in zip((self._output_place, -1), self.cut_groups or (), strict=False):
            linears[place] = replace(linears[place], cut_group=group)
        return tuple(linears)

    @property
    def output_linear(self) -> LinearShape:
        return self._layer_linears[self._output_place]

    @property
    def _output_place(self) -> int:
        return len(self._qkv_linears())

    @property
    def layer_input_order_bytes(self) -> int:
        """Bytes of the indices of a layer's inputs where the columns of a group lie apart."""
        if self.stored is None or not self.stored.desc_act:
            return 0
        return sum(4 * linear.in_features for linear in self.layer_linears())

    @property
    def layer_linear_parameters(self) -> int:
        return sum(linear.parameters for linear in self.layer_linears())

    @property
    def layer_other_parameters(self) -> int:
        """Number of parameters of a layer's norms and biases, which stay in the compute type."""
        biases = self.qkv_bias * sum(linear.out_features for linear in self._qkv_linears())
        biases += self.output_bias * self.hidden_size
        biases += self.mlp_bias * sum(linear.out_features for linear in self._mlp_linears())
        return biases + 2 * self.norm_parameters + 2 * self.head_dim * self.qk_norm

    @property
    def layer_parameters(self) -> int:
        return self.layer_linear_parameters + self.layer_other_parameters

    @property
    def head_parameters(self) -> int:
        """Number of parameters of the LM head, tied or not; it has no bias."""
        return self.vocab_size * self.word_embedding_size

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters of the embedding: tokens, positions, projection in, norm."""
        tokens = self.vocab_size * self.word_embedding_size
        positions = self.position_rows * self.hidden_size
        return tokens + positions + self._projection + self.embedding_norm * self.norm_parameters

    @property
    def final_parameters(self) -> int:
        """Number of parameters of final norm, projection out and LM head.

        A tied head counts too: a last stage that is not the first needs a copy of its own.
        """
        return self.final_norm * self.norm_parameters + self._projection + self.head_parameters

    @property
    def total_parameters(self) -> int:
        """Number of parameters of the model; tied embeddings count once."""
        shared = self.head_parameters if self.tied_embeddings else 0
        ends = self.embedding_parameters + self.final_parameters - shared
        return self.layers * self.layer_parameters + ends

    def fingerprint(self) -> str:
        """A digest of what decides on the tensors' shapes: equal for equal architectures."""
        kept = {key: value for key, value in asdict(self).items() if key not in _NOT_IN_FINGERPRINT}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def _projection(self) -> int:
        if self.word_embedding_size == self.hidden_size:
            return 0
        return self.word_embedding_size * self.hidden_size

    def _as_stored(self, place: int, linear: LinearShape) -> LinearShape:
        """The linear with the columns that share a stored scale, in groups of at most the usual
        size, and with its stored bits where they are not those of the others.
        """
        stored = self.stored
        if stored is None:
            return linear
        own = stored.linears[place] if stored.linears else stored
        size, usual = own.group_size, group_size(linear.in_features)
        group = usual if size == WHOLE_ROW or size % usual == 0 else size
        bits = None if own.bits == stored.bits else own.bits
        return replace(linear, stored_group=group, stored_bits=bits)

    def _qkv_linears(self) -> tuple[LinearShape, ...]:
        if self.fused_qkv:
            return (LinearShape(self.hidden_size, self.query_width + 2 * self.kv_width),)
        key = LinearShape(self.hidden_size, self.kv_width)
        return (LinearShape(self.hidden_size, self.query_width), key, key)

    def _mlp_linears(self) -> tuple[LinearShape, ...]:
        up = LinearShape(self.hidden_size, self.intermediate_size)
        down = LinearShape(self.intermediate_size, self.hidden_size)
        return (up, up, down) if self.gated_mlp else (up, down)
