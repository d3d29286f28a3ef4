"""Heuristics and baselines of LLM-PQ: adabits, bitwidth transfer, uniform, PipeEdge."""
