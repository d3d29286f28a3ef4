"""Plans and runs as tables for a terminal of 80 columns or more."""

from llmpq.tables.bounds import latency_front_table
from llmpq.tables.fleets import fleet_table
from llmpq.tables.layout import Fitting, Notes, new_table, stacked
from llmpq.tables.plans import comparison_table, front_table, plan_table, size_text
from llmpq.tables.runs import summary_table

__all__ = [
    "Fitting",
    "Notes",
    "comparison_table",
    "fleet_table",
    "front_table",
    "latency_front_table",
    "new_table",
    "plan_table",
    "size_text",
    "stacked",
    "summary_table",
]
