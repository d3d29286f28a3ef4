"""How GPUs may share layers: degrees of tensor parallelism on more or fewer of them."""

from __future__ import annotations

from benchmarks.reproduction.latency_bounds.models import Model
from benchmarks.reproduction.latency_bounds.pipelines import Layout

DEGREES = (2, 4, 8)
SHARES = (1.0, 0.75, 0.5, 0.25)
"""Shares of the GPUs that are in groups."""


def layouts_of(model: Model, gpus: int) -> tuple[Layout, ...]:
    """Layouts of so many GPUs, each once: without groups, and with groups of every degree that a
    node has room for on a part of the GPUs or all.
    """
    found = [Layout()]
    for degree in DEGREES:
        if degree <= model.whole_node:
            counts = (degree * round(share * (gpus // degree)) for share in SHARES)
            found += [Layout(degree, count) for count in counts if count]
    return tuple(dict.fromkeys(found))


def layouts_with(model: Model, degree: int) -> tuple[Layout, ...]:
    """Layouts with groups of one degree on all GPUs, then on fewer and fewer, at last on none."""
    groups = model.count // degree
    counts = [round(share * groups) for share in (*SHARES, 0.0)]
    return tuple(Layout(degree, degree * count) for count in dict.fromkeys(counts))
