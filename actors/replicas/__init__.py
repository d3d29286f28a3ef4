"""Several pipelines of stages that share the rows of one run: who gets them, and who comes back."""
