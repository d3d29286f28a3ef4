"""The simpler plans of LLM-PQ section 6.1 for the same cluster, to compare with and to run."""
