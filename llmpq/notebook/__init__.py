"""How plans, clusters and results look in a notebook, in a light one as in a dark one."""

from llmpq.notebook.views import cluster_html, plan_html, result_html, summary_html

__all__ = ["cluster_html", "plan_html", "result_html", "summary_html"]
