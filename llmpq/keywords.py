"""The keyword options of `Cluster` and `Plan`, for editors to complete and checkers to check.

They are the fields of `PlanOptions`, `RunOptions`, `Sampling` and `EvaluationOptions`, which say
what they mean; a test holds names and types against these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, get_type_hints

from actors.recovery.policy import OnDeviceLoss
from actors.transport import Transport
from llmpq.rows.sampling import GenerationConfigUse
from llmpq.rows.tools import ToolParser
from planner.optimiser.names import Objective
from planner.options import Quality
from planner.scheduling import PlannedPolicy, PolicyName

F = TypeVar("F", bound=Callable[..., Any])


class PlanKeywords(TypedDict, total=False):
    """Options of `Cluster.plan`: the fields of `PlanOptions`."""

    theta: float | None
    quality: Quality | None
    in_flight: int | str
    bits: Iterable[int]
    format: str | None
    dtype: str
    objective: Objective
    method: str
    solver: str
    group: int
    all_orders: bool
    head: str
    keep_all_devices: bool
    max_omega: float | None
    max_latency_s: float | None
    max_ppl_delta: float | None
    omega_file: str | Path | None
    importance: str | Path | None
    profiles: str | Path | None
    profile_use: str
    shared_tokens: int | None
    prefill_micro_batch: int | None
    decode_micro_batch: int | None
    ilp_time_limit: float
    search_time_limit: float
    relative_gap: float
    rounding: str
    kv_bits: int | str
    head_bits: Iterable[int]
    memory_margin: float
    strict_profiles: bool
    no_measuring: bool
    policy: PlannedPolicy
    max_batch_size: int | None
    prefill_chunk_tokens: int | None
    tensor_parallel: int | str
    predictor: str | Path | None
    adapters: Mapping[str, str | Path] | Iterable[str]
    max_request_latency_s: float | Literal["inf"] | None
    quantile: float
    schedule: str


class SamplingKeywords(TypedDict, total=False):
    """Options of a session's run: the fields of `Sampling`; one that is None is not set."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None
    max_new_tokens: int | None
    stop: str | Iterable[str] | None
    ignore_eos: bool | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    stop_token_ids: Iterable[int] | None
    min_tokens: int | None
    structured_outputs: str | Mapping[str, Any] | None


class PromptingKeywords(TypedDict, total=False):
    """Options of making tokens of prompts: `llmpq.tokenizing.prompting.PromptingOptions`."""

    chat_template: str | Path | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_special_tokens: bool | None
    tool_parser: ToolParser | None


class RunKeywords(SamplingKeywords, PromptingKeywords, total=False):
    """Options of `Plan.run`: the fields of `RunOptions`, and those of its `sampling`."""

    model: str | None
    json_schema: str | Path | Mapping[str, Any] | None
    generation_config: GenerationConfigUse
    adapter: str | Path | None
    adapters: Mapping[str, str | Path] | Iterable[str]
    address: str | None
    cache_dir: str | Path | None
    cache_limit_gib: float | None
    no_cache: bool
    transport: Transport
    trace: str | Path | None
    trace_to: str | None
    on_device_loss: OnDeviceLoss
    retries: int
    hang_s: float
    replace_s: float
    row_s: float
    drift: float
    replan: Literal["auto", "never"] | None
    policy: PolicyName | None
    max_batch_size: int | None
    prefill_chunk_tokens: int | None
    predictor: str | Path | None
    save_predictor: str | Path | None
    importance: str | Path | None
    deterministic: bool
    no_shared_heads: bool
    no_cuda_graphs: bool


class EvaluationKeywords(TypedDict, total=False):
    """Options of `Plan.evaluate` on its weights: fields of `EvaluationOptions`."""

    importance: str | Path | None
    cache_dir: str | Path | None
    adapter: str | Path | None


def lists_options(keywords: Any, *classes: Any) -> Callable[[F], F]:
    """Have `help()` and notebooks list the names of `keywords`, with the defaults that the
    dataclasses `classes` have, where the code of a function has `**options`.
    """
    known = {each.name: each.default for kind in classes for each in fields(kind)}
    listed = [
        Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            # One of sampling, of no class, is not set where nothing is said.
            default=None if known.get(name) is MISSING else known.get(name),
            annotation=type_,
        )
        for name, type_ in get_type_hints(keywords).items()
    ]

    def decorate(function: F) -> F:
        plain = signature(function)
        *own, rest = plain.parameters.values()
        assert rest.kind is Parameter.VAR_KEYWORD, "the function takes options by name"
        function.__signature__ = plain.replace(parameters=[*own, *listed])  # type: ignore[attr-defined]
        return function

    return decorate
