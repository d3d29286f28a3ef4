"""The integer programme of LLM-PQ section 4.3: boundary windows, the model, and solvers."""
