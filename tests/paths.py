"""Paths of the repository's files that tests read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SPECS = ROOT / "cluster_specs"
EXAMPLES = ROOT / "examples"
DEMO_MODEL = EXAMPLES / "demo_model"
