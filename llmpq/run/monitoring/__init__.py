"""What a run shows while it runs: its state, progress in a terminal, slow stages, and a trace."""
