"""Plans with their reasons as pages, fronts and curves as pictures, that need only a browser."""

from llmpq.report.answers.making import making
from llmpq.report.answers.refusal import refusal_of, write_refusal
from llmpq.report.page import report_page, write_report
from llmpq.report.pictures.curve import write_curve
from llmpq.report.pictures.front import write_front

__all__ = [
    "making",
    "refusal_of",
    "report_page",
    "write_curve",
    "write_front",
    "write_refusal",
    "write_report",
]
