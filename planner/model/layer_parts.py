"""Parts of decoder layers that only some models have: experts, latent attention, and mixers with a
constant state.
"""

from __future__ import annotations

from dataclasses import dataclass

from quant.scheme import LinearShape

_QUAD, _LARGEST_HEAD, _CONV_WIDTHS = 4, 128, range(2, 9)


@dataclass(frozen=True)
class Experts:
    """`count` MLPs of `width`, of which a router asks `per_token` for each token; `shared_width` is
    that of one which all tokens ask (0: none), whose result is `shared_gate`d or not. `has_biases`:
    of router and experts. `router_bias`: of its choice alone; `router_scales`: a factor for each
    input and for each expert.
    """

    count: int
    per_token: int
    width: int
    shared_width: int = 0
    shared_gate: bool = False
    has_biases: bool = False
    router_bias: bool = False
    router_scales: bool = False

    def asked(self, tokens: float) -> float:
        """How many a pass of so many tokens asks, all as likely: E (1 - (1 - k/E)^tokens)."""
        return self.count * (1 - float((1 - self.per_token / self.count) ** tokens))

    def linears(self, hidden_size: int) -> tuple[LinearShape, LinearShape]:
        """The weights of one expert, gate and up in one."""
        return LinearShape(hidden_size, 2 * self.width), LinearShape(self.width, hidden_size)

    def biases_of_one(self, hidden_size: int) -> int:
        return self.has_biases * sum(linear.out_features for linear in self.linears(hidden_size))

    def bias_parameters(self, hidden_size: int) -> int:
        """Biases of router and experts, and factors of the router."""
        router = self.has_biases + self.router_bias
        scales = (hidden_size + self.count) * self.router_scales
        return self.count * (router + self.biases_of_one(hidden_size)) + scales

    @property
    def exact_parameters(self) -> int:
        """What is held in float32: the bias of the router's choice."""
        return self.count * self.router_bias

    def shared_linears(self, hidden_size: int, fused: bool) -> tuple[LinearShape, ...]:
        if not self.shared_width:
            return ()
        down = LinearShape(self.shared_width, hidden_size)
        if fused:
            return LinearShape(hidden_size, 2 * self.shared_width), down
        up = LinearShape(hidden_size, self.shared_width)
        return up, up, down


@dataclass(frozen=True, order=True)
class LayerChoice:
    """What a plan chooses for a layer: bits, experts' bits, and if experts lie on the host."""

    bits: int
    expert_bits: int
    on_host: bool = False

    @classmethod
    def whole(cls, bits: int) -> LayerChoice:
        return cls(bits, bits)


@dataclass(frozen=True)
class LatentAttention:
    """Attention of which a layer holds one vector of a token in place of keys and values
    (DeepSeek-V2, section 2.1): a latent of `rank` numbers, of which keys and values of all heads
    are products, and `rotary_width` numbers that positions rotate, alike for all heads. Keys of a
    head have `plain_width` numbers beside those, its values `value_width`. `query_rank`: that of a
    latent of the queries (0: none).
    """

    rank: int
    rotary_width: int
    plain_width: int
    value_width: int
    query_rank: int = 0

    @property
    def held_width(self) -> int:
        return self.rank + self.rotary_width

    @property
    def expanded_width(self) -> int:
        """Elements of the key and the value that a head has of a token."""
        return self.plain_width + self.rotary_width + self.value_width

    def linears(self, hidden_size: int, heads: int) -> tuple[LinearShape, ...]:
        """Its projections in the order of their names in transformers, the output last."""
        width = heads * (self.plain_width + self.rotary_width)
        queries: tuple[LinearShape, ...] = (LinearShape(hidden_size, width),)
        if self.query_rank:
            queries = LinearShape(hidden_size, self.query_rank), LinearShape(self.query_rank, width)
        held = LinearShape(hidden_size, self.held_width)
        return (*queries, held, LinearShape(heads * self.value_width, hidden_size))

    def expansion(self, heads: int) -> LinearShape:
        """What makes keys and values of a latent. Elsewhere than in prompts queries and results are
        multiplied by it, head by head, so that it stays in the compute type.
        """
        return LinearShape(self.rank, heads * (self.plain_width + self.value_width))

    @property
    def other_parameters(self) -> int:
        return self.rank + self.query_rank


@dataclass(frozen=True)
class DeltaMixer:
    """A gated delta rule with a causal convolution (Qwen3-Next, Qwen3.5): a state of `key_dim` by
    `value_dim` numbers for each value head in place of keys and values. `fused`: two projections
    hold queries, keys, values and gate, and both rates; else four.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    fused: bool = False

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_width + self.value_width

    def linears(self, hidden_size: int) -> tuple[LinearShape, ...]:
        """Its projections in the order of their names in transformers, the output last."""
        widths = [self.conv_channels, self.value_width, self.value_heads, self.value_heads]
        if self.fused:
            widths = [self.conv_channels + self.value_width, 2 * self.value_heads]
        projections = (LinearShape(hidden_size, width) for width in widths)
        return (*projections, LinearShape(self.value_width, hidden_size))

    @property
    def other_parameters(self) -> int:
        """The convolution, decay and bias of each head, and the norm of a head's values."""
        conv = self.conv_channels * self.conv_width
        return conv + self.exact_parameters + self.value_dim

    @property
    def exact_parameters(self) -> int:
        """Those of `other_parameters` that are held in float32: decay and bias of each head."""
        return 2 * self.value_heads

    @property
    def has_step_kernel(self) -> bool:
        """Whether GPUs have a kernel of ours that takes a step (`actors.attention.delta.rule`)."""
        heads = self.key_dim, self.value_dim
        known = all(each % _QUAD == 0 and each <= _LARGEST_HEAD for each in heads)
        return known and self.conv_width in _CONV_WIDTHS

    @property
    def state_elements(self) -> int:
        """Numbers of a request's state in one layer, in float32: no other width is exact enough."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def conv_elements(self) -> int:
        """Inputs of the convolution that a request keeps in one layer, in the compute type."""
        return self.conv_channels * (self.conv_width - 1)
