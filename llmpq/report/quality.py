"""How good a plan's answers are, in what people know: perplexity, and the divergence behind it."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from llmpq.report.formatting import SPACE, count, listed, number, plural
from quant.scheme import FULL_BITS

if TYPE_CHECKING:  # jobs are shown without the planner
    from planner.plan.parts import PerplexityForecast, QualityForecast
    from planner.plan.spec import PlanSpec

LEAST_SHOWN = 1e-3  # more perplexity; less is said to be so
TWICE = 2.0  # from this ratio on it is told in times


class QualityWord(NamedTuple):
    """How good a plan's answers are, in a few words, and what that rests on."""

    word: str
    basis: str


def quality_word(plan: PlanSpec) -> QualityWord:
    counts = _counts(plan)
    told = f"{_shares(counts)} of {plural(plan.model.layers, 'layer')}"
    prefills = Counter[int]() if plan.prefill_plan is None else _counts(plan.prefill_plan)
    if prefills:
        told += f" where stages decode, {_shares(prefills)} where they prefill"
    rounds_ends = plan.head_bits != FULL_BITS
    if rounds_ends:
        told += f", embedding and LM head at {plan.head_bits} bit"
    if plan.weights is not None and not plan.weights.rounded and not rounds_ends:
        return QualityWord(AS_IT_IS, f"{told}: nothing is rounded again")
    if {*counts, *prefills} == {FULL_BITS} and not rounds_ends:
        return QualityWord(AS_IT_IS, f"{told}: nothing is quantized")
    if plan.quality is None:
        return QualityWord("not known", f"{told}: the plan's file does not say it; plan again")
    basis = f"{_interval(plan.quality)}; {told}; {_source(plan, plan.quality)}"
    return QualityWord(more_perplexity(plan.quality.divergence), basis)


AS_IT_IS = "as the checkpoint has it"


def with_quality(quality: QualityWord) -> str:
    """The end of a sentence on how fast a plan is."""
    if quality.word.startswith(("about", "less")):
        return f"with {quality.word} than the checkpoint"
    return f"its quality {quality.word}"


def more_perplexity(divergence: float) -> str:
    """By how much perplexity rises, of nats a token."""
    ratio = math.exp(min(divergence, _MOST_NATS))
    if ratio >= TWICE:
        return f"about {ratio:.2g} times the perplexity"
    if ratio - 1 < LEAST_SHOWN:
        return f"less than {100 * LEAST_SHOWN:g}{SPACE}% more perplexity"
    return f"about {rise(divergence)[1:]} more perplexity"


_MOST_NATS = 20.0  # of a file that was edited


def percent_more(divergence: float) -> float:
    return 100 * math.expm1(min(divergence, _MOST_NATS))


def rise(divergence: float) -> str:
    """The same for a table: "+2.1 %"."""
    more = max(0.0, percent_more(divergence))
    return f"+{f'{more:,.0f}' if more >= 10 else f'{more:.2g}'}{SPACE}%"


def loss_head(plan: PlanSpec) -> str:
    """The name of what a plan and those beside it lose."""
    return "sensitivity" if plan.quality is None else "perplexity"


def loss(plan: PlanSpec, sensitivity: float) -> str:
    """What `plan`, or one beside it, loses by its sensitivity, below `loss_head`."""
    divergence = divergence_of(plan, sensitivity)
    return number(sensitivity) if divergence is None else rise(divergence)


def divergence_of(plan: PlanSpec, sensitivity: float) -> float | None:
    """Nats a token of `plan`, or of one beside it; None where its file does not say it."""
    return None if plan.quality is None else plan.quality.scale.at(sensitivity)


def lost(sensitivity: float, divergence: float | None) -> str:
    """What a plan loses, with the name of that."""
    if divergence is None:
        return f"sensitivity {number(sensitivity)}"
    return f"perplexity {rise(divergence)}"


def _interval(quality: QualityForecast) -> str:
    return (
        f"{rise(quality.low)} to {rise(quality.high)}, a KL divergence of "
        f"{number(quality.divergence)} nats a token"
    )


def _source(plan: PlanSpec, quality: QualityForecast) -> str:
    """What the figure rests on; where that is not the model itself, how to measure it."""
    if plan.perplexity is not None:
        return expected_perplexity(plan.perplexity)
    scale = quality.scale
    if scale.basis == "layers":
        return f"summed over its layers, measured one by one: {scale.source}"
    why = "not measured" if scale.basis == "sizes" else f"{scale.source} has no unit"
    model = plan.model.source if plan.weights is None else MODEL_BEFORE
    measure = shlex.join(["llmpq", "indicator", "--model", model])
    return (
        f"{why}, estimated from other models by bits and size: "
        f"{measure} --calibration TEXT -o omega.json measures it, for --omega_file"
    )


MODEL_BEFORE = "FOLDER_AT_16_BIT"
"""The checkpoint that a quantized one was made of, which alone can be measured."""


def expected_perplexity(forecast: PerplexityForecast) -> str:
    """The rise of perplexity, its interval, and the bound where one was asked for."""
    text = (
        f"{forecast.increase:+.3g} over {number(forecast.baseline)} at 16 bit expected "
        f"({forecast.low:+.3g} to {forecast.high:+.3g}, from {forecast.points} measured points)"
    )
    if forecast.max_increase is None or forecast.max_omega is None:
        return text
    return f"{text}; at most {forecast.max_increase:+.3g} asked for"


def _counts(plan: PlanSpec) -> Counter[int]:
    """Layers by their fewest bits."""
    chosen = (choice for stage in plan.stages for choice in stage.choices)
    return Counter(min(choice.bits, choice.expert_bits) for choice in chosen)


def _shares(counts: Counter[int]) -> str:
    return listed([f"{count(counts[bits])} at {bits} bit" for bits in sorted(counts, reverse=True)])
