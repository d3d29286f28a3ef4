"""Mistral: LLaMA with a sliding window."""

from __future__ import annotations

from dataclasses import replace

from planner.model.config_file import ConfigFile
from planner.model.families.family import Family
from planner.model.families.gated import GATED_ARCHITECTURE, gated_shape, sliding_window
from planner.model.shape import ModelShape


def _shape(config: ConfigFile) -> ModelShape:
    return replace(gated_shape(config), sliding_window=sliding_window(config))


MISTRAL = Family(model_type="mistral", read_shape=_shape, architecture=GATED_ARCHITECTURE)
