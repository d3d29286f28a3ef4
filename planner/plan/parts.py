"""Parts of a plan file: types of its fields, forecasts, and the plans beside the chosen one."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import astuple
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PlainSerializer
from pydantic.dataclasses import dataclass

from planner.adapters import Ranks
from planner.costs.memory import StageMemory
from planner.lengths import RequestLengths
from planner.optimiser.problem import JobPasses
from planner.options import Quality
from planner.scheduling import PolicyName
from planner.workload import MAX_REQUESTS, Job
from quant.backends.table import KERNEL_RULES
from quant.rounding.importance_header import FINGERPRINT_HEX
from quant.scheme import BITWIDTHS, DTYPE_BYTES, HEAD_BITWIDTHS, KV_BITWIDTHS, PLAN_ROUNDINGS

STRICT = ConfigDict(extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)

MAX_BYTES = 2**60
"""An exbibyte: a stage of more is a typing error."""
MAX_LAYERS = 2**16
MAX_THREADS = 2**16
MAX_RANKS = 2**20
MAX_SECONDS = 1e9
"""Most seconds of one micro-batch: three decades."""


def _as_range(value: Any) -> Any:
    match value:
        case range():
            return value
        case [int(first), int(end)] if (
            bool not in (type(first), type(end)) and 0 <= first <= end <= MAX_LAYERS
        ):
            return range(first, end)
    raise ValueError(f"give [first, end], whole numbers from 0 to {MAX_LAYERS}, not {value!r:.40}")


def _one_of(choices: Collection[int | str]) -> AfterValidator:

    def check(value: int | str) -> int | str:
        if value not in choices:
            raise ValueError(f"{value!r} is not one of {', '.join(map(str, choices))}")
        return value

    return AfterValidator(check)


_FORMER_BACKENDS = {8: "bnb_int8"}
"""Those of plans that are read still; `planner.plan.check` refuses to run them."""


def _known_backends(backends: dict[int, str]) -> dict[int, str]:
    for bits, backend in backends.items():
        names = [rule.name for rule in KERNEL_RULES if rule.bits == bits]
        if backend not in (*names, _FORMER_BACKENDS.get(bits)):
            raise ValueError(f"{bits} bit has no backend {backend!r}; choose one of {names}")
    return backends


def _no_negative_part(memory: StageMemory) -> StageMemory:
    parts = astuple(memory)
    if min(parts) < 0 or max(parts) > MAX_BYTES:
        raise ValueError(f"{parts} bytes; each part is 0 to {MAX_BYTES}")
    return memory


Bits = Annotated[int, _one_of(BITWIDTHS)]
Bytes = Annotated[int, Field(ge=0, le=MAX_BYTES)]
Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
Positive = Annotated[float, Field(gt=0)]
LayerRange = Annotated[
    range,
    BeforeValidator(_as_range),
    PlainSerializer(lambda layers: [layers.start, layers.stop], return_type=list[int]),
]
Dtype = Annotated[str, _one_of(DTYPE_BYTES)]
Rounding = Annotated[str, _one_of(PLAN_ROUNDINGS)]
KvBits = Annotated[int, _one_of(KV_BITWIDTHS)]
HeadBits = Annotated[int, _one_of(HEAD_BITWIDTHS)]
Backends = Annotated[dict[int, str], AfterValidator(_known_backends)]
Memory = Annotated[StageMemory, AfterValidator(_no_negative_part)]


@dataclass(frozen=True, config=STRICT)
class PlannedAdapters:
    """Adapters beside the model: `folders` by name, and `ranks` of all together by module, for the
    layers of each kind.
    """

    folders: dict[str, str]
    ranks: tuple[dict[str, Annotated[int, Field(ge=1, le=MAX_RANKS)]], ...]

    @property
    def of_kinds(self) -> tuple[Ranks, ...]:
        return tuple(tuple(sorted(each.items())) for each in self.ranks)


@dataclass(frozen=True, config=STRICT)
class JobForecast:
    """The forecast of a job with `workload.global_batch` prompts in flight: simulated `seconds`
    from the first prefill to the last token, without loading. Prices are in the cluster file's
    currency.
    """

    job: Job
    seconds: Positive
    tokens_per_s: Positive
    passes: JobPasses
    price_per_hour: Annotated[float, Field(ge=0)] | None = None

    @property
    def cost(self) -> float | None:
        return None if self.price_per_hour is None else self.price_per_hour * self.seconds / 3600


@dataclass(frozen=True, config=STRICT)
class LatencyForecast:
    """Simulated requests of `lengths`: from its prefill's start a share `quantile` ends within
    `latency_s`, which may be off by `latency_error_s` for those that were drawn; `bound_s` was
    asked for, of which the share `margin` was left. `admission_wait_s`, the longest wait for the
    next turn where fewer than `requests_per_s` come, is not counted.
    """

    lengths: RequestLengths
    quantile: Annotated[float, Field(gt=0, lt=1)]
    bound_s: Positive | None
    requests_per_s: Positive
    tokens_per_s: Positive
    latency_s: Positive
    mean_latency_s: Positive
    admission_wait_s: Seconds
    evaluations: Annotated[int, Field(ge=0)]
    prompts: Annotated[int, Field(ge=1)] | None = None
    latency_error_s: Seconds = 0.0
    margin: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @property
    def seconds(self) -> float | None:
        if self.prompts is None:
            return None
        return self.prompts / self.requests_per_s + self.mean_latency_s


@dataclass(frozen=True, config=STRICT)
class Prediction:
    """The simulated time of a global batch or a job. `prefill_s`: until every request has its first
    token (of a job, by work of the busiest stage); `busy_share` is what each stage computes of the
    latency; `objective_latency_s`, the closed form, ranked plans.
    """

    latency_s: Positive
    prefill_s: Seconds
    decode_s: Seconds
    tokens_per_s: Positive
    prefill_bottleneck: int
    decode_bottleneck: int
    busy_share: tuple[float, ...]
    objective_latency_s: float


@dataclass(frozen=True, config=STRICT)
class PerplexityForecast:
    """Expected `increase` over 16 bit, with its interval; `max_omega` of `max_increase`."""

    baseline: float
    increase: float
    low: float
    high: float
    points: int
    max_increase: float | None = None
    max_omega: float | None = None


Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, config=STRICT)
class DivergenceScale:
    """How summed sensitivities of a model read as KL divergence from it as its checkpoint has it,
    in nats a token: `points` of both, ascending, with straight lines between them from 0 on; within
    `factor` either way and `margin` nats. `basis`: perplexities or layers of this model that were
    measured, else a calibration over others, of sensitivities without a unit or those of sizes.
    """

    points: tuple[tuple[Amount, Amount], ...]
    factor: Annotated[float, Field(ge=1)]
    margin: Amount
    basis: Literal["perplexities", "layers", "no unit", "sizes"]
    source: str

    def __post_init__(self) -> None:
        sums = [0.0, *(sensitivity for sensitivity, _ in self.points)]
        if any(one >= other for one, other in pairwise(sums)):
            raise ValueError("points must ascend by their sensitivity, from above 0 on")

    def at(self, sensitivity: float) -> float:
        before = (0.0, 0.0)
        for point in self.points:
            if sensitivity <= point[0]:
                share = (sensitivity - before[0]) / (point[0] - before[0])
                return before[1] + share * (point[1] - before[1])
            before = point
        return before[1] * sensitivity / before[0] if before[0] else 0.0


@dataclass(frozen=True, config=STRICT)
class QualityForecast:
    """What the bits of a plan are expected to cost: `divergence` in nats a token, between `low` and
    `high`, which is the logarithm of the ratio of perplexities too: the model's, on text as it
    would write it. `scale` reads other plans of the model by their sensitivity.
    """

    divergence: Amount
    low: Amount
    high: Amount
    scale: DivergenceScale

    @property
    def perplexity_ratio(self) -> float:
        return math.exp(self.divergence)


@dataclass(frozen=True, config=STRICT)
class PlannedImportance:
    """The `fingerprint` of the numbers, and the `file` that held them when the plan was made."""

    fingerprint: Annotated[str, Field(pattern=rf"^[0-9a-f]{{{FINGERPRINT_HEX}}}$")]
    file: Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, config=STRICT)
class PlannedWeights:
    """How a quantized checkpoint stores weights, in words; how many layers keep codes, and how many
    are rounded again, by their fewest bits.
    """

    stored: str
    kept: Annotated[int, Field(ge=0, le=MAX_LAYERS)]
    rounded: dict[Bits, Annotated[int, Field(ge=1, le=MAX_LAYERS)]]


Count = Annotated[int, Field(ge=1, le=MAX_REQUESTS)]


@dataclass(frozen=True, config=STRICT)
class PlanChoice:
    in_flight: Count
    tokens_per_s: Positive
    sensitivity: Amount
    mean_bits: Positive

    def beats(self, other: PlanChoice) -> bool:
        return self.tokens_per_s > other.tokens_per_s and self.sensitivity < other.sensitivity


@dataclass(frozen=True, config=STRICT)
class QualityChoice:
    quality: Quality
    theta: Amount
    plan: PlanChoice


@dataclass(frozen=True, config=STRICT)
class PolicyChoice:
    policy: PolicyName
    plan: PlanChoice


@dataclass(frozen=True, config=STRICT)
class MoreDevices:
    accelerator: str
    node: str
    count: Count
    plan: PlanChoice


@dataclass(frozen=True, config=STRICT)
class PlansBeside:
    """`quality` is that of `qualities` which was taken (None: theta, a bound or a method decided).
    `full_precision` is the fastest at the most bits allowed, `curve` the best for other numbers in
    flight, `beaten_by` a plan of fewer prompts that is faster and loses less, `grouped` a better
    one with groups of devices, where none were tried, `other_policy` the one that policy `auto` did
    not take.
    """

    quality: Quality | None = None
    qualities: tuple[QualityChoice, ...] = ()
    full_precision: PlanChoice | None = None
    curve: tuple[PlanChoice, ...] = ()
    more_devices: tuple[MoreDevices, ...] = ()
    beaten_by: PlanChoice | None = None
    grouped: PlanChoice | None = None
    other_policy: PolicyChoice | None = None
