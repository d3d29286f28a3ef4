"""The integer programme of LLM-PQ section 4.3, its relaxation and its solvers."""
