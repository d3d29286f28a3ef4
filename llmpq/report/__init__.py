"""Plans with their reasons as pages, fronts and curves as pictures, that need only a browser."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmpq.report.answers.making import making
    from llmpq.report.answers.refusal import refusal_of, write_refusal
    from llmpq.report.page import report_page, write_report
    from llmpq.report.pictures.bounds import write_latency_front
    from llmpq.report.pictures.curve import write_curve
    from llmpq.report.pictures.front import write_front

__all__ = [
    "making",
    "refusal_of",
    "report_page",
    "write_curve",
    "write_front",
    "write_latency_front",
    "write_refusal",
    "write_report",
]

_MODULES = {
    "making": "answers.making",
    "refusal_of": "answers.refusal",
    "report_page": "page",
    "write_curve": "pictures.curve",
    "write_front": "pictures.front",
    "write_latency_front": "pictures.bounds",
    "write_refusal": "answers.refusal",
    "write_report": "page",
}
"""Where each name is from. It is imported when it is used first, so that who only needs numbers in
words, as `llmpq jobs`, does not wait for the planner."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
