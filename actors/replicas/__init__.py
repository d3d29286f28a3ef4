"""Several pipelines of stages that share the rows of one run: handed out, given back, started again."""
