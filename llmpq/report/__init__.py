"""Plans with their reasons as pages, and Pareto fronts as pictures, that need only a browser."""

from llmpq.report.front import write_front
from llmpq.report.page import report_page, write_report

__all__ = ["report_page", "write_front", "write_report"]
