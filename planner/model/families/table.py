"""The table of model families. A new one is a file beside this one and an entry here."""

from __future__ import annotations

from collections.abc import Mapping

from planner.model.families.bloom import BLOOM
from planner.model.families.family import Family
from planner.model.families.gpt_neox import GPT_NEOX
from planner.model.families.llama import LLAMA
from planner.model.families.mistral import MISTRAL
from planner.model.families.opt import OPT
from planner.model.families.qwen import QWEN2, QWEN3

FAMILIES: Mapping[str, Family] = {
    family.model_type: family for family in (BLOOM, GPT_NEOX, LLAMA, MISTRAL, OPT, QWEN2, QWEN3)
}
"""The families by `model_type`. Stages cut the forward pass of transformers between layers. Tests
compare their tokens with those of `generate` for each of these families: others may lose
information at a cut without any error."""


def supported_model_types() -> tuple[str, ...]:
    """The `model_type`s that can be planned and run."""
    return tuple(sorted(FAMILIES))
