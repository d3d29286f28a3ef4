"""The explanation of a plan as one page that needs nothing but a browser."""

from llmpq.report.page import report_page, write_report

__all__ = ["report_page", "write_report"]
