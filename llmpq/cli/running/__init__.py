"""Commands that plan, run and serve."""
