"""Counters, gauges and histograms that Prometheus reads from the server, and from Ray's nodes where
they are Ray's metrics too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_PREFIX = "llmpq_serve_"
_MODEL = "model"


class Instruments:
    """Makes instruments of one server; `model`, where it is given, has them be Ray's as well, under
    a tag with that name, for which Ray must be initialised.
    """

    def __init__(self, model: str | None = None) -> None:
        self._registry = CollectorRegistry()
        self._model = model

    def counter(self, name: str, text: str, *labels: str) -> Adding:
        """An instrument that only grows."""
        own = Counter(_PREFIX + name, text, labels, registry=self._registry)
        return Adding(own, self._of_ray("Counter", name, text, tag_keys=labels))

    def gauge(self, name: str, text: str, label: str) -> Setting:
        """An instrument of a present state."""
        own = Gauge(_PREFIX + name, text, (label,), registry=self._registry)
        return Setting(own, self._of_ray("Gauge", name, text, tag_keys=(label,)))

    def histogram(self, name: str, text: str, boundaries: Sequence[float]) -> Observing:
        """An instrument of how values are distributed."""
        own = Histogram(_PREFIX + name, text, buckets=boundaries, registry=self._registry)
        of_ray = self._of_ray("Histogram", name, text, boundaries=list(boundaries), tag_keys=())
        return Observing(own, of_ray)

    def text(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self._registry)

    def _of_ray(self, kind: str, name: str, text: str, **options: Any) -> Any:
        if self._model is None:
            return None
        from ray.util import metrics

        options["tag_keys"] += (_MODEL,)
        made = getattr(metrics, kind)(_PREFIX + name, text, **options)
        return made.set_default_tags({_MODEL: self._model})


class Adding:
    """A counter."""

    def __init__(self, own: Counter, of_ray: Any) -> None:
        self._own, self._of_ray = own, of_ray

    def add(self, amount: int, **labels: str) -> None:
        """Add `amount`, which may be 0."""
        self._own.labels(**labels).inc(amount)
        if self._of_ray is not None and amount:
            self._of_ray.inc(amount, labels)


class Setting:
    """A gauge."""

    def __init__(self, own: Gauge, of_ray: Any) -> None:
        self._own, self._of_ray = own, of_ray

    def set(self, value: int, **labels: str) -> None:
        """Replace the value."""
        self._own.labels(**labels).set(value)
        if self._of_ray is not None:
            self._of_ray.set(value, labels)


class Observing:
    """A histogram."""

    def __init__(self, own: Histogram, of_ray: Any) -> None:
        self._own, self._of_ray = own, of_ray

    def observe(self, value: float) -> None:
        """Count `value`."""
        self._own.observe(value)
        if self._of_ray is not None:
            self._of_ray.observe(value)
